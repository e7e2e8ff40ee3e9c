"""Versions are written while the next step trains: what they hold, in which order they are heard of, what fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_full_disks import During, disk, recorded, waits, wanted
from torch import Tensor

from rlbuffer.errors import AttemptFenced, WeightsError
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.trainer import loop, publishing
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.weights.layout import versions
from rlbuffer.weights.model import narrow_dtype

__all__ = ["disk"]
PATIENCE_SECONDS = 60.0
NEVER = 10**6
STEPS = 4


class Late:
    """Holds each version back until the step behind the one that made it has changed the parameters.

    What the parameters were after each step is kept.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, steps: int, events: list[Any]) -> None:
        self.states: dict[int, dict[str, Tensor]] = {}
        self._changed = [threading.Event() for _ in range(steps + 1)]
        self._steps, self._events = steps, events
        take_step = loop.take_step
        self._write = {name: getattr(publishing, name) for name in ("publish_model", "publish_adapter")}

        def taken(policy: Any, *args: Any, step: int, **kwargs: Any) -> float:
            norm = take_step(policy, *args, step=step, **kwargs)
            self.states[step] = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
            events.append(("trained on", step))
            self._changed[step].set()
            return norm

        monkeypatch.setattr(loop, "take_step", taken)
        for name in self._write:
            monkeypatch.setattr(publishing, name, self._late(name))

    def _late(self, name: str) -> Callable[..., PolicyVersion]:
        def write(folder: Path, version: int, **values: Any) -> PolicyVersion:
            if 0 < version < self._steps:
                assert self._changed[version + 1].wait(PATIENCE_SECONDS)
            return self._write[name](folder, version, **values)

        return write


class Heard(FakeRun):
    """Notes what it is told."""

    events: list[Any]

    def announce(self, version: int, **_: Any) -> bool:
        self.events.append(("announced", version))
        return True

    def trained(self, step: Step) -> None:
        self.events.append(("acknowledged", step.number))
        super().trained(step)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    noted: list[Any] = []
    monkeypatch.setattr(Heard, "events", noted, raising=False)
    return noted


def settings(folder: Path, *, dtype: str = "float32", **trainer: Any) -> Any:
    values = {"steps": STEPS, "publish": {"every": 1}, "checkpoint": {"every": NEVER}} | trainer
    made = wanted(folder, **values)
    return made.model_copy(update={"model": made.model.model_copy(update={"dtype": dtype})})


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_version_has_the_weights_of_its_step_however_late_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any], dtype: str
) -> None:
    late = Late(monkeypatch, steps=STEPS, events=events)
    chosen = settings(tmp_path, dtype=dtype)
    assert train(chosen, rank=0, world_size=1, source=Heard)
    narrow = narrow_dtype(chosen.model)
    for step in range(1, STEPS + 1):
        (directory,) = versions(tmp_path / "weights")[step]
        written = load_file(directory / "model.safetensors")
        assert len(written) > 5
        for name, tensor in written.items():
            assert torch.equal(tensor, late.states[step][name].to(narrow)), f"{name} of version {step}"
    assert not torch.equal(*(late.states[step]["model.norm.weight"] for step in (1, 2)))


def test_an_adapter_has_the_weights_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any]
) -> None:
    late = Late(monkeypatch, steps=STEPS, events=events)
    assert train(settings(tmp_path, lora={"rank": 2}), rank=0, world_size=1, source=Heard)
    for step in (1, 2):
        (directory,) = versions(tmp_path / "weights")[step]
        written = load_file(directory / "adapter_model.safetensors")
        theirs = [tensor for name, tensor in late.states[step].items() if ".lora_B." in name]
        ours = [tensor for name, tensor in written.items() if ".lora_B." in name]
        assert len(ours) == len(theirs) > 0
        assert all(any(torch.equal(a, b) for b in theirs) for a in ours)


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_is_acknowledged_behind_its_version_and_in_order_while_the_next_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any], every: int
) -> None:
    Late(monkeypatch, steps=STEPS, events=events)
    assert train(settings(tmp_path, publish={"every": every}), rank=0, world_size=1, source=Heard)
    assert [number for what, number in events if what == "announced"] == [0, *range(every, STEPS + 1, every)]
    assert [number for what, number in events if what == "acknowledged"] == list(range(1, STEPS + 1))
    for version in range(every, STEPS, every):
        places = [
            events.index(event)
            for event in (
                ("trained on", version),
                ("trained on", version + 1),
                ("announced", version),
                ("acknowledged", version),
                ("acknowledged", version + 1),
            )
        ]
        assert places == sorted(places)


