"""LoRA adapters of a trainer on another host: downloaded with the model that they are for, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_versions import drawn_factors, published_base, write_adapter

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.adapters import state_of
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.files import open_weights
from rlbuffer.weights.layout import listed, write_list
from rlbuffer.weights.serving import FileServer, make_app


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[str]:
    """URL of a trainer's folder, `tmp_path / "trainer"`."""
    with FileServer(make_app(tmp_path / "trainer"), "127.0.0.1:0") as server:
        yield server.url


def announce(folder: Path, url: str, version: int) -> PolicyVersion:
    """Writes an adapter whose base is given by URL, and says what the trainer announces."""
    model, base = published_base(folder)
    base = replace(base, location=f"{url}/{Path(base.location).name}")
    written = write_adapter(folder, version, base, drawn_factors(model, version))
    return replace(written, location=f"{url}/{Path(written.location).name}")


def names(cache: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in cache.iterdir() if not path.name.startswith("."))


def test_an_adapter_is_downloaded_with_its_base_which_stays(tmp_path: Path, trainer: str) -> None:
    cache = VersionCache(tmp_path / "cache", keep=2)
    for version in range(4):
        told = announce(tmp_path / "trainer", trainer, version)
        here = open_weights(cache.localized(told))
        there = tmp_path / "trainer" / here.name
        merged, expected = state_of(here), state_of_local(there, tmp_path / "trainer")
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], expected[name]) for name in merged)
    assert names(tmp_path / "cache") == ["base", "v00000002", "v00000003"]


def state_of_local(directory: Path, folder: Path) -> dict[str, torch.Tensor]:
    """State on the trainer's own host: the base is in the folder."""
    base = next(folder.glob("base-*"))
    return state_of(directory, base=state_of(base))


def test_a_damaged_base_is_downloaded_again(tmp_path: Path, trainer: str) -> None:
    cache = VersionCache(tmp_path / "cache")
    told = announce(tmp_path / "trainer", trainer, 0)
    here = Path(cache.localized(told).location)
    base = next((tmp_path / "cache").glob("base-*")) / "model.safetensors"
    base.write_bytes(b"damaged")
    cache.recheck(told)
    assert not base.exists()
    cache.localized(told)
    assert state_of(here)


def test_an_adapter_that_is_on_this_host_is_not_downloaded(tmp_path: Path) -> None:
    told = announce(tmp_path / "trainer", "http://127.0.0.1:9", 0)  # nobody is there
    cache = VersionCache(tmp_path / "cache", beside=tmp_path / "trainer")
    here = Path(cache.localized(told).location)
    assert here.parent == tmp_path / "trainer"
    assert state_of(here)
    assert not (tmp_path / "cache").exists()


def test_a_list_of_files_without_weights_is_refused(tmp_path: Path, trainer: str) -> None:
    told = announce(tmp_path / "trainer", trainer, 0)
    directory = tmp_path / "trainer" / told.location.rpartition("/")[2]
    write_list(directory, [file for file in listed(directory, {}) if file.name != "adapter_model.safetensors"])
    assert "adapter_model.safetensors" not in json.loads((directory / "files.json").read_text())["files"]
    with pytest.raises(Exception, match=f"files.json of {directory.name} is of other weights"):
        VersionCache(tmp_path / "cache").localized(told)
