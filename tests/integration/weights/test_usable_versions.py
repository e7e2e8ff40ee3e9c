"""A version has what else the model's directory has: the library opens it as it opens the model, template included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chat_model import (
    CHAT_CONFIG,
    CHAT_IDS,
    COMPANIONS,
    GENERATION,
    MESSAGES,
    OF_THE_TOKENIZER,
    TEMPLATE,
    files_of,
    write_chat_model,
    write_tokenizer,
)
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.errors import WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.companions import companions
from rlbuffer.weights.layout import check, parse_list
from rlbuffer.weights.model import model_from_config
from rlbuffer.weights.serving import FileServer, make_app

WEIGHTS = {"model.safetensors", "config.json", "files.json"}


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Buffer]:
    with rlbuffer.connect("memory://", run="own", config={"home": tmp_path / "home"}) as buffer:
        buffer.reader()
        yield buffer


def loaded(name: str | Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, local_files_only=True)
    return model


def published(buffer: Buffer, model: PreTrainedModel, version: int = 0, **options: object) -> Path:
    assert buffer.policy.publish(model, version, **options)  # type: ignore[arg-type]
    return Path(buffer.policy.current().location)


def must_be_usable(directory: Path, like: PreTrainedModel) -> None:
    """The library opens it by its auto classes: weights, template and generation config."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"] == CHAT_IDS
    model = loaded(directory)
    assert model.generation_config.temperature == GENERATION["temperature"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), like.parameters(), strict=True))


def test_a_version_of_ones_own_loop_opens_as_the_model_that_it_was_loaded_from(buffer: Buffer, tmp_path: Path) -> None:
    model = loaded(write_chat_model(tmp_path / "model"))
    directory = published(buffer, model)
    assert files_of(directory) == WEIGHTS | COMPANIONS
    must_be_usable(directory, model)
    policy = buffer.policy.current()
    listed = {file.name for file in parse_list((directory / "files.json").read_bytes(), name=directory.name)}
    assert listed == files_of(directory) - {"files.json"}
    check(directory, policy)


def test_a_version_opens_that_was_loaded_from_a_version(buffer: Buffer, tmp_path: Path) -> None:
    first = published(buffer, loaded(write_chat_model(tmp_path / "model")))
    again = published(buffer, loaded(first), 1)
    assert files_of(again) == WEIGHTS | COMPANIONS


def test_a_name_on_the_hub_is_found_in_the_cache(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a snapshot's files are links to blobs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commit, repository = "a" * 40, tmp_path / "hub" / "models--some--model"
    write_chat_model(tmp_path / "model")
    for name in files_of(tmp_path / "model"):
        blob, link = repository / "blobs" / name.replace("/", "-"), repository / "snapshots" / commit / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes((tmp_path / "model" / name).read_bytes())
        link.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model = AutoModelForCausalLM.from_pretrained("some/model", cache_dir=tmp_path / "hub", local_files_only=True)
    assert model.name_or_path == "some/model"
    directory = published(buffer, model)
    assert files_of(directory) == WEIGHTS | COMPANIONS
    assert not any(path.is_symlink() for path in directory.rglob("*"))
    must_be_usable(directory, model)


@pytest.mark.parametrize("name", ["", "gone/from/here", "nobody/has-this", "not a name!"])
def test_a_model_without_a_directory_has_weights_alone(buffer: Buffer, name: str) -> None:
    model = model_from_config(CHAT_CONFIG)
    model.name_or_path = name
    assert files_of(published(buffer, model)) == WEIGHTS


def test_the_settings_or_the_loop_say_where_a_tokenizer_is(tmp_path: Path) -> None:
    model, path = model_from_config(CHAT_CONFIG), write_chat_model(tmp_path / "model")
    config = {"home": tmp_path / "home", "model": {"path": str(path)}}
    other = "{{ messages[0].content }}"
    write_tokenizer(tmp_path / "own", other)
    with rlbuffer.connect("memory://", run="own", config=config) as buffer:
        buffer.reader()
        must_be_usable(published(buffer, model), model)
        directory = published(buffer, model, 1, tokenizer=tmp_path / "own")
        assert files_of(directory) == WEIGHTS | OF_THE_TOKENIZER | {"generation_config.json", "modeling_own.py"}
        assert AutoTokenizer.from_pretrained(directory).chat_template == other
        with pytest.raises(WeightsError, match="nowhere' is no directory"):
            buffer.policy.publish(model, 2, tokenizer=tmp_path / "nowhere")
        assert buffer.policy.version == 1


def test_a_file_is_written_once_and_the_models_own_is_left_alone(buffer: Buffer, tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "model")
    model = loaded(path)
    versions = [published(buffer, model, version) for version in (0, 1)]
    inodes = [[(directory / name).stat().st_ino for name in sorted(COMPANIONS)] for directory in (*versions, path)]
    assert inodes[0] == inodes[1]
    assert not set(inodes[1]) & set(inodes[2])

    (path / "chat_template.jinja").write_text("{{ messages }}")  # in place: what was published stays as it was
    (path / "generation_config.json").unlink()
    (path / "merges.txt").symlink_to(tmp_path / "nowhere")
    third = published(buffer, model, 2)
    assert (third / "chat_template.jinja").read_text() == "{{ messages }}"
    assert files_of(third) == (WEIGHTS | COMPANIONS) - {"generation_config.json"}
    for directory in versions:
        assert (directory / "chat_template.jinja").read_text() == TEMPLATE
        assert json.loads((directory / "generation_config.json").read_text()) == GENERATION


def test_old_versions_go_with_all_of_their_files(buffer: Buffer, tmp_path: Path) -> None:
    model = loaded(write_chat_model(tmp_path / "model"))
    for version in range(3):
        directory = published(buffer, model, version, keep=2)
    assert len([path for path in directory.parent.iterdir() if path.is_dir()]) == 2
    assert files_of(directory) == WEIGHTS | COMPANIONS


def test_another_host_downloads_all_of_a_version_and_its_tokenizer_once(buffer: Buffer, tmp_path: Path) -> None:
    model = loaded(write_chat_model(tmp_path / "model"))
    cache, fetched = VersionCache(tmp_path / "cache"), []
    for version in range(2):
        with torch.no_grad():
            model.model.norm.weight += 1
        directory = published(buffer, model, version)
        policy = buffer.policy.current()
        with FileServer(make_app(directory.parent), "127.0.0.1:0") as server:
            away = PolicyVersion(
                version=version, location=f"{server.url}/{directory.name}", size=policy.size, checksum=policy.checksum
            )
            fetched.append(Path(cache.localized(away).location))
        assert files_of(fetched[-1]) == files_of(directory)
        must_be_usable(fetched[-1], model)
    first, second = ({name: (path / name).stat().st_ino for name in COMPANIONS} for path in fetched)
    assert first == second


def test_a_later_places_tokenizer_takes_the_place_of_all_of_an_earlier_one(tmp_path: Path) -> None:
    """An adapter's template must not lose to that of its base, which the library reads first."""
    base, adapter = write_chat_model(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "adapter_config.json", "README.md"):
        (adapter / name).write_text("{}")
    found = companions(base, "", tmp_path / "nowhere", adapter)
    assert {name: path.parent.name for name, path in found.items()} == {
        "tokenizer.json": "adapter",
        "tokenizer_config.json": "adapter",
        "generation_config.json": "base",
        "modeling_own.py": "base",
    }
    (adapter / "tokenizer_config.json").unlink()
    assert "chat_template.jinja" in companions(base, adapter)
