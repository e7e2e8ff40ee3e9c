"""Everything that somebody with a worker's login can send: moves on control keys, and pushes, drawn by seed.

Everything goes over one connection of the user `worker` of deploy/users.acl. A refusal of the server is counted, and is
no finding: it protects the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import Any

import redis
from hostile_pushes import NUMBERS, Command, Pushes, Seen

from rlbuffer.store.keys import Keys
from rlbuffer.store.session import script_text

LARGEST = "18446744073709551615-18446744073709551615"
SCORES = ("0", "-1", "1", "inf", "-inf", "1e300", "-1e300", "9007199254740993", "5e-324", "nan")
SCRIPTS = (
    *("open", "push", "ticket", "keep", "done", "drop", "commit", "lease", "attempt", "report"),
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
    ("SCRIPT", "LOAD", "while true do end"),
    ("KEYS", "*"),
)
"""Beside the writes of :meth:`Attacker.forbidden`: what no worker may do."""


class Attacker(Pushes):
    """Draws and sends; `kinds` counts what was taken and what was refused."""

    def __init__(self, client: redis.Redis, run: str, *, other: str, envs: Sequence[str], dice: random.Random) -> None:
        super().__init__(client, run, other=other, envs=envs, dice=dice)
        self.allowed: list[str] = []
        """Commands that no worker should have: a finding."""

    # -- moves on control keys ----------------------------------------------------------------------------------------
    def moves(self) -> tuple[tuple[str, Callable[[Seen], Command | list[Command]]], ...]:
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
            ("prompts", lambda seen: ("HSET", self.keys.prompts, self._env(), self._value())),
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

    def forbidden(self, seen: Seen) -> Command:
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

    # -- what the others are made of ----------------------------------------------------------------------------------
    def _payload(self, seen: Seen) -> Command:
        """A command on the key where a payload of somebody's next push may wait."""
        key = self.keys.unnamed_payload(f"{self.envs[0]}.{self.dice.randrange(99)}", self._suffix(seen))
        return self.dice.choice((("HSET", key, self._value(), self._value()), ("PEXPIRE", key, 1), ("UNLINK", key)))

    def _over_another(self, seen: Seen) -> list[Command]:
        """A payload of garbage in the place of one that is pending, or of one that was trained."""
        entry = self.dice.choice(seen.entries)[1] if seen.entries else {}
        group = entry.get("group", b"a.1").decode(errors="replace")
        place = self.keys.payload(group, entry.get("key", b"u.1").decode(errors="replace"))
        own = f"{self.keys.payload_prefix}{{{place}}}"
        return [("HSET", own, "0", self._value()), ("RENAME", own, place)]

    def _permanent(self, seen: Seen) -> list[Command]:
        own = self.keys.unnamed_payload(f"evil.{self.dice.randrange(10**6)}", "u.1")
        return [("HSET", own, "0", "x"), ("PERSIST", own), ("RENAME", own, self.keys.payload("evil.0", "u.1"))]

    def _producer(self, seen: Seen) -> Command:
        """Producer of a worker at work, as the pool shows it, or of nobody."""
        names = [entry.get("key", b"").decode(errors="replace").partition(".")[0] for _, entry in seen.entries]
        uuid = self.dice.choice([*names, "u", ""])
        worker = self.dice.choice(("vcopy-0", "repeat-0", "x", ""))
        key = f"{self.keys.tag}:producer:{worker}:{uuid}"
        return ("HSET", key, self.dice.choice(("sequence", "id", "x")), self._value())

    def _script(self, seen: Seen, *, mixed: bool = False) -> Command:
        """One of them, with its keys as its header numbers them, or with any."""
        dice = self.dice
        name = dice.choice(SCRIPTS)
        keys = _keys_of(name, self.keys)
        if mixed:
            keys = [f"{self.keys.tag}:{dice.choice(CONTROL)}" for _ in keys]
        args = [self._value() for _ in range(dice.choice((3, 8, 15)))]
        args[0] = dice.choice((*ACTIONS, seen.epoch, "", *NUMBERS))
        if name == "ticket":  # with sound numbers it takes real tickets
            args[:5] = ["take", self._env(), dice.choice(NUMBERS), dice.choice((1, 60_000, 10**15)), self._value()]
            args[5:7] = ["", 900_000]
        return ("EVALSHA", sha1(script_text(name).encode(), usedforsecurity=False).hexdigest(), len(keys), *keys, *args)

    def _pairs(self, names: Sequence[str]) -> list[Any]:
        return [part for name in names for part in (name, self._value())]

    def _number(self) -> Any:
        return self.dice.choice(NUMBERS)

    def _tickets(self) -> str:
        return self.keys.tickets(self._env())

    def _fate(self) -> Any:
        env, fate = self._env(), self.dice.choice(FATES)
        field = f"{env}:{fate}:{self.dice.choice(('rollouts', 'tokens'))}"
        return self.dice.choice((field, field, field, "lost", "damaged", self._value()))

    def _id(self, seen: Seen) -> str:
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
        "ticket": [
            keys.tickets("vcopy"),
            keys.allowance,
            keys.numbers,
            keys.ends,
            keys.meta,
            keys.policy,
            keys.taken("vcopy"),
        ],
        "keep": [keys.tickets("vcopy")],
        "done": [keys.ends, keys.numbers, keys.meta],
        "telemetry": [keys.heartbeats("worker"), keys.damaged, keys.meta],
        "lease": [keys.lease, keys.meta, keys.allowance, keys.pool, keys.ends],
        "attempt": [keys.trainer, keys.meta, keys.policy, keys.steps],
        "report": [keys.trainer, keys.meta, keys.steps, keys.ledger, keys.policy, keys.unused, keys.history],
        "announce": [keys.trainer, keys.meta, keys.policy],
        "retire": [keys.lease, keys.meta, keys.steps, keys.trainer, keys.history],
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
    return [*head, keys.trainer, keys.history, *([keys.policy] if name == "void" else []), keys.reuse]


def _short(part: Any) -> str:
    shown = repr(part) if not isinstance(part, str) or not part.isprintable() else part
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
