"""`rlbuffer doctor` scores what was sampled: old weights under a new number are proved, sound ones are not accused."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import STEPS, record

import rlbuffer
from rlbuffer.archive import Archive
from rlbuffer.checks.check import failure
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.replay import proof
from rlbuffer.replay.proof import weights_proof
from rlbuffer.worker.samplers.base import Sampling
from rlbuffer.worker.samplers.decoding import Decoder
from rlbuffer_cli.commands.doctor import of_run
from rlbuffer_cli.main import main

LAST_LOADED = 1
"""The version behind which the faulty sampler loads nothing."""


class Sampled:
    """Pushes for each version two thirds of a step of that version, and a third of the one before, sampled by a real
    model. The sampler says that it has every version; where `stuck`, it has none behind LAST_LOADED."""

    def __init__(self, *, stuck: bool) -> None:
        self._stuck, self._decoder, self._rng = stuck, Decoder(seed=1), np.random.default_rng(1)

    def __call__(self, buffer: rlbuffer.Buffer, stop: threading.Event) -> None:
        writer, version, older = buffer.writer("w"), 0, list[rlbuffer.Group]()
        while version < STEPS:
            if buffer.policy.version < version:
                if stop.wait(0.01):
                    return
                continue
            policy = buffer.policy.current()
            if not self._stuck or version <= LAST_LOADED:
                self._decoder.load(policy)
            made = [self._group(version, number) for number in range(8)]
            for group in [*(older or made[6:]), *made[:4]]:
                writer.push(group)
            older = made[4:6]
            version += 1

    def _group(self, version: int, number: int) -> rlbuffer.Group:
        prompt = self._rng.integers(0, 8, 4).astype(np.int32)
        ((*completions,),) = self._decoder.sample([prompt], n=4, sampling=Sampling(max_new_tokens=16))
        rollouts = [
            Rollout.from_completion(
                prompt_ids=prompt,
                token_ids=done.tokens,
                logprobs=np.minimum(done.logprobs, 0),
                reward=float(self._rng.random()),
                policy_version=version,
            )
            for done in completions
        ]
        place = str(8 * version + number)
        return rlbuffer.Group(group_id=f"a.{place}", env="a", prompt_id=place, rollouts=tuple(rollouts), planned_size=4)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    homes = {}
    for kind in ("stuck", "sound"):
        homes[kind] = home = tmp_path_factory.mktemp(kind)
        optimizer = {"learning_rate": 0.02, "schedule": "constant"}
        record(home, work=Sampled(stuck=kind == "stuck"), step_groups=6, optimizer=optimizer)
    return homes


def doctor(home: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """Check -> level and text of what doctor finds in the archive."""
    main(["doctor", "--archive", str(home / "archive"), "--json"])
    findings = map(json.loads, capsys.readouterr().out.splitlines())
    return {finding["check"]: (finding["level"], finding["text"] + finding["fix"]) for finding in findings}


def test_old_weights_under_a_new_number_are_proved_by_the_version_that_sampled(
    homes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    home = homes["stuck"]
    found = doctor(home, capsys)
    assert found["learning"][0] == "failure"
    assert "New weights do not arrive in the sampler" in found["learning"][1]
    assert f"Look: `rlbuffer plot drift.0.rms {home / 'archive'}/`." in found["learning"][1]
    assert main(["plot", "drift.0.rms", f"{home / 'archive'}/"]) == 0
    level, text = found["weights"]
    assert level == "failure"
    sampled = f"256 tokens of step {STEPS} that version {STEPS - 1} is said to have sampled are those of version 1: "
    assert text.startswith(sampled)
    assert f"--score {STEPS} --versions 0,1,2,3,4,5" in text
    main(["replay", str(home / "archive"), "--score", str(STEPS), "--versions", "1,5"])
    assert "Version 5 is said to have sampled tokens that version 1 fits better" in capsys.readouterr().out


def test_a_run_at_work_is_proved_by_its_archive(homes: dict[str, Path]) -> None:
    found = replace(failure("weights"), problem=Problem(kind=Trouble.STUCK_WEIGHTS, step=STEPS, detail=""))

    def told(folder: Path | None) -> tuple[str, str]:
        given = replace(found, archive=str(folder or ""))
        first, second = of_run([given])
        assert first is given
        return str(second.level), second.text

    level, text = told(homes["stuck"] / "archive")
    assert level == "failure"
    assert "are those of version 1" in text
    assert told(None) == ("warning", "not proved: the run has no archive, so what was sampled cannot be scored")
    level, text = told(homes["sound"] / "archive")
    assert level == "warning"
    assert "has no step yet that shows it" in text
    assert told(homes["sound"] / "nothing")[0] == "warning"


def test_without_the_version_that_sampled_nothing_is_proved_and_what_lacks_is_named(
    homes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kept, away = homes["stuck"] / "runs" / "recorded", homes["stuck"] / "away"
    shutil.copytree(kept, away)
    try:
        for version in "45":
            (weights,) = kept.glob(f"weights/v0000000{version}-*")
            shutil.move(weights, away)
        shutil.move(kept / "checkpoints" / "step-00000004", away)
        level, text = doctor(homes["stuck"], capsys)["weights"]
        assert level == "failure"  # of an older step the version that is named is kept
        assert "256 tokens of step 4 that version 3 is said to have sampled are those of version 1" in text
        for path in [*away.glob("v0*"), away / "step-00000004"]:
            shutil.move(path, kept / ("weights" if path.name[0] == "v" else "checkpoints"))
        for path in [*kept.glob("weights/v0000000[123]-*"), *kept.glob("checkpoints/*2")]:
            shutil.rmtree(path)
        level, text = doctor(homes["stuck"], capsys)["weights"]
        assert level == "warning"
        assert text.startswith(
            f"not proved: 256 tokens of step {STEPS} that version 5 is said to have sampled: scored by"
        )
        assert "None that is kept has sampled them" in text
        for path in [*kept.glob("weights/*"), *kept.glob("checkpoints/*")]:
            shutil.rmtree(path)
        level, text = doctor(homes["stuck"], capsys)["weights"]
        assert level == "warning"
        sampled = f"of the versions that sampled steps 3 to {STEPS} (1, 2, 3, 4, 5) none is kept in "
        assert text.startswith(f"not proved: {sampled}")
        assert f"rlbuffer replay {homes['stuck'] / 'archive'} --score {STEPS} --versions" in text
    finally:
        shutil.rmtree(kept)
        shutil.move(away, kept)


def test_versions_that_are_kept_but_were_not_scored_are_counted_and_named(
    homes: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Six versions are kept of such a short run. Of three the spread takes 0, 2 or 3, and 5; version 1 has sampled.
    monkeypatch.setattr(proof, "MOST_VERSIONS", 3)
    archive = Archive(homes["stuck"] / "archive")
    found = weights_proof(archive, STEPS, STEPS)
    scored = [fit.version for fit in found.fits]
    assert len(scored) == 3
    assert sorted([*scored, *found.further]) == [*range(STEPS)]
    assert found.to_score == (*found.further, found.named)
    assert "None of the 3 versions that were scored has sampled them; not scored, but kept: 3 other older" in str(found)
    _, text = doctor(homes["stuck"], capsys)["weights"]
    assert f"--score {STEPS} --versions {','.join(map(str, found.to_score))}" in text
    # What it says to type finds the version that has sampled.
    main(["replay", str(archive.folder), "--score", str(STEPS), "--versions", ",".join(map(str, found.to_score))])
    assert "Version 5 is said to have sampled tokens that version 1 fits better" in capsys.readouterr().out


def test_a_score_says_that_none_of_its_versions_has_sampled_and_which_to_try(
    homes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(homes["stuck"] / "archive"), "--score", str(STEPS), "--versions"]
    main([*command, "4,5"])
    text = " ".join(capsys.readouterr().out.split())
    assert "None of these has sampled what version 5 is said to have sampled: from version" in text
    assert "Others are kept: try --versions 0,1,2,3" in text
    main([*command, "1,5"])
    assert "None of these has sampled" not in capsys.readouterr().out


def test_what_a_sound_sampler_has_sampled_is_its_own(
    homes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    home = homes["sound"]
    assert [*doctor(home, capsys)] == ["learning"]
    for step in range(1, STEPS + 1):
        shown = weights_proof(Archive(home / "archive"), 1, step)
        assert shown.has_arrived
        assert shown.other is None
        assert (shown.step, shown.named) == (step, step - 1)
    main(["replay", str(home / "archive"), "--score", str(STEPS), "--versions", "0,1,2,3,4,5"])
    assert "is said to have sampled" not in capsys.readouterr().out
