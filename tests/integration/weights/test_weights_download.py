"""Weights over HTTP: cut, truncated, foreign; downloaded once per host; old ones removed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights_places import SIZE, Place, content, make_version, place

from rlbuffer.errors import WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights import download
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.layout import parse_list, write_list


def at(policy: PolicyVersion, url: str) -> PolicyVersion:
    """The version as a trainer with weights.url announces it."""
    return replace(policy, location=f"{url}/{Path(policy.location).name}")


def sha256(seed: int) -> str:
    return hashlib.sha256(content(seed)).hexdigest()


def bytes_of(policy: PolicyVersion) -> bytes:
    return (Path(policy.location) / "model.safetensors").read_bytes()


def test_a_version_is_downloaded_whole_and_only_once(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 12)
    cache = VersionCache(tmp_path / "cache")
    with place(tmp_path / "trainer") as trainer:
        local = cache.localized(at(policy, trainer.url))
        again = cache.localized(at(policy, trainer.url))
        assert trainer.starts() == [0]
    assert local == again == replace(policy, location=str(tmp_path / "cache" / Path(policy.location).name))
    assert bytes_of(local) == content(12)
    assert sorted(p.name for p in Path(local.location).iterdir()) == ["config.json", "files.json", "model.safetensors"]
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [".lock", Path(policy.location).name]


def test_a_path_is_left_as_it_is_and_so_is_a_version_that_a_trainer_on_this_host_has(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 3)
    cache = VersionCache(tmp_path / "cache", beside=tmp_path / "trainer")
    assert cache.localized(policy) == policy
    assert cache.localized(at(policy, "http://127.0.0.1:9")) == policy
    assert not (tmp_path / "cache").exists()


def test_a_connection_that_is_cut_again_and_again_goes_on_where_it_ended(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 1)
    with place(tmp_path / "trainer") as trainer:
        trainer.cut_after = 700_000
        local = VersionCache(tmp_path / "cache").localized(at(policy, trainer.url))
        assert trainer.starts() == [0, 700_000, 1_400_000, 2_100_000, 2_800_000]
    assert bytes_of(local) == content(1)


def test_a_server_without_ranges_that_cuts_each_time_is_given_up(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 1)
    with place(tmp_path / "trainer") as trainer:
        trainer.cut_after, trainer.knows_ranges = 1_000_000, False
        with pytest.raises(WeightsError, match=r"model\.safetensors ended after 1000000 of 3000000 bytes"):
            VersionCache(tmp_path / "cache").localized(at(policy, trainer.url))
        trainer.asked.clear()
        trainer.cut_after = None
        assert bytes_of(VersionCache(tmp_path / "cache").localized(at(policy, trainer.url))) == content(1)
        assert trainer.starts() == [0]


def truncated(folder: Path, trainer: Place) -> None:
    (folder / "model.safetensors").write_bytes(content(5)[:-1])


def foreign(folder: Path, trainer: Place) -> None:
    (folder / "model.safetensors").write_bytes(content(6))


def longer(folder: Path, trainer: Place) -> None:
    (folder / "model.safetensors").write_bytes(content(5) + b"x")


def of_another_size(folder: Path, trainer: Place) -> None:
    trainer.cut_after, trainer.total_told = 1000, SIZE + 1


def another_config(folder: Path, trainer: Place) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}\n')


def no_list(folder: Path, trainer: Place) -> None:
    (folder / "files.json").unlink()


def half_a_list(folder: Path, trainer: Place) -> None:
    text = (folder / "files.json").read_text()
    (folder / "files.json").write_text(text[: len(text) // 2])


def a_list_of_other_weights(folder: Path, trainer: Place) -> None:
    files = parse_list((folder / "files.json").read_bytes(), name=folder.name)
    write_list(folder, [replace(f, size=f.size + 1) if f.name == "model.safetensors" else f for f in files])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (truncated, "model.safetensors is shorter there than the 3000000 bytes of its list"),
        (foreign, f"model.safetensors has sha256 {sha256(6)}, the list says {sha256(5)}"),
        (longer, "model.safetensors is longer there than the 3000000 bytes of its list"),
        (of_another_size, "model.safetensors is another file there: asked for bytes from 1000 of 3000000, got bytes "),
        (another_config, "config.json "),
        (no_list, "it does not have it"),
        (half_a_list, "files.json of NAME is no list of files (JSONDecodeError)"),
        (
            a_list_of_other_weights,
            (
                f"it has other weights under this name: 3000001 bytes, sha256 {sha256(5)}; announced were "
                f"3000000 bytes, {sha256(5)}"
            ),
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_bad_place_is_named_with_its_reason_and_the_next_one_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path, Place], None],
    reason: str,
) -> None:
    monkeypatch.setattr(download, "DOWNLOAD_PAUSE_SECONDS", 0.01)
    policy = make_version(tmp_path / "trainer", 5)
    copy = make_version(tmp_path / "mirror", 5)
    name = Path(policy.location).name
    with place(tmp_path / "mirror") as mirror, place(tmp_path / "trainer") as trainer:
        fault(Path(copy.location), mirror)
        with pytest.raises(WeightsError) as caught:
            VersionCache(tmp_path / "alone").localized(at(policy, mirror.url))
        text = str(caught.value)
        assert text.startswith(f"{name} could not be downloaded:\n  {mirror.url}: {reason.replace('NAME', name)}")
        assert "weights.listen" in text
        assert not (tmp_path / "alone" / name).exists()

        local = VersionCache(tmp_path / "cache", mirror=mirror.url).localized(at(policy, trainer.url))
        assert bytes_of(local) == content(5)
        assert (Path(local.location) / "config.json").read_text() == '{"model_type": "qwen3"}\n'


@pytest.mark.parametrize("location", ["http://h/", "http://h/v5", "http://h/../v00000005-0123456789ab"])
def test_an_announcement_must_name_the_version_it_announces(tmp_path: Path, location: str) -> None:
    policy = PolicyVersion(version=5, location=location, size=3, checksum="f" * 64)
    with pytest.raises(WeightsError) as caught:
        VersionCache(tmp_path).localized(policy)
    assert location in str(caught.value)


DOWNLOAD = """
import json, sys
from pathlib import Path
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.cache import VersionCache
print("ready", flush=True)
sys.stdin.readline()
policy = PolicyVersion(**json.loads(sys.argv[2]))
print(VersionCache(Path(sys.argv[1])).localized(policy).location, flush=True)
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_two_processes_of_a_host_download_a_version_once(tmp_path: Path) -> None:
    import json

    policy = make_version(tmp_path / "trainer", 8)
    with place(tmp_path / "trainer") as trainer:
        trainer.gate = threading.Event()
        told = at(policy, trainer.url)
        record = json.dumps({k: getattr(told, k) for k in ("version", "location", "size", "checksum")})
        users = [
            subprocess.Popen(
                [sys.executable, "-c", DOWNLOAD, str(tmp_path / "cache"), record],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for user in users:
            assert user.stdout is not None
            assert user.stdout.readline() == "ready\n"
        outputs = []
        threads = [threading.Thread(target=lambda u=user: outputs.append(u.communicate("\n")[0])) for user in users]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while not trainer.starts() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)  # the other one is at the lock by now, or comes later: both must hold
        trainer.gate.set()
        for thread in threads:
            thread.join()
        assert [user.returncode for user in users] == [0, 0]
        assert trainer.starts() == [0]
    directory = tmp_path / "cache" / Path(policy.location).name
    assert outputs == [f"{directory}\n"] * 2


def test_a_worker_that_is_told_to_stop_does_not_wait_for_a_download(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 8)
    stop = threading.Event()
    with place(tmp_path / "trainer") as trainer:
        trainer.gate = threading.Event()
        threading.Timer(0.2, lambda: (stop.set(), trainer.gate and trainer.gate.set())).start()
        with pytest.raises(WeightsError, match="stopped while downloading"):
            VersionCache(tmp_path / "cache", stop=stop).localized(at(policy, trainer.url))


def test_the_most_recently_used_versions_stay_and_who_reads_a_removed_one_reads_on(tmp_path: Path) -> None:
    policies = {v: make_version(tmp_path / "trainer", v, content(v, 4000)) for v in (10, 11, 12, 4, 5)}
    cache = VersionCache(tmp_path / "cache", keep=2)

    def there() -> list[int]:
        return sorted(int(p.name[1:9]) for p in (tmp_path / "cache").iterdir() if p.name.startswith("v"))

    with place(tmp_path / "trainer") as trainer:
        first = cache.localized(at(policies[10], trainer.url))
        with (Path(first.location) / "model.safetensors").open("rb") as reading:
            assert reading.read(1000) == content(10, 4000)[:1000]
            cache.localized(at(policies[11], trainer.url))
            cache.localized(at(policies[12], trainer.url))
            assert there() == [11, 12]
            assert reading.read() == content(10, 4000)[1000:]
        cache.localized(at(policies[11], trainer.url))  # used again: 12 is the older one now
        cache.localized(at(policies[4], trainer.url))  # the run was taken back
        assert there() == [4, 11]
        cache.localized(at(policies[5], trainer.url))
        assert there() == [4, 5]


def test_what_a_killed_download_has_left_makes_room_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk without room for both, no version could be downloaded ever again."""
    policy, left = make_version(tmp_path / "trainer", 8), tmp_path / "cache" / ".tmp-v00000007-0123456789ab"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")

    def usage(path: Path) -> Any:
        return SimpleNamespace(free=0 if left.exists() else 10**9)

    monkeypatch.setattr("rlbuffer.weights.cache.shutil.disk_usage", usage)
    with place(tmp_path / "trainer") as trainer:
        assert bytes_of(VersionCache(tmp_path / "cache").localized(at(policy, trainer.url))) == content(8)


def test_a_copy_that_was_damaged_on_this_disk_is_downloaded_again_after_the_load_failed(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 8)
    cache = VersionCache(tmp_path / "cache")
    with place(tmp_path / "trainer") as trainer:
        local = cache.localized(at(policy, trainer.url))
        cache.recheck(at(policy, trainer.url))
        assert trainer.starts() == [0]
        (Path(local.location) / "model.safetensors").write_bytes(content(9))
        cache.recheck(at(policy, trainer.url))
        assert bytes_of(cache.localized(at(policy, trainer.url))) == content(8)
        assert trainer.starts() == [0, 0]
    assert bytes_of(local) == content(8)


def test_a_folder_that_cannot_be_written_is_said_with_what_to_do(tmp_path: Path) -> None:
    policy = make_version(tmp_path / "trainer", 8)
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError) as caught:
        VersionCache(tmp_path / "file").localized(at(policy, "http://127.0.0.1:9"))
    assert str(tmp_path / "file") in str(caught.value)
