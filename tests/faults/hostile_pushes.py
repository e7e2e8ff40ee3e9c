"""Pushes as somebody with a worker's login may send them past rlbuffer, drawn by seed.

What is sealed carries the checksum of what was changed in it, in the payload and in its push's metadata: nothing but
the rules of the content itself can find it.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha1
from typing import Any

import msgpack
import numpy as np
import redis
from strange_groups import strange_group
from wounds import false_payload, mutated, packed, tampered

from rlbuffer.records.group import Group
from rlbuffer.records.rollout import MAX_LOGPROB, MIN_LOGPROB
from rlbuffer.store.keys import Keys
from rlbuffer.store.session import script_text
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

Command = tuple[Any, ...]
NUMBERS: tuple[Any, ...] = (0, 1, -1, -5, 7, 999, 10**6, 10**14, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**64, "9" * 30)
LOGPROBS = (0.0, -1.0, MIN_LOGPROB, MAX_LOGPROB, -1e-45)
REWARDS = (0.0, 1.0, -1.0, 1e12, -1e12, 1e-300)
VOCABULARY = 13
"""Vocabulary of the model that is trained."""
STRANGE: tuple[Any, ...] = (
    *("", "x", " 1", "1.5", "1e309", "nan", "inf", "-inf", "0x10", "=", "=x", "=-1", "\x00", "\x1b[31mred\x1b[0m", "‮"),
    *(b"\xff\xfe", b"\x81\xa1", b"5 \x93\x01", b"1 \xc1", b"9999999999999 \x80", b"0 \x81\xa3pid\xcf" + b"\xff" * 8),
    *("a" * 100_000, "[worker.x]", "[worker.vcopy]", "a:b", "{rlb:other}:meta", "rlb:other:g:a.1:u.1", "*"),
    *NUMBERS,
)
NEEDS: tuple[tuple[str, ...], ...] = ((), (), (), ("ref_logprobs",), ("nobody",))
GROUPS = 40
"""Groups that pushes are made of under names of their own: to make one takes long."""


@dataclass(slots=True)
class Seen:
    """The attacker's knowledge of the run, to aim at."""

    epoch: str
    step: int
    now_ms: int
    entries: list[tuple[str, dict[str, bytes]]]


