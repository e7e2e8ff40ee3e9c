"""Policy versions on disk: complete or absent, verified before use, old ones removed but never too many."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlbuffer.config.settings import ModelSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights import files
from rlbuffer.weights.files import ABANDONED_SECONDS, load_state, open_weights, publish, read_config
from rlbuffer.weights.layout import MAX_FILES, ListedFile, parse_list, versions
from rlbuffer.weights.model import TINY_QWEN3, build_model, config_of, load_into, model_from_config

CONFIG = {"model_type": "qwen3"}


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((2, 3), value), "b.bias": torch.arange(3.0)}


def put(directory: Path, version: int, *, keep: int = 3, value: float | None = None) -> PolicyVersion:
    return publish(directory, version, state=state(value if value is not None else version), config=CONFIG, keep=keep)


def test_what_was_published_comes_back(tmp_path: Path) -> None:
    policy = put(tmp_path, 7)
    assert policy.version == 7
    assert policy.size == (Path(policy.location) / "model.safetensors").stat().st_size
    directory = open_weights(policy)
    loaded = load_state(directory)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in state(7).items()
    }
    assert read_config(directory) == CONFIG
    assert directory.name == f"v00000007-{policy.checksum[:12]}"


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_versions_stay_and_older_ones_go(tmp_path: Path, keep: int) -> None:
    for version in range(0, 12, 2):
        put(tmp_path, version, keep=keep)
        newest = list(range(0, version + 1, 2))[-keep:]
        assert list(versions(tmp_path)) == newest


def test_going_back_to_a_checkpoint_pulls_nothing_away_from_samplers(tmp_path: Path) -> None:
    for version in (10, 11, 12, 13):
        put(tmp_path, version, keep=2)
    serving = put(tmp_path, 13, keep=2)
    put(tmp_path, 11, keep=2, value=-1.0)
    assert list(versions(tmp_path)) == [11, 12, 13]
    assert open_weights(serving) == Path(serving.location)


def test_a_version_trained_again_differently_lies_beside_the_announced_one(tmp_path: Path) -> None:
    first, again, same = put(tmp_path, 5, value=1.0), put(tmp_path, 5, value=2.0), put(tmp_path, 5, value=1.0)
    assert first == same
    assert first.location != again.location
    assert open_weights(first) != open_weights(again)
    assert len(versions(tmp_path)[5]) == 2


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_whoever_may_read_the_folder_may_read_all_of_a_version(tmp_path: Path, umask: int) -> None:
    """Workers of another user, a web server over the folder."""
    before = os.umask(umask)
    try:
        put(tmp_path / "weights", 5)
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "weights").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o666 & ~umask}


def test_what_a_dead_publisher_left_is_removed_when_it_is_old_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, young = tmp_path / ".tmp-3-dead", tmp_path / ".tmp-4-alive"
    for path in (old, young):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    past = time.time() - ABANDONED_SECONDS - 60
    os.utime(old, (past, past))

    def saved(*arguments: Any, **options: Any) -> None:
        assert not old.exists()
        save_file(*arguments, **options)

    monkeypatch.setattr(files, "save_file", saved)
    put(tmp_path, 5)
    assert young.exists()
    assert list(versions(tmp_path)) == [5]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    policy = put(tmp_path, 3)
    file = Path(policy.location) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError):
        open_weights(policy)
    with pytest.raises(WeightsError, match="cannot be loaded"):
        load_state(file.parent)


def test_one_changed_byte_is_refused(tmp_path: Path) -> None:
    policy = put(tmp_path, 3)
    file = Path(policy.location) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightsError, match=f"announced was {policy.checksum}"):
        open_weights(policy)


def test_a_directory_that_cannot_be_written_is_a_weights_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"^version 1 cannot be written to .*file: "):
        put(tmp_path / "file", 1)


@pytest.mark.parametrize(("version", "keep"), [(-1, 2), (0, 0)])
def test_impossible_arguments_are_refused(tmp_path: Path, version: int, keep: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        publish(tmp_path, version, state=state(), config=CONFIG, keep=keep)
    assert not list(tmp_path.iterdir())


# -- the model -------------------------------------------------------------------------------------------------------
def tiny(**changes: object) -> ModelSettings:
    return ModelSettings(config={**TINY_QWEN3, **changes})


def test_the_seed_alone_decides_fresh_weights_and_the_global_state_stays() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (build_model(tiny(), seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    name = "model.embed_tokens.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_a_model_survives_publishing_with_its_config(tmp_path: Path) -> None:
    model = build_model(tiny(), seed=3)
    policy = publish(tmp_path, 0, state=model.state_dict(), config=config_of(model), keep=2)
    directory = open_weights(policy)
    assert read_config(directory)["architectures"] == ["Qwen3ForCausalLM"]
    assert "lm_head.weight" not in load_state(directory)
    again = model_from_config(read_config(directory))
    load_into(again, load_state(directory))
    stock = build_model(ModelSettings(path=str(directory)), seed=9)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
        assert torch.equal(tensor, stock.state_dict()[name]), name


def test_loading_converts_the_dtype(tmp_path: Path) -> None:
    wide = build_model(ModelSettings(config=dict(TINY_QWEN3), dtype="float64"), seed=0)
    narrow = build_model(tiny(), seed=1)
    load_into(narrow, wide.state_dict())
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow.state_dict()["model.norm.weight"], wide.state_dict()["model.norm.weight"].float())


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("model.norm.weight"),
        lambda s: s.update({"extra.weight": torch.zeros(1)}),
        lambda s: s.update({"model.norm.weight": torch.zeros(63)}),
        lambda s: s.update({"model.norm.weight": torch.full((64,), float("nan"))}),
    ],
)
def test_weights_that_do_not_fit_leave_the_model_as_it_was(change: object) -> None:
    model, foreign = build_model(tiny(), seed=0), dict(build_model(tiny(), seed=1).state_dict())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(foreign)  # type: ignore[operator]
    with pytest.raises(WeightsError):
        load_into(model, foreign)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (ModelSettings(), "model"),
        (tiny().model_copy(update={"path": "x"}), "model"),
        (ModelSettings(config={"hidden_size": 4}), "model.config.model_type"),
        (ModelSettings(path="/nowhere/at/all"), "model.path"),
    ],
)
def test_settings_that_make_no_model_are_refused(settings: ModelSettings, setting: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(settings, seed=0)
    assert error.value.setting == setting


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def point(file: Path) -> None:
    """As a clone without Git LFS has it."""
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n")


def without(name: str) -> Callable[[Path], None]:
    def lose(file: Path) -> None:
        save_file({key: t for key, t in load_file(file).items() if name not in key}, file, {"format": "pt"})

    return lose


def rename(file: Path) -> None:
    """As a wrapped model's state is saved."""
    save_file({f"_orig_mod.{key}": tensor for key, tensor in load_file(file).items()}, file, {"format": "pt"})


