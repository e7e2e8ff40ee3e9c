"""The in-process server of ``memory://`` has all that the protocol's scripts need, and threads may share it."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.in_process import memory_client, memory_name
from rlbuffer.store.server.script import Script


def connect(url: str, home: Path) -> Connection:
    return Connection(url, home=home, server=ServerSettings(), name="test")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("memory://", ""),
        ("memory://a", "a"),
        ("memory://a%20b/c", "a b/c"),
        ("redis://memory", None),
        ("unix:///memory", None),
    ],
)
def test_the_name_is_what_follows_the_scheme(url: str, name: str | None) -> None:
    assert memory_name(url) == name


def test_without_the_extra_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fakeredis", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[memory\]'"):
        connect("memory://", tmp_path)


def test_threads_that_come_first_and_at_once_find_one_database() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            client, together = memory_client(), threading.Barrier(4)

            def put(name: int, client: redis.Redis = client, together: threading.Barrier = together) -> None:
                together.wait()
                client.set(f"k{name}", 1)

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(put, range(4)))
            assert client.dbsize() == 4
    finally:
        sys.setswitchinterval(interval)


def test_a_name_is_shared_and_no_name_is_a_fresh_server(tmp_path: Path) -> None:
    shared = f"memory://{tmp_path.name}"
    with connect(shared, tmp_path) as a, connect(shared, tmp_path) as b:
        a.client.set("k", 1)
        assert b.client.get("k") == b"1"
        with connect("memory://", tmp_path) as c, connect("memory://", tmp_path) as d:
            c.client.set("k", 2)
            assert d.client.get("k") is None
            assert c.describe()["name"] == "memory"
    assert list(tmp_path.iterdir()) == [], "nothing is started or kept"


def test_a_blocked_reader_is_woken_and_blocks_nobody() -> None:
    client = memory_client()
    woken: list[object] = []
    readers = [threading.Thread(target=lambda: woken.append(client.xread({"s": "0-0"}, block=5000))) for _ in range(4)]
    for reader in readers:
        reader.start()
    begun = time.monotonic()
    client.set("other", 1)
    assert time.monotonic() - begun < 2
    client.xadd("s", {"a": 1}, id="1-0")
    for reader in readers:
        reader.join(5)
    assert woken == [{b"s": [[(b"1-0", {b"a": b"1"})]]}] * 4


def test_scripts_of_several_threads_run_one_at_a_time() -> None:
    client = memory_client()
    script = Script(
        lambda: client,
        "local n = tonumber(redis.call('GET', KEYS[1]) or '0')\nredis.call('SET', KEYS[1], n + 1)\nreturn n",
        has_flags=False,
    )
    with ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(lambda _: script(["n"]), range(200)))
    assert sorted(seen) == list(range(200))