def test_a_checkpoint_waits_for_the_version_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any]
) -> None:
    saved = loop.checkpoint

    def noted(*args: Any) -> Path:
        events.append(("saved", args[1].step))
        return saved(*args)

    monkeypatch.setattr(loop, "checkpoint", noted)
    assert train(settings(tmp_path, checkpoint={"every": 2}), rank=0, world_size=1, source=Heard)
    for step in (2, STEPS):
        assert events.index(("acknowledged", step)) < events.index(("saved", step))


@pytest.mark.parametrize("error", [WeightsError("the disk is of another kind"), AttemptFenced("another one is there")])
def test_what_a_version_fails_of_ends_the_trainer_behind_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any], error: Exception
) -> None:
    write = publishing.publish_model

    def failing(folder: Path, version: int, **values: Any) -> PolicyVersion:
        if version == 2:
            raise error
        return write(folder, version, **values)

    monkeypatch.setattr(publishing, "publish_model", failing)
    with pytest.raises(type(error)) as caught:
        train(settings(tmp_path), rank=0, world_size=1, source=Heard)
    assert caught.value is error
    assert ("trained on", 3) not in events
    assert [number for what, number in events if what == "acknowledged"] == [1]


class Waiting(Heard):
    """Gives a step only when the version before it is announced: nothing older would be young enough."""

    def steps(self, start: int | None = None, *, until: Callable[[], bool] | None = None) -> Iterator[Step]:
        assert until is not None
        for step in super().steps(start):
            while ("announced", step.number - 1) not in self.events:
                if until():
                    return
                threading.Event().wait(0.002)
            yield step


def test_a_step_that_waits_for_a_version_which_fails_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any]
) -> None:
    monkeypatch.setattr(Waiting, "events", events, raising=False)
    write = publishing.publish_model

    def failing(folder: Path, version: int, **values: Any) -> PolicyVersion:
        if version == 2:
            raise WeightsError("the disk is of another kind")
        return write(folder, version, **values)

    monkeypatch.setattr(publishing, "publish_model", failing)
    with pytest.raises(WeightsError, match="of another kind"):
        train(settings(tmp_path), rank=0, world_size=1, source=Waiting)


def test_a_version_for_which_there_is_no_room_is_written_again_while_a_step_waits_for_it(
    disk: Callable[[bool], None],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: list[Any],
) -> None:
    caplog.set_level("INFO", "rlbuffer")
    monkeypatch.setattr(Waiting, "events", events, raising=False)
    with During(
        (lambda: ("announced", 1) in events, lambda: disk(True)),
        (lambda: waits(caplog), lambda: disk(False)),
    ):
        assert train(settings(tmp_path, steps=9), rank=0, world_size=1, source=Waiting)
    assert len(waits(caplog)) == 1
    assert f"there is room in {tmp_path} again: training goes on" in caplog.messages
    assert recorded(tmp_path) == list(range(1, 10))
    assert [number for what, number in events if what == "acknowledged"] == list(range(1, 10))


def test_a_record_says_what_the_stages_of_the_newest_version_took(tmp_path: Path) -> None:
    assert train(settings(tmp_path), rank=0, world_size=1, source=FakeRun)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["published"] for line in lines] == [0, 1, 2, 3]
    assert lines[-1]["publish_seconds"].keys() == {"gather", "write", "hash", "delta", "flush", "announce"}
