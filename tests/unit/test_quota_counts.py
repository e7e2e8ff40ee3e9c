"""What is counted for a quota, and what is beyond one."""

from __future__ import annotations

from rlbuffer.config.batcher import BatcherConfig, EnvConfig
from rlbuffer.daemon.quotas import Quotas
from rlbuffer.store.records import PoolEntry
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

SIZE = sum(len(data) for data in payload.encode_push(make_group(env="a", lengths=[8, 8])).payloads)


def entry(number: int, env: str = "a", worker: str = "u") -> PoolEntry:
    group = make_group(env=env, lengths=[8, 8], group_id=f"{env}.{number}")
    info = payload.encode_push(group).info
    key = f"rlb:r:g:{group.group_id}:{worker}.{number}"
    names = {"env": env, "group_id": group.group_id, "rollouts": 2, "tokens": 16}
    return PoolEntry(entry_id=f"{number}-0", info=info, payload_key=key, **names)


def quotas(**settings: object) -> Quotas:
    return Quotas(BatcherConfig(64, **settings))  # type: ignore[arg-type]


def test_nothing_is_counted_without_a_quota() -> None:
    made = quotas()
    made.add(entry(1))
    assert (made.are_any, made.room(), made.full(), made.beyond()) == (False, {}, {}, {})


def test_room_is_what_pending_pushes_leave_of_each_quota() -> None:
    made = quotas(quota_bytes=10 * SIZE, worker_quota_bytes=5 * SIZE, envs={"a": EnvConfig(quota_bytes=3 * SIZE)})
    for number in range(3):
        made.add(entry(number))
    made.add(entry(3, "b", "v"))
    made.add(entry(4, "c", "v"))
    assert made.room() == {
        "env a": 0,
        "env *": 8 * SIZE,
        "worker *": 5 * SIZE,
        "worker u": 2 * SIZE,
        "worker v": 3 * SIZE,
    }
    assert made.full() == {"env a": (3 * SIZE, 3 * SIZE)}
    made.remove("0-0")
    made.remove("0-0")
    assert made.room()["env a"] == SIZE


def test_only_what_came_when_a_quota_and_a_quarter_was_used_up_is_beyond() -> None:
    made = quotas(quota_bytes=4 * SIZE)
    for number in range(8):
        made.add(entry(number, f"e{number}"))
    assert sorted(made.beyond()) == ["5-0", "6-0", "7-0"]
    assert made.beyond() == {}, "each is looked at once"


def test_what_was_pending_when_a_leadership_began_stays() -> None:
    made = quotas(quota_bytes=SIZE)
    for number in range(8):
        made.add(entry(number))
    made.settle()
    made.add(entry(8))
    assert list(made.beyond()) == ["8-0"]
