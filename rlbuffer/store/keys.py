"""Names of everything a run keeps on the server.

Control keys share one hash tag, ``{rlb:<run>}``, so that every script touches a single slot of a cluster. Payload keys
carry none and spread over all slots.
"""

from __future__ import annotations

import re

from rlbuffer.errors import ConfigError

SCHEMA = 8
"""Layout of the keys and of what is in them; another number is refused (SchemaMismatch)."""
RUN_NAME = re.compile(r"[a-z0-9_-][a-z0-9_.-]{0,63}\Z")
"""Name of a run that can be there. None begins any more whose name begins with a dash: a command takes that for an
option."""
SUFFIX = re.compile(rb"[A-Za-z0-9_-]{1,64}\.[0-9]{1,16}\Z")
"""``<incarnation>.<sequence>`` in a payload's key."""
RUNS = "rlb:runs"
"""Sorted set: run ->> Unix seconds when it was last opened."""
HEARTBEATS = {
    "worker": "workers",
    "scorer": "scorers",
    "rank": "ranks",
    "batcher": "batchers",
    "gateway": "gateways",
}
"""Kind of a heartbeat -> the hash that holds it."""


class Keys:
    """The keys of one run.

    Example:
        >>> keys = Keys("math")
        >>> keys.meta, keys.tickets("gsm8k")
        ('{rlb:math}:meta', '{rlb:math}:tickets:gsm8k')
        >>> keys.payload("gsm8k.7", "c0ffee.3")
        'rlb:math:g:gsm8k.7:c0ffee.3'
    """

    def __init__(self, run: str) -> None:
        if not isinstance(run, str) or not RUN_NAME.match(run):
            raise ConfigError(f"run = {run!r} must match {RUN_NAME.pattern[:-2]}", setting="run")
        self.run = run
        self.tag = f"{{rlb:{run}}}"
        self.meta = f"{self.tag}:meta"
        self.lease = f"{self.tag}:lease"
        self.pool = f"{self.tag}:pool"
        self.reuse = f"{self.tag}:reuse"
        self.steps = f"{self.tag}:steps"
        self.state = f"{self.tag}:state"
        self.closed = f"{self.tag}:closed"
        self.ledger = f"{self.tag}:ledger"
        self.damaged = f"{self.tag}:damaged"
        self.unused = f"{self.tag}:unused"
        self.allowance = f"{self.tag}:allowance"
        self.numbers = f"{self.tag}:numbers"
        self.ends = f"{self.tag}:ends"
        self.prompts = f"{self.tag}:prompts"
        self.paused = f"{self.tag}:paused"
        self.policy = f"{self.tag}:policy"
        self.trainer = f"{self.tag}:trainer"
        self.garbage = f"{self.tag}:garbage"
        self.history = f"{self.tag}:history"
        self.summary = f"{self.tag}:summary"
        self.records = f"{self.tag}:records"
        self.eval = f"{self.tag}:eval"
        self.open = f"{self.tag}:open"
        """Open rollouts, by their deadline."""
        self.open_ended = f"{self.tag}:open_ended"
        """Groups of open rollouts that wait for their push, by when the last of them ended."""
        self.open_pushed = f"{self.tag}:open_pushed"
        """Groups that were pushed, by when."""
        self.open_keys = f"{self.tag}:open_keys"
        """Digest of the key that a caller gave -> the group that it has begun."""
        self.open_counts = f"{self.tag}:open_counts"
        self.loading = f"{self.tag}:loading"
        """The gateway that loads policy versions into the engines; expires."""
        self.absent = f"{self.tag}:absent"
        """Never there, and among the keys of every script: see :meth:`Session.declared`."""
        self.payload_prefix = f"rlb:{run}:g:"

    def owns(self, name: bytes) -> bool:
        """True for the name of a key of this run."""
        return name.startswith((f"{self.tag}:".encode(), self.payload_prefix.encode()))

    def producer(self, worker: str, incarnation: str) -> str:
        """Last push sequence of one process. Raises ConfigError for names that cannot stand in a key."""
        from rlbuffer.records.info import check_producer  # loads numpy, which a health check has no use for

        check_producer(worker, incarnation)
        return f"{self.tag}:producer:{worker}:{incarnation}"

    def tickets(self, env: str) -> str:
        """Ticket numbers of an env that are out, with their expiry."""
        return f"{self.tag}:tickets:{env}"

    def taken(self, env: str) -> str:
        """Ticket numbers of an env that are out, with the version and the time at which each was taken."""
        return f"{self.tag}:taken:{env}"

    def evaluating(self, env: str, version: int, line: int) -> str:
        """The owner of the evaluation of a version of a line on an env, or that it is done."""
        return f"{self.tag}:evaluating:{env}:{version}:{line}"

    def scoring(self, entry_id: str) -> str:
        """The scorer that adds what a pending push needs."""
        return f"{self.tag}:scoring:{entry_id}"

    def open_group(self, group_id: str) -> str:
        """A group of open rollouts."""
        return f"{self.tag}:open_group:{group_id}"

    def open_rollout(self, name: str) -> str:
        """An open rollout, with its calls; `name` is ``<group_id>/<index>``."""
        return f"{self.tag}:open_rollout:{name}"

    def visits(self, env: str) -> str:
        """The visits of each prompt of an env: how its groups went."""
        return f"{self.tag}:visits:{env}"

    def heartbeats(self, kind: str) -> str:
        """Heartbeats of one kind of process."""
        return f"{self.tag}:{HEARTBEATS[kind]}"

    def payload(self, group_id: str, suffix: str) -> str:
        """The payload of one push; `suffix` is ``<incarnation>.<sequence>``."""
        return f"{self.payload_prefix}{group_id}:{suffix}"

    def unnamed_payload(self, group_id: str, suffix: str) -> str:
        """The key where the payload waits, with a time to live, until its push is pending: in the slot of its name."""
        return f"{self.payload_prefix}{{{self.payload(group_id, suffix)}}}"

    def name_of(self, key: str) -> str:
        """The name of the payload that waits under `key`; `key` where it has its name, or what it holds is none of this
        run's: anybody may write there."""
        name = key[len(self.payload_prefix) + 1 : -1] if key.startswith(f"{self.payload_prefix}{{") else key
        return name if name.startswith(self.payload_prefix) else key


def check_new_run(run: str) -> None:
    """Raises ConfigError for the name of a run that may be there, but that must not begin."""
    if run.startswith("-"):
        raise ConfigError(
            f"run = {run!r} begins with a dash, which commands take for an option: name the run otherwise",
            setting="run",
        )


EARLY_SHARE = 0.85
"""Share of maxmemory from which trained steps retire before a checkpoint holds them."""