class Pushes:
    """Draws pushes and sends them; `kinds` counts what was sent, `taken` what the server has taken."""

    def __init__(self, client: redis.Redis, run: str, *, other: str, envs: Sequence[str], dice: random.Random) -> None:
        self.client, self.keys, self.other, self.dice = client, Keys(run), Keys(other), dice
        self.envs = (*envs, "a", "new", "x" * 64)
        self.kinds: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self._push_sha = sha1(script_text("push").encode(), usedforsecurity=False).hexdigest()
        """The leader has loaded the script: this login may load none."""
        self._count = 0
        self._made: list[Group] = []
        """The newest groups, which pushes are made of."""

    def look(self) -> Seen:
        seconds, micros = self.client.time()
        try:
            found = self.client.xrange(self.keys.pool, count=200)
        except redis.ResponseError:
            found = []
        epoch, step = self.client.hmget(self.keys.meta, "epoch", "step")
        entries = [(i.decode(), {k.decode(errors="replace"): v for k, v in f.items()}) for i, f in found]
        return Seen((epoch or b"").decode(), int(step or 0), 1000 * seconds + micros // 1000, entries)

    def pushes(self, count: int, *, at_once: int) -> Iterator[int]:
        """Sends `count` pushes in pipelines; yields how many are done after each."""
        done = 0
        while done < count:
            seen = self.look()
            size = min(at_once, count - done)
            with self.client.pipeline(transaction=False) as pipe:
                kinds: list[tuple[str, int]] = []
                for _ in range(size):
                    kind, commands = self._push(seen)
                    for command in commands:
                        pipe.execute_command(*command)
                    kinds.append((kind, len(commands)))
                answers = iter(pipe.execute(raise_on_error=False))
            for kind, sent in kinds:
                replies = [next(answers) for _ in range(sent)]
                self.kinds[kind] += 1
                self.taken[kind] += _is_taken(replies[-1])
            done += size
            yield done

    def _push(self, seen: Seen) -> tuple[str, list[Command]]:
        drawn = self.dice.random()
        if drawn < 0.25:
            return "push by hand", [self._entry(seen)]
        if drawn < 0.55:
            return "sealed push", self._sealed_push(seen)
        return "push by script", self._push_script(seen)

    def _push_script(self, seen: Seen) -> list[Command]:
        dice = self.dice
        group = self._group(seen)
        if dice.random() < 0.5:
            group = self._extreme(group)
        push = payload.encode_push(group)
        suffix = self._suffix(seen)
        payloads = [mutated(dice, p, push.metadata) if dice.random() < 0.3 else p for p in push.payloads]
        sound = dice.random() < 0.4  # goes into a step, where its payload is found out
        args = self._args(seen, push, suffix, push.metadata if sound else self._metadata(push))
        args[1] = dice.choice((1, 1, 1, 1, 2, 2**53))
        for _ in range(0 if sound else dice.choice((0, 0, 1, 1, 2))):
            at = dice.choice((0, 1, 2, 3, 4, 5, 6, 7, 9, 9, 10))
            args[at] = self._value()
            if at == 9 and seen.entries:
                args[at] = dice.choice(seen.entries)[0]
            if at == 10:
                args[at] = dice.choice((self.other.payload_prefix, "", self.keys.tag))
        return self._sent(suffix, args, payloads, stores=sound or dice.random() < 0.9)

    def _sealed_push(self, seen: Seen) -> list[Command]:
        """A right push except for one thing or two in its payloads: they carry the checksums of what they hold now."""
        dice = self.dice
        group = self._group(seen)
        if dice.random() < 0.1:
            group = replace(strange_group(group.group_id, version=seen.step), env=group.env)
        push = payload.encode_push(group)
        payloads = [
            false_payload(dice, data, data[::-1], dice.randrange(4)) if dice.random() < 0.5 else data
            for data in push.payloads
        ]
        sealed = tuple(
            info.changed(size=len(data), checksum=payload.payload_checksum(data))
            for info, data in zip(push.info.rollouts, payloads, strict=True)
        )
        suffix = self._suffix(seen)
        args = self._args(seen, push, suffix, payload.encode_info(replace(push.info, rollouts=sealed)))
        return self._sent(suffix, args, payloads, group_payload=push.group_payload)

    def _group(self, seen: Seen) -> Group:
        """A group in order; of the run's envs or others, its name new or that of one that a ticket was given for."""
        dice = self.dice
        self._count += 1
        if len(self._made) < GROUPS or dice.random() < 0.1:
            self._made = [*self._made[1 - GROUPS :], self._make(seen)]
        made = dice.choice(self._made)
        names = (f"evil.{self._count}", f"vcopy.{dice.randrange(50)}", f"repeat.{dice.randrange(50)}")
        env = dice.choice(self.envs[:2]) if dice.random() < 0.5 else self._env()
        return replace(made, env=env, group_id=dice.choice(names), needs=dice.choice(NEEDS))

    def _make(self, seen: Seen) -> Group:
        dice = self.dice
        size = dice.choice((1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 64))
        longest = dice.choice((16, 16, 16, 32, 32, 32, 200, 5000)) if size < 8 else 16
        columns = None
        if dice.random() < 0.15:
            shape = dice.choice(((), (3,), (2, 2), (0,)))
            columns = [{dice.choice(("ref_logprobs", "weights", "c")): np.zeros((longest, *shape), "<f4")}] * size
        return make_group(
            seed=self._count,
            size=size,
            lengths=[longest] * size,
            planned_size=dice.choice((None, None, None, size + 1, 10_000)),
            version=dice.choice((seen.step, seen.step, max(0, seen.step - 1), seen.step + 1, 0, 10**6)),
            adapter=dice.choice(("", "", "", "", "", "evil")),
            columns=columns,
            metadata=dice.choice((None, None, {"\x1b[2J": "‮"})),
        )

    def _args(self, seen: Seen, push: payload.EncodedPush, suffix: str, metadata: bytes) -> list[Any]:
        """Arguments of the script, as rlbuffer sends them, for the first push of a producer."""
        group_id, info = push.info.group_id, push.info
        waiting = self.keys.unnamed_payload(group_id, suffix)
        args: list[Any] = [seen.epoch, 1, waiting, info.env, group_id, suffix, len(info.rollouts), info.tokens]
        return [*args, metadata, "", self.keys.payload_prefix, "0"]

    def _sent(
        self,
        suffix: str,
        args: Sequence[Any],
        payloads: Sequence[bytes],
        *,
        group_payload: bytes | None = None,
        stores: bool = True,
    ) -> list[Command]:
        """The commands of a push: its payload, with fields that no rollout has now and then, and the script."""
        dice, waiting = self.dice, args[2]
        fields: list[Any] = [part for i, data in enumerate(payloads) for part in (str(i), data)]
        if group_payload is not None or dice.random() < 0.1:
            fields += ["group", group_payload or dice.choice((b"", b"RLBG", payloads[0]))]
        if dice.random() < 0.1:
            fields += [self._value(), self._value(), "99999999", b"x", "-1", b""]
        uuid = suffix.partition(".")[0] or "u"
        producer = f"{self.keys.tag}:producer:evil:{dice.choice((uuid, str(self._count)))}"
        keys = [self.keys.meta, self.keys.pool, producer, self.keys.ledger, self.keys.garbage]
        script: Command = ("EVALSHA", self._push_sha, len(keys), *keys, *args)
        if not stores:
            return [script]
        return [("HSET", waiting, *fields), ("PEXPIRE", waiting, dice.choice((1, 10**4, 10**9))), script]

    def _extreme(self, group: Group) -> Group:
        """Tokens that the model has, with numbers as large as a rollout may hold: these are trained."""
        rollouts = [
            replace(
                rollout,
                tokens=rollout.tokens % VOCABULARY,
                logprobs=np.where(rollout.loss_mask, np.float32(self.dice.choice(LOGPROBS)), np.float32(0)),
                reward=self.dice.choice(REWARDS),
            )
            for rollout in group.rollouts
        ]
        return replace(group, rollouts=tuple(rollouts))

    def _entry(self, seen: Seen) -> Command:
        """An entry without a payload, or with that of another one."""
        return ("XADD", self.keys.pool, "*", *self._fields(seen))

    def _fields(self, seen: Seen) -> list[Any]:
        dice = self.dice
        self._count += 1
        group = make_group(env=self._env(), seed=self._count, size=2, group_id=f"evil.{self._count}")
        push = payload.encode_push(group)
        fields: dict[str, Any] = {"env": group.env, "group": group.group_id, "key": self._suffix(seen)}
        fields |= {"rollouts": 2, "tokens": push.info.tokens, "metadata": self._metadata(push)}
        if seen.entries and dice.random() < 0.4:
            name, copied = dice.choice(seen.entries)
            fields |= copied
            if dice.random() < 0.5:
                fields["replaces"] = name
        for _ in range(dice.choice((0, 1, 1, 2, 4))):
            fields[dice.choice((*fields, "replaces", "pushed", "x"))] = self._value()
        for name in [n for n in fields if dice.random() < 0.03]:
            del fields[name]
        return [part for pair in fields.items() for part in pair] or ["x", "y"]

    def _metadata(self, push: payload.EncodedPush) -> bytes:
        """Metadata as it should be, with some bytes changed, or well formed with values that no push has."""
        dice = self.dice
        drawn = dice.random()
        if drawn < 0.35:
            return push.metadata
        if drawn < 0.5:
            return mutated(dice, push.metadata, push.payloads[0])
        data = packed(tampered(dice, msgpack.unpackb(push.metadata[:-4])))
        return data + struct.pack(">I", zlib.crc32(data))

    def _suffix(self, seen: Seen) -> str:
        dice = self.dice
        drawn = dice.random()
        if drawn < 0.7 or not seen.entries:
            return f"evil{self._count}-{dice.randrange(10**9)}.1"
        if drawn < 0.85:
            return dice.choice(seen.entries)[1].get("key", b"u.1").decode(errors="replace")
        return dice.choice(("u 77", "", "u.1", "a:b.1", "../x.1", f"{'u' * 99}.1", "u.-1"))

    def _value(self) -> Any:
        return self.dice.choice(STRANGE)

    def _env(self) -> str:
        return self.dice.choice(self.envs)


def _is_taken(reply: Any) -> bool:
    if isinstance(reply, Exception):
        return False
    return not isinstance(reply, list) or reply[0] == b"OK"
