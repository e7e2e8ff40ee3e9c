"""Everything that somebody with a worker's login can send: moves on control keys, and pushes, drawn by seed.

Everything goes over one connection of the user `worker` of deploy/users.acl. A refusal of the server is counted, and is
no finding: it protects the run.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import redis

from rlbuffer.records.group import Group
from rlbuffer.store.keys import Keys
from rlbuffer.store.session import script_text
from rlbuffer.testing import make_group
from rlbuffer.wire import payload
from rlbuffer.wire.bounded_msgpack import dumps
from rlbuffer.wire.metadata import GROUP_KEYS, METADATA_FORMAT, ROW

Command = tuple[Any, ...]
LARGEST = "18446744073709551615-18446744073709551615"
NUMBERS: tuple[Any, ...] = (0, 1, -1, -5, 7, 999, 10**6, 10**14, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**64, "9" * 30)
FLOATS = (0.0, -0.0, 1.0, 1e12, 1.1e12, 1e39, 1.7e308, -1.7e308, 5e-324, float("inf"), float("-inf"), float("nan"))
LOGPROBS = (0.0, -1.0, -1e3, -1e12, 1e-3, -1e-45)
REWARDS = (0.0, 1.0, -1.0, 1e12, -1e12, 1e-300)
VOCABULARY = 13
"""Vocabulary of the model that is trained."""
SCORES = ("0", "-1", "1", "inf", "-inf", "1e300", "-1e300", "9007199254740993", "5e-324", "nan")
STRANGE: tuple[Any, ...] = (
    *("", "x", " 1", "1.5", "1e309", "nan", "inf", "-inf", "0x10", "=", "=x", "=-1", "\x00", "\x1b[31mred\x1b[0m", "‮"),
    *(b"\xff\xfe", b"\x81\xa1", b"5 \x93\x01", b"1 \xc1", b"9999999999999 \x80", b"0 \x81\xa3pid\xcf" + b"\xff" * 8),
    *("a" * 100_000, "[worker.x]", "[worker.vcopy]", "a:b", "{rlb:other}:meta", "rlb:other:g:a.1:u.1", "*"),
    *NUMBERS,
)
SCRIPTS = (
    *("open", "push", "ticket", "keep", "done", "renumber", "drop", "commit", "lease", "attempt", "report"),
    *("announce", "retire", "recover", "void", "ask", "telemetry"),
)
ACTIONS = (
    *("take", "done", "resume", "expect", "note", "count", "damaged", "config", "drain", "ended", "error", "publish"),
    *("renew", "release", "acquire", "wanted", "refuse", "settle"),
)
"""First argument of the scripts that do several things; one that does not exist is a value as strange as another."""
CONTROL = (
    *(
        "meta",
        "lease",
        "pool",
        "steps",
        "state",
        "closed",
        "ledger",
        "damaged",
        "policy",
        "trainer",
        "garbage",
        "holds",
    ),
    *("history", "summary", "waiting", "reuse", "allowance", "numbers", "ends", "eval", "workers", "scorers", "ranks"),
    *("batchers", "paused", "tickets:vcopy", "visits:vcopy", "producer:x:u"),
)
FATES = ("pushed", "packed", "trained", "dropped:flat", "dropped:x", "reused", "x")
FORBIDDEN = (
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("SHUTDOWN",),
    ("ACL", "WHOAMI"),
    ("EVAL", "return 1", 0),
    ("KEYS", "*"),
)
"""Beside the writes of :meth:`Attacker.forbidden`: what no worker may do."""


@dataclass(slots=True)
class _Seen:
    """The attacker's knowledge of the run, to aim at."""

    epoch: str
    step: int
    now_ms: int
    entries: list[tuple[str, dict[str, bytes]]]