def reshape(file: Path) -> None:
    save_file(load_file(file) | {"model.norm.weight": torch.ones(3)}, file, {"format": "pt"})


@pytest.mark.parametrize("wound", [cut, point, without("layers.1."), without("lm_head"), rename, reshape])
def test_a_model_whose_files_are_not_all_of_it_is_refused(tmp_path: Path, wound: Callable[[Path], None]) -> None:
    """The library draws what it does not find: a run would train a model that knows nothing."""
    model = model_from_config({**TINY_QWEN3, "tie_word_embeddings": False})
    model.save_pretrained(tmp_path)
    assert build_model(ModelSettings(path=str(tmp_path)), seed=0).training
    wound(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))) as error:
        build_model(ModelSettings(path=str(tmp_path)), seed=0)
    assert error.value.setting == "model.path"


@pytest.mark.parametrize("config", [{"model_type": "no-such-thing"}, {**TINY_QWEN3, "num_attention_heads": 0}])
def test_a_config_that_makes_no_causal_lm_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^model\.config: "):
        build_model(ModelSettings(config=config), seed=0)


# -- lists of files ---------------------------------------------------------------------------------------------------
NAME = "v00000005-0123456789ab"
GOOD = "0123456789ab" + "0" * 52
WEIGHTS = {"model.safetensors": {"size": 3, "sha256": GOOD}}


def test_a_list_gives_every_file_with_size_and_checksum() -> None:
    text = json.dumps({"files": WEIGHTS | {"config.json": {"size": 2, "sha256": "f" * 64}}})
    assert parse_list(text, name=NAME) == (
        ListedFile(name="model.safetensors", size=3, sha256=GOOD),
        ListedFile(name="config.json", size=2, sha256="f" * 64),
    )


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"files": 3}',
        "\xff",
        {"config.json": {"size": 2, "sha256": "f" * 64}},
        {"model.safetensors": {"size": 3, "sha256": "f" * 64}},
        WEIGHTS | {f"f{n}": {"size": 2, "sha256": "f" * 64} for n in range(MAX_FILES)},
        WEIGHTS | {"../config.json": {"size": 2, "sha256": "f" * 64}},
        WEIGHTS | {".lock": {"size": 2, "sha256": "f" * 64}},
        WEIGHTS | {"config.json": {"size": -1, "sha256": "f" * 64}},
        WEIGHTS | {"files.json": {"size": 1, "sha256": "f" * 64}},
    ],
)
def test_a_list_that_cannot_be_is_refused(content: object) -> None:
    text = content if isinstance(content, str) else json.dumps({"files": content})
    with pytest.raises(WeightsError):
        parse_list(text, name=NAME)
