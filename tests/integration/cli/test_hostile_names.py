"""Names, texts and sentences of hostile workers: the terminal shows them and obeys none."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from every_role import EveryRole

import rlbuffer
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.testing import make_group
from rlbuffer.wire import payload
from rlbuffer_cli.main import main

EVIL = "\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\x9b31m\r\u200b"
"""Sets the title, clears the screen, turns the text around, writes over the line."""


@pytest.fixture
def buffer(redis_url: str) -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect(redis_url, run=f"evil-{uuid.uuid4().hex[:8]}") as made:
        yield made


def spoil(buffer: rlbuffer.Buffer) -> None:
    """Writes everything that a worker may write, with :data:`EVIL` wherever a text may stand."""
    store = buffer.store.role(EveryRole)
    writer = buffer.writer("w")
    group = make_group(env="a", size=2, group_id="a.0")
    rollouts = tuple(
        rlbuffer.Rollout(
            **{name: getattr(r, name) for name in ("tokens", "loss_mask", "logprobs", "version_spans")},
            rollout_id=f"a.0/{i}{EVIL}",
            reward=float(i),
            rewards={EVIL: 1.0},
            finish_reason=EVIL,
            is_truncated=True,
            text=EVIL,
            metadata={EVIL: EVIL},
        )
        for i, r in enumerate(group.rollouts)
    )
    whole = rlbuffer.Group("a.0", "a", EVIL, rollouts, 2, adapter=EVIL, answer=EVIL, metadata={EVIL: 1}, worker=EVIL)
    writer.push(whole)
    writer.push(replace(whole, group_id="a.1", needs=(EVIL,), rollouts=group.rollouts))
    keys, client = store.keys, store.client  # type: ignore[attr-defined]
    fields = {"env": EVIL, "group": EVIL, "key": EVIL, "rollouts": "1", "tokens": "8"}
    client.xadd(keys.pool, {**fields, "metadata": b"\x00"})
    client.xadd(keys.pool, {**fields, "metadata": payload.encode_info(whole.info())})
    client.hset(keys.ledger, f"{EVIL}:pushed:rollouts", 3)
    client.hset(keys.ledger, f"a:dropped:{EVIL}:rollouts", 3)
    client.zadd(keys.paused, {EVIL: 1})
    client.hset(keys.allowance, EVIL, 3)
    client.zadd(keys.tickets(EVIL), {"1": 2**40})
    waiting, problems = {"kind": "server", "detail": EVIL}, [{"kind": "worker_stuck", "detail": EVIL}, EVIL]
    beat = {"env": EVIL, "problems": problems, "waiting": waiting, "gives": [EVIL], "needs": [EVIL], "adapter": EVIL}
    for kind in ("worker", "scorer", "rank", "batcher"):
        store.heartbeat(kind, EVIL, beat)
    store.heartbeat("batcher", "leader", beat)
    number = store.attempt(uuid=EVIL, world_size=1, resume_step=0).number
    store.announce(number, PolicyVersion(version=1, location=EVIL, size=1, checksum=EVIL, adapter=EVIL))
    store.add_evaluation(EVIL, 1, {"env": EVIL, "version": 1, "reward/mean": 1.0, "reward/error": 0.0, "rollouts": 1})


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "--where", "state:ready,forming"],
        ["top", "--once", "--json"],
        ["inspect", "--json"],
        ["inspect", "a.0"],
        ["inspect", "a.0", "--json"],
        ["inspect", "a.0/0"],
        ["inspect", "a.0/1", "--json"],
        ["inspect", "a.0/none"],
        ["inspect", "a.1"],
        ["inspect", "none"],
        ["inspect", "steps"],
        ["inspect", "processes"],
        ["inspect", "envs", "--json"],
        ["inspect", "problems"],
        ["inspect", "step:1"],
        ["inspect", "a.0/0", "a.0/1"],
        ["top", "--once"],
        ["alive", "worker nobody"],
        ["alive", "worker", EVIL],
        ["inspect", "--where", f"env:{EVIL}"],
        ["verify"],
        ["runs", "list"],
        ["env", "pause", EVIL],
        ["env", "resume", "none"],
        ["drop", "--where", "env:none", "--yes"],
        ["runs", "reset", "evil", "--yes"],
    ],
)
def test_nothing_on_the_server_controls_the_terminal(
    buffer: rlbuffer.Buffer, redis_url: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(buffer)
    command = [*arguments, "--redis", redis_url]
    if arguments[0] not in ("runs", "reset"):
        command += ["--run", buffer.run]
    main(command)
    said = capsys.readouterr()
    assert said.out + said.err
    assert "defect" not in said.err
    for line in (said.out + said.err).split("\n"):
        assert line.isprintable(), repr(line)
