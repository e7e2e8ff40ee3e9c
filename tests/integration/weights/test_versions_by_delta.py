"""Versions that readers on other hosts make of an older one and of deltas: the same bytes, whatever happens."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weights_places import Place, place

from rlbuffer.errors import WeightsError
from rlbuffer.process.stages import Stages
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.files import open_weights, publish
from rlbuffer.weights.layout import DELTA_FILE, LIST_FILE, WEIGHTS_FILE, check, parse_list
from rlbuffer.weights.serving import FileServer, make_app

WORDS = 200_000


class Trainer:
    """Weights in bfloat16 that change a little with each version, published for other hosts."""

    def __init__(self, folder: Path, *, keep: int = 9) -> None:
        self.folder = folder
        self.keep = keep
        self.weights = torch.randn(WORDS, generator=torch.Generator().manual_seed(0))

    def step(self, version: int, *, share: float = 0.02, dtype: torch.dtype = torch.bfloat16) -> PolicyVersion:
        generator = torch.Generator().manual_seed(version)
        changed = torch.rand(WORDS, generator=generator) < share
        self.weights = torch.where(changed, self.weights * 1.01, self.weights)
        state = {"a.weight": self.weights.to(dtype)}
        return publish(self.folder, version, state=state, config={}, keep=self.keep, with_delta=True)


def at(policy: PolicyVersion, url: str) -> PolicyVersion:
    """The version as a trainer with weights.url announces it."""
    return replace(policy, location=f"{url}/{Path(policy.location).name}")


def loaded(cache: VersionCache, policy: PolicyVersion, there: Place) -> list[str]:
    """Makes the version local, checks its bytes, and gives the large files that were downloaded for it."""
    there.asked.clear()
    local = cache.localized(at(policy, there.url))
    check(Path(local.location), policy)
    assert not [path for path in cache.directory.iterdir() if path.name.startswith(".tmp-")]
    return [name for name, _ in there.asked if name in (WEIGHTS_FILE, DELTA_FILE)]


def test_a_reader_loads_the_whole_once_and_deltas_then(tmp_path: Path) -> None:
    trainer, cache = Trainer(tmp_path / "trainer"), VersionCache(tmp_path / "cache")
    with place(trainer.folder) as there:
        assert loaded(cache, trainer.step(0), there) == [WEIGHTS_FILE]
        assert loaded(cache, trainer.step(1), there) == [DELTA_FILE]
        assert loaded(cache, trainer.step(2), there) == [DELTA_FILE]
        trainer.step(3)
        trainer.step(4)
        assert loaded(cache, trainer.step(5), there) == [DELTA_FILE] * 3
        late = VersionCache(tmp_path / "late")
        assert loaded(late, trainer.step(6), there) == [WEIGHTS_FILE]
        assert loaded(late, trainer.step(7), there) == [DELTA_FILE]


def test_what_fetching_took_is_told_by_stage_and_kind(tmp_path: Path) -> None:
    trainer, cache = Trainer(tmp_path / "trainer"), VersionCache(tmp_path / "cache")
    with place(trainer.folder) as there:
        first, second = Stages(), Stages()
        policy = trainer.step(0)
        cache.localized(at(policy, there.url), first)
        local = cache.localized(at(trainer.step(1), there.url), second)
        again = Stages()
        cache.localized(at(policy, there.url), again)
    assert (first.bytes["whole"], first.seconds.keys()) == (policy.size, {"fetch"})
    assert second.bytes == {"delta": (Path(local.location) / DELTA_FILE).stat().st_size}
    assert second.seconds.keys() == {"fetch", "apply"}
    assert not again.bytes
    assert not again.seconds


def test_a_relay_hands_on_what_it_has_made(tmp_path: Path) -> None:
    trainer, relay, reader = Trainer(tmp_path / "trainer"), VersionCache(tmp_path / "relay"), tmp_path / "reader"
    with place(trainer.folder) as there, FileServer(make_app(relay.directory), "127.0.0.1:0") as between:
        for version in range(4):
            policy = trainer.step(version)
            relay.localized(at(policy, there.url))
            there.asked.clear()
            local = VersionCache(reader, mirror=between.url).localized(at(policy, there.url))
            check(Path(local.location), policy)
            assert not there.asked
    assert (Path(local.location) / DELTA_FILE).is_file()


def with_other_weights(trainer: Trainer, cache: VersionCache) -> None:
    trainer.weights = torch.randn(WORDS, generator=torch.Generator().manual_seed(1))


def without_the_base(trainer: Trainer, cache: VersionCache) -> None:
    for path in cache.directory.glob("v*"):
        shutil.rmtree(path)


def with_a_damaged_base(trainer: Trainer, cache: VersionCache) -> None:
    (path,) = cache.directory.glob(f"v*/{WEIGHTS_FILE}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def with_a_cut_base(trainer: Trainer, cache: VersionCache) -> None:
    (path,) = cache.directory.glob(f"v*/{WEIGHTS_FILE}")
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("happens", [with_other_weights, without_the_base, with_a_damaged_base, with_a_cut_base])
def test_the_whole_is_loaded_where_a_delta_does_not_help(
    tmp_path: Path, happens: Callable[[Trainer, VersionCache], None]
) -> None:
    trainer, cache = Trainer(tmp_path / "trainer"), VersionCache(tmp_path / "cache")
    with place(trainer.folder) as there:
        loaded(cache, trainer.step(0), there)
        happens(trainer, cache)
        assert WEIGHTS_FILE in loaded(cache, trainer.step(1), there)
        assert loaded(cache, trainer.step(2), there) == [DELTA_FILE]


def test_flipped_bits_in_a_delta_never_make_other_weights(tmp_path: Path) -> None:
    trainer, dice = Trainer(tmp_path / "trainer"), random.Random(3)
    first, second = trainer.step(0), trainer.step(1)
    delta = Path(second.location) / DELTA_FILE
    whole, listing = delta.read_bytes(), (delta.parent / LIST_FILE).read_text()
    with place(trainer.folder) as there:
        cache = VersionCache(tmp_path / "cache")
        loaded(cache, first, there)
        for number in range(30):
            data = bytearray(whole)
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            delta.write_bytes(data)
            if number % 2:  # the list is damaged alike: the delta itself looks right
                right, wrong = (hashlib.sha256(each).hexdigest() for each in (whole, bytes(data)))
                (delta.parent / LIST_FILE).write_text(listing.replace(right, wrong))
            shutil.rmtree(cache.directory / delta.parent.name, ignore_errors=True)
            assert loaded(cache, second, there)[0] == DELTA_FILE


def test_a_trainer_that_goes_back_publishes_deltas_of_the_versions_before(tmp_path: Path) -> None:
    trainer, cache = Trainer(tmp_path / "trainer"), VersionCache(tmp_path / "cache")
    with place(trainer.folder) as there:
        for version in range(4):
            loaded(cache, trainer.step(version), there)
        trainer.weights = trainer.weights * 1.0001
        again = trainer.step(2, share=0.03)
        assert loaded(cache, again, there) == [DELTA_FILE]
        assert open_weights(again) == Path(again.location)


def test_a_folder_that_hosts_share_has_no_deltas(tmp_path: Path) -> None:
    for version in range(2):
        policy = publish(tmp_path, version, state={"a": torch.ones(100)}, config={}, keep=2)
        assert not (Path(policy.location) / DELTA_FILE).exists()


def test_a_place_that_lacks_a_version_between_gives_the_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, cache = Trainer(tmp_path / "trainer", keep=2), VersionCache(tmp_path / "cache")
    with place(trainer.folder) as there:
        loaded(cache, trainer.step(0), there)
        for version in range(1, 5):
            policy = trainer.step(version)
        assert loaded(cache, policy, there) == [WEIGHTS_FILE]
    assert not caplog.records, "this is no trouble"


@pytest.mark.parametrize("base", ["v00000007-{}", "v00000008-{}", "base-{}", "../v00000001-{}", "v1-{}", "7"])
def test_a_list_whose_delta_is_of_no_older_version_is_refused(base: str) -> None:
    digest = "5d41402abc4b" + "0" * 52
    files = {
        WEIGHTS_FILE: {"size": 10, "sha256": digest},
        DELTA_FILE: {"size": 9, "sha256": digest, "from": base.format(digest[:12])},
    }
    with pytest.raises(WeightsError, match="no older version"):
        parse_list(json.dumps({"files": files}), name=f"v00000007-{digest[:12]}")