class Attacker:
    """Draws and sends; `kinds` counts what was taken and what was refused."""

    def __init__(self, client: redis.Redis, run: str, *, other: str, envs: Sequence[str], dice: random.Random) -> None:
        self.client, self.keys, self.other, self.dice = client, Keys(run), Keys(other), dice
        self.envs = (*envs, "a", "new", "x" * 64)
        self.kinds: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.allowed: list[str] = []
        """Commands that no worker should have: a finding."""
        self._shas = [str(client.script_load(script_text(name))) for name in SCRIPTS]
        self._count = 0

    # -- moves on control keys ----------------------------------------------------------------------------------------
    def moves(self) -> tuple[tuple[str, Callable[[_Seen], Command | list[Command]]], ...]:
        return (
            ("pool entry", lambda seen: self._entry(seen)),
            ("pool id", lambda seen: ("XADD", self.keys.pool, self._id(seen), *self._fields(seen))),
            ("pool cut", lambda seen: ("XADD", self.keys.pool, "MAXLEN", self.dice.choice((0, 1, 5)), "*", "x", "y")),
            (
                "result",
                lambda seen: ("XADD", self.keys.eval, self._id(seen), *self._pairs(("env", "version", "reward"))),
            ),
            ("ledger", lambda seen: ("HINCRBY", self.keys.ledger, self._fate(), self._number())),
            ("numbers", lambda seen: ("HINCRBY", self.keys.numbers, self._env(), self._number())),
            ("ticket", lambda seen: ("ZADD", self._tickets(), self.dice.choice(SCORES), self._value())),
            ("no ticket", lambda seen: ("ZREM", self._tickets(), self.dice.randrange(50))),
            ("producer", self._producer),
            ("visits", lambda seen: ("HSET", self.keys.visits(self._env()), self._value(), self._value())),
            ("heartbeat", lambda seen: ("HSET", self.keys.heartbeats("worker"), self._value(), self._value())),
            (
                "no heartbeat",
                lambda seen: ("HDEL", self.keys.heartbeats("worker"), *self.envs, "vcopy-0", "worker vcopy"),
            ),
            ("end", lambda seen: ("HSET", self.keys.ends, self._value(), self._value())),
            ("end of an env", lambda seen: ("HSET", self.keys.ends, self.envs[0], self._value())),
            ("no end", lambda seen: ("HDEL", self.keys.ends, self._env())),
            (
                "evaluating",
                lambda seen: ("SET", self.keys.evaluating(self._env(), self.dice.randrange(99), 0), self._value()),
            ),
            ("not evaluating", lambda seen: ("DEL", self.keys.evaluating(self._env(), self.dice.randrange(9), 0))),
            ("payload", self._payload),
            ("payload over another", self._over_another),
            ("permanent payload", self._permanent),
            ("script", self._script),
            ("script on other keys", lambda seen: self._script(seen, mixed=True)),
            ("forbidden", self.forbidden),
        )

    def draw_moves(self, count: int) -> list[str]:
        """Kinds of `count` moves in order, each as often as the others."""
        names = [name for name, _ in self.moves()]
        drawn = [names[i % len(names)] for i in range(count)]
        self.dice.shuffle(drawn)
        return drawn

    def move(self, kind: str) -> str:
        """Sends one move, and returns its outcome, for people."""
        made = dict(self.moves())[kind](self.look())
        commands = made if isinstance(made, list) else [made]
        said = ""
        for command in commands:
            said = self._send(command, taken_is_wrong=kind == "forbidden")
        self.kinds[kind] += 1
        self.taken[kind] += said == "taken"
        return f"{' '.join(_short(part) for part in commands[-1])}: {said}"

    def look(self) -> _Seen:
        seconds, micros = self.client.time()
        try:
            found = self.client.xrange(self.keys.pool, count=200)
        except redis.ResponseError:
            found = []
        epoch, step = self.client.hmget(self.keys.meta, "epoch", "step")
        entries = [(i.decode(), {k.decode(errors="replace"): v for k, v in f.items()}) for i, f in found]
        return _Seen((epoch or b"").decode(), int(step or 0), 1000 * seconds + micros // 1000, entries)

    def forbidden(self, seen: _Seen) -> Command:
        """A command that every control key of this run or another one must be safe from."""
        keys = self.dice.choice((self.keys, self.other))
        word = self.dice.choice(CONTROL)
        key = f"{keys.tag}:{word}"
        if keys is self.other:
            key = self.dice.choice((key, self.other.payload("a.1", "u.1"), self.other.unnamed_payload("a.1", "u.1")))
        elif word == "ends" or word == "workers":
            key = self.keys.meta
        writes: tuple[Command, ...] = (
            *(
                ("DEL", key),
                ("RENAME", key, f"{key}x"),
                ("SET", key, "x"),
                ("PEXPIRE", key, 1),
                ("RESTORE", key, 0, "x"),
            ),
            *(
                ("XTRIM", key, "MAXLEN", 0),
                ("XDEL", key, "1-0"),
                ("HINCRBYFLOAT", key, "x", "inf"),
                ("EVAL", "return 1", 1, key),
            ),
        )
        return self.dice.choice((*writes, *FORBIDDEN))

    # -- pushes -------------------------------------------------------------------------------------------------------
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

    def _push(self, seen: _Seen) -> tuple[str, list[Command]]:
        if self.dice.random() < 0.4:
            return "push by hand", [self._entry(seen)]
        return "push by script", self._push_script(seen)

    def _push_script(self, seen: _Seen) -> list[Command]:
        dice = self.dice
        self._count += 1
        group = make_group(
            env=dice.choice(self.envs[:2]) if dice.random() < 0.5 else self._env(),
            seed=self._count,
            size=dice.choice((1, 2, 4, 8)),
            group_id=dice.choice(
                (f"evil.{self._count}", f"vcopy.{dice.randrange(50)}", f"repeat.{dice.randrange(50)}")
            ),
            rewards=None,
            version=dice.choice((seen.step, seen.step, max(0, seen.step - 1), seen.step + 1, 0, 10**6)),
            needs=dice.choice(((), (), (), ("ref_logprobs",), ("nobody",))),
        )
        if dice.random() < 0.5:
            group = self._extreme(group)
        push = payload.encode_push(group)
        suffix = self._suffix(seen)
        waiting = self.keys.unnamed_payload(group.group_id, suffix)
        payloads = [self._damaged(p, cuts=False) if dice.random() < 0.3 else p for p in push.payloads]
        fields: list[Any] = [part for i, p in enumerate(payloads) for part in (str(i), p)]
        args: list[Any] = [seen.epoch, dice.choice((1, 1, 1, 1, 2, 2**53)), waiting, group.env, group.group_id, suffix]
        sound = dice.random() < 0.4  # goes into a step, where its payload is found out
        args += [len(push.info.rollouts), push.info.tokens, push.metadata if sound else self._metadata(push), ""]
        args += [self.keys.payload_prefix]
        for _ in range(0 if sound else dice.choice((0, 0, 1, 1, 2))):
            at = dice.choice((0, 1, 2, 3, 4, 5, 6, 7, 9, 9, 10))
            args[at] = self._value()
            if at == 9 and seen.entries:
                args[at] = dice.choice(seen.entries)[0]
            if at == 10:
                args[at] = dice.choice((self.other.payload_prefix, "", self.keys.tag))
        uuid = suffix.partition(".")[0] or "u"
        producer = f"{self.keys.tag}:producer:evil:{dice.choice((uuid, str(self._count)))}"
        keys = [self.keys.meta, self.keys.pool, producer, self.keys.ledger, self.keys.garbage]
        commands: list[Command] = []
        if sound or dice.random() < 0.9:
            commands.append(("HSET", waiting, *fields))
            commands.append(("PEXPIRE", waiting, dice.choice((1, 10**4, 10**9))))
        return [*commands, ("EVALSHA", self._shas[1], 5, *keys, *args)]

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

    def _entry(self, seen: _Seen) -> Command:
        """An entry without a payload, or with that of another one."""
        return ("XADD", self.keys.pool, "*", *self._fields(seen))

    def _fields(self, seen: _Seen) -> list[Any]:
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
        """Metadata as it should be, with some bytes changed, or well formed with numbers that no rollout has."""
        dice = self.dice
        drawn = dice.random()
        if drawn < 0.35:
            return push.metadata
        if drawn < 0.5:
            return self._damaged(push.metadata)
        info = push.info
        values: dict[str, Any] = {"format": METADATA_FORMAT} | {key: getattr(info, key) for key in GROUP_KEYS}
        values |= {"ids": None, "rewards": None, "columns": [], "checksum": 0xFFFFFFFF}
        rows = [self._row(r) for r in info.rollouts]
        order = ("format", *GROUP_KEYS, "ids", "rows", "rewards", "columns", "checksum")
        values["rows"] = b"".join(rows)
        if dice.random() < 0.3:
            values["ids"] = dice.choice((["same"] * len(rows), ["x" * 5000], [], "ids", [1, 2]))
        if dice.random() < 0.3:
            values[dice.choice(order[1:-1])] = dice.choice((None, 0, -1, 2**63 - 1, "", "\x1b[2J", [], {}, [[["x"]]]))
        data = dumps({key: values[key] for key in order})[:-4]
        return data + struct.pack(">I", zlib.crc32(data))

    def _row(self, r: Any) -> bytes:
        dice = self.dice
        numbers = [r.length, r.prompt_tokens, r.loss_tokens, r.turns]
        flags = 1 | dice.choice((0, 2, 254))
        versions = [r.min_version, r.max_version]
        size = r.size
        for _ in range(dice.choice((0, 1, 1, 2))):
            numbers[dice.randrange(4)] = dice.choice((0, 1, 2**31, 2**32 - 1))
        if dice.random() < 0.3:
            versions[dice.randrange(2)] = dice.choice((1, 10**6, 2**53, 2**63, 2**64 - 1))
        if dice.random() < 0.1:
            size = dice.choice((0, 1, 2**32 - 1))
        reward = dice.choice(FLOATS) if dice.random() < 0.7 else r.reward
        return ROW.pack(*numbers, reward, *versions, flags, size, r.checksum)

    def _damaged(self, data: bytes, *, cuts: bool = True) -> bytes:
        changed = bytearray(data)
        for _ in range(self.dice.choice((1, 1, 3, 20))):
            changed[self.dice.randrange(len(changed))] = self.dice.randrange(256)
        return bytes(changed[: len(changed) // 2] if cuts and self.dice.random() < 0.3 else changed)

    # -- what the others are made of ----------------------------------------------------------------------------------
    def _payload(self, seen: _Seen) -> Command:
        """A command on the key where a payload of somebody's next push may wait."""
        key = self.keys.unnamed_payload(f"{self.envs[0]}.{self.dice.randrange(99)}", self._suffix(seen))
        return self.dice.choice((("HSET", key, self._value(), self._value()), ("PEXPIRE", key, 1), ("UNLINK", key)))

    def _over_another(self, seen: _Seen) -> list[Command]:
        """A payload of garbage in the place of one that is pending, or of one that was trained."""
        entry = self.dice.choice(seen.entries)[1] if seen.entries else {}
        group = entry.get("group", b"a.1").decode(errors="replace")
        place = self.keys.payload(group, entry.get("key", b"u.1").decode(errors="replace"))
        own = f"{self.keys.payload_prefix}{{{place}}}"
        return [("HSET", own, "0", self._value()), ("RENAME", own, place)]

    def _permanent(self, seen: _Seen) -> list[Command]:
        own = self.keys.unnamed_payload(f"evil.{self.dice.randrange(10**6)}", "u.1")
        return [("HSET", own, "0", "x"), ("PERSIST", own), ("RENAME", own, self.keys.payload("evil.0", "u.1"))]

    def _producer(self, seen: _Seen) -> Command:
        """Producer of a worker at work, as the pool shows it, or of nobody."""
        names = [entry.get("key", b"").decode(errors="replace").partition(".")[0] for _, entry in seen.entries]
        uuid = self.dice.choice([*names, "u", ""])
        worker = self.dice.choice(("vcopy-0", "repeat-0", "x", ""))
        key = f"{self.keys.tag}:producer:{worker}:{uuid}"
        return ("HSET", key, self.dice.choice(("sequence", "id", "x")), self._value())

    def _script(self, seen: _Seen, *, mixed: bool = False) -> Command:
        """One of them, with its keys as its header numbers them, or with any."""
        dice = self.dice
        name = dice.choice(SCRIPTS)
        keys = _keys_of(name, self.keys)
        if mixed:
            keys = [f"{self.keys.tag}:{dice.choice(CONTROL)}" for _ in keys]
        args = [self._value() for _ in range(dice.choice((3, 8, 15)))]
        args[0] = dice.choice((*ACTIONS, seen.epoch, "", *NUMBERS))
        if name == "ticket":  # with sound numbers it takes real tickets
            args[:6] = ["take", self._env(), dice.choice(NUMBERS), dice.choice((1, 60_000, 10**15)), self._value(), ""]
        return ("EVALSHA", self._shas[SCRIPTS.index(name)], len(keys), *keys, *args)

    def _pairs(self, names: Sequence[str]) -> list[Any]:
        return [part for name in names for part in (name, self._value())]

    def _value(self) -> Any:
        return self.dice.choice(STRANGE)

    def _number(self) -> Any:
        return self.dice.choice(NUMBERS)

    def _env(self) -> str:
        return self.dice.choice(self.envs)

    def _tickets(self) -> str:
        return self.keys.tickets(self._env())

    def _fate(self) -> Any:
        env, fate = self._env(), self.dice.choice(FATES)
        field = f"{env}:{fate}:{self.dice.choice(('rollouts', 'tokens'))}"
        return self.dice.choice((field, field, field, "lost", "damaged", self._value()))

    def _suffix(self, seen: _Seen) -> str:
        dice = self.dice
        drawn = dice.random()
        if drawn < 0.7 or not seen.entries:
            return f"evil{self._count}-{dice.randrange(10**9)}.1"
        if drawn < 0.85:
            return dice.choice(seen.entries)[1].get("key", b"u.1").decode(errors="replace")
        return dice.choice(("u 77", "", "u.1", "a:b.1", "../x.1", f"{'u' * 99}.1", "u.-1"))

    def _id(self, seen: _Seen) -> str:
        ahead = self.dice.choice((1, 3_000_000, 3_700_000, 10**10))
        return self.dice.choice((LARGEST, f"{seen.now_ms + ahead}-0", "18446744073709551615-*", "1-1", "*"))

    def _send(self, command: Command, *, taken_is_wrong: bool = False) -> str:
        try:
            self.client.execute_command(*command)
        except redis.ResponseError as error:
            return f"refused: {str(error)[:100]}"
        except redis.DataError as error:  # redis-py does not send it
            return f"not sent: {error}"
        if taken_is_wrong:
            self.allowed.append(" ".join(_short(part) for part in command))
        return "taken"


def _keys_of(name: str, keys: Keys) -> list[str]:
    """The control keys of a script, in its order; for those that no worker calls, as many as there are."""
    own = {
        "push": [keys.meta, keys.pool, f"{keys.tag}:producer:evil:u", keys.ledger, keys.garbage],
        "ticket": [keys.tickets("vcopy"), keys.allowance, keys.numbers, keys.ends],
        "keep": [keys.tickets("vcopy")],
        "done": [keys.ends, keys.numbers, keys.meta],
        "telemetry": [keys.heartbeats("worker"), keys.damaged, keys.meta],
        "lease": [keys.lease, keys.meta, keys.allowance, keys.pool],
        "renumber": [keys.lease, keys.pool],
        "attempt": [keys.trainer, keys.meta, keys.policy, keys.steps],
        "report": [keys.trainer, keys.meta, keys.steps, keys.ledger, keys.policy],
        "announce": [keys.trainer, keys.meta, keys.policy],
        "retire": [keys.lease, keys.meta, keys.steps, keys.trainer, keys.history, keys.holds],
        "drop": [keys.lease, keys.pool, keys.ledger, keys.closed, keys.garbage, keys.history, keys.meta, keys.reuse],
        "ask": [keys.meta, keys.allowance],
        "open": [keys.meta, keys.pool],
    }
    if name in own:
        return own[name]
    head = [keys.lease, keys.meta, keys.pool, keys.steps, keys.ledger, keys.closed, keys.garbage]
    if name == "commit":
        head = [keys.lease, keys.pool, keys.steps, keys.meta, keys.ledger, keys.closed, keys.garbage]
        return [*head, keys.history, keys.summary, keys.state, keys.reuse]
    return [*head, keys.trainer, keys.history, keys.policy if name == "void" else keys.reuse]


def _is_taken(reply: Any) -> bool:
    if isinstance(reply, Exception):
        return False
    return not isinstance(reply, list) or reply[0] == b"OK"


def _short(part: Any) -> str:
    shown = repr(part) if not isinstance(part, str) or not part.isprintable() else part
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
