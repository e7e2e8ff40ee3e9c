"""The server that the settings name, and the run on it: can a run live there, and does it go on? Reads only.

What holds at the start may change later: an eviction rule, the append-only file, the replicas, a clock. Those checks
the leader makes again while it leads (:class:`WhileItLasts`). It watches the memory by itself, as often as it must.

An embedded server that does not run is not started.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import redis

from rlbuffer.checks.check import CHECKS, Check, Context, Finding, Level, check, failure, ok, refused, warning
from rlbuffer.checks.settings import too_small
from rlbuffer.client.buffer import password_of
from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.loading import TYPED, Loaded, meant_run
from rlbuffer.config.memory_needs import FULL_SHARE, memory_bytes, mib
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, RlbufferError, RunGone, ServerUnreachable, ServerUnsuitable
from rlbuffer.state.heartbeats import archive_folder
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import duration, plural, printable
from rlbuffer.state.verdicts import JUDGED_STEPS, VERDICTS, WRONG, newest_steps, sampler_fact, verdicts
from rlbuffer.store.history import Committed
from rlbuffer.store.keys import EARLY_SHARE, SCHEMA
from rlbuffer.store.server import embedded
from rlbuffer.store.server.address import is_memory
from rlbuffer.store.server.answers import ELSEWHERE, reason_of
from rlbuffer.store.server.binary import find_binary
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.sentinels import Watchers
from rlbuffer.store.server.suitable import check_no_sentinel, check_suitable, fullest, identity
from rlbuffer.store.viewer import Viewer

_T = TypeVar("_T")
CLOCK_SECONDS = 2.0
"""Difference of two clocks, beyond what the round trip explains, from which it is worth a warning."""
STALL_SECONDS, STALL_STEPS = 60.0, 5.0
"""Seconds without a step, and times the usual time of a step, from which a run has stalled."""
FIRST_STEP_SECONDS = 300.0
"""Seconds that a run may take for its first steps, whose usual time is not known."""
READ_RECORDS = 1000
"""Newest records of the history that are looked at."""
RAISE = (
    "Raise it (server.maxmemory; redis-cli config set maxmemory on a server of your own), or remove what is not "
    "needed: rlbuffer runs list, rlbuffer runs reset RUN"
)


STEADY = frozenset({"persistence"})
"""Checks whose words hold no number that moves."""
SHOWN_RUNS = 8
"""Runs of a server that are named, the newest."""
LOOK_SECONDS = 5.0
"""A run that goes on looks again later: it does not stand still for a server that loads."""


class _Unchecked(Connection):
    """A connection to a server that may be unsuitable: what is wrong with it is to be said check by check."""

    def _check_server(self) -> None:
        self.client.ping()
        with suppress(redis.exceptions.NoPermissionError):
            check_no_sentinel(dict(self.client.info()), self.address, self._source())


def check_server(c: Context) -> Iterator[Finding]:
    """What the checks of the server find. What this user may not ask is not known, and no failure."""
    url = c.settings.redis_url
    if url and is_memory(url):
        text = f"{url} is inside of one process, and gone with it"
        fix = "Set redis_url to a server, or leave it out, for a run of several processes"
        yield replace(warning(text, "redis_url", fix=fix), check="server")
        return
    try:
        running = None if url else embedded.find(c.settings.home_dir)
    except ConfigError as error:
        yield replace(refused(error), check="server")
        return
    except ServerUnreachable as error:
        yield replace(failure(str(error), fix="Wait, or look into its log"), check="server")
        return
    try:
        if not url and running is None:
            program = find_binary()
            text = f"embedded, {program.name} {program.version} ({program.path}); it starts with the first command"
            yield replace(ok(text), check="server")
            return
        connection = _connected(c, url or running or "")
    except RlbufferError as error:
        yield replace(failure(str(error), fix="Start it, or change redis_url"), check="server")
        return
    with connection:
        for each in (check for check in CHECKS if check.level == "server"):
            try:
                yield from _found(replace(c, connection=connection), each)
            except RlbufferError as error:
                yield replace(failure(str(error)), check=each.name)


class WhileItLasts:
    """The checks of a server that are made again while a run goes on. What was only a warning when they were made first
    was somebody's choice; of :data:`STEADY` ones every other word than that of then is a change."""

    def __init__(self, settings: RunSettings) -> None:
        self._context = Context(loaded=Loaded(settings=settings, sources={}))
        self._chosen: frozenset[str] | None = None
        """Checks that had warned at first."""
        self._well: dict[str, str] = {}
        """STEADY checks -> what they said when all was well."""

    def faults(self) -> list[str]:
        """What is wrong now, each with what to do.

        Raises:
            RlbufferError: the server does not answer: whoever needs it meets that, too.
        """
        settings = self._context.settings
        url = settings.redis_url or embedded.find(settings.home_dir, timeout_seconds=LOOK_SECONDS)
        if not url or is_memory(url):
            return []
        with _connected(self._context, url) as connection:
            made = replace(self._context, connection=connection)
            findings = [finding for each in CHECKS if each.lasts for finding in _found(made, each)]
        warned = frozenset(finding.check for finding in findings if finding.level is Level.WARNING)
        chosen = self._chosen = warned if self._chosen is None else self._chosen & warned
        wrong = [
            finding
            for finding in findings
            if finding.level is Level.FAILURE or (finding.level is Level.WARNING and finding.check not in chosen)
        ]
        for finding in findings:
            if finding.level is Level.OK and finding.check in STEADY:
                first = self._well.setdefault(finding.check, finding.text)
                wrong += [replace(finding, fix=f"It was: {first}")] * (first != finding.text)
        return [" ".join(f"{f.text.rstrip('.')}{f'. {f.fix}' if f.fix else ''}".split()) for f in wrong]


def _connected(c: Context, url: str) -> _Unchecked:
    """A connection for checks. Raises RlbufferError: nothing answers."""
    return _Unchecked(
        url,
        home=Path(),
        server=c.settings.server,
        name="doctor",
        origin=c.loaded.place("redis_url") if c.settings.redis_url else "the embedded server's files",
        password=partial(password_of, c.settings) if c.settings.redis_url else None,
        patience_seconds=0,
    )


def _found(c: Context, each: Check) -> Iterator[Finding]:
    """What a check finds; what this user may not ask is a warning."""
    try:
        yield from each.found(c)
    except ServerUnsuitable as error:
        message = f"not known: {str(error).splitlines()[0]}"
        yield replace(warning(message, fix="Let this user ask it"), check=each.name)


def _asked(c: Context, question: Callable[[redis.Redis], _T]) -> _T:
    """The server's answer, asked once."""
    return c.server.call(lambda: question(c.server.client), patience_seconds=0)


def _infos(c: Context) -> list[dict[str, Any]]:
    """INFO of each primary."""
    return _asked(c, lambda _: [dict(server.info()) for server in c.server.servers()])


def _setting(c: Context, name: str) -> str:
    with suppress(RlbufferError):
        return str(_asked(c, lambda client: client.config_get(name)).get(name, ""))
    return "not known"  # who may not ask


@check("redis_url", lasts=True)
def server(c: Context) -> Iterator[Finding]:
    """The server is new enough, evicts nothing and is no replica."""
    connection = c.server
    info = dict(_asked(c, lambda client: client.info()))
    try:
        _asked(c, lambda client: check_suitable(client, connection.address, "", is_cluster=connection.is_cluster))
    except RlbufferError as error:
        yield failure(str(error))
    else:
        name, version = identity(info)
        yield ok(f"{name} {version} at {connection.address}, memory policy noeviction")
    if info.get("role") == "slave":
        first, _, fix = ELSEWHERE["READONLY"].partition(". ")
        yield failure(f"{connection.address}: {first}", "redis_url", fix=fix)


@check("redis_url", lasts=True)
def failover(c: Context) -> Iterator[Finding]:
    """Somebody takes a lost primary's place, and all agree who it is."""
    if c.server.sentinels is not None:
        yield from _sentinels(c.server.sentinels)
    elif not c.server.is_cluster:
        return
    counts = [int(info.get("connected_slaves", 0)) for info in _infos(c)]
    least = "" if c.server.is_cluster else _setting(c, "min-replicas-to-write")
    text = f"replicas: {', '.join(map(str, counts))}" + f", min-replicas-to-write {least}" * bool(least)
    if 0 in counts:
        yield warning(text, fix="Start one for each primary: without it nobody takes its place")
    elif least == "0":
        fix = "redis-cli config set min-replicas-to-write 1 on each server, and the same in its own file"
        yield warning(f"{text}: a primary that was replaced takes writes that are lost", fix=fix)
    else:
        yield ok(text)


def _sentinels(watchers: Watchers) -> Iterator[Finding]:
    """Everybody's word on who the primary is."""
    named: Counter[str] = Counter()
    for (host, port), sentinel in zip(watchers.places, watchers.sentinels, strict=True):
        try:
            services: Mapping[str, Any] = sentinel.sentinel_masters()  # type: ignore[assignment]
        except redis.RedisError as error:
            yield warning(f"sentinel {host}:{port}: {reason_of(error)}", "redis_url", fix="Start it, or take it out")
            continue
        state = services.get(watchers.service)
        if not state or state["is_sdown"] or state["is_odown"]:
            what = "says that the primary is down" if state else f'knows no service "{watchers.service}"'
            yield warning(f"sentinel {host}:{port} {what}", "redis_url", fix="Correct redis_url, or start it")
        else:
            named[f"{state['ip']}:{state['port']}"] += 1
    if len(named) > 1:
        yield warning(f"sentinels disagree: {', '.join(named)}", fix="Look again when their failover is over")
    elif named:
        sentinels = plural(named.total(), "sentinel")
        yield ok(f'primary of "{watchers.service}": {next(iter(named))}, by {sentinels} of {len(watchers.places)}')


@check("server.maxmemory batcher.row_tokens")
def server_memory(c: Context) -> Iterator[Finding]:
    """The server's memory has a limit, is not full, and holds the steps that must be there at once."""
    info = fullest(_infos(c))
    used = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
    limit = int(info.get("maxmemory", 0))
    text = f"{mib(used)} of {mib(limit)} used"
    if not limit:
        text = f"no limit (maxmemory 0), {mib(used)} used: a run that grows takes the machine's memory"
        yield warning(text, fix="redis-cli config set maxmemory 4gb, and the same in the server's own file")
    elif used >= FULL_SHARE * limit:
        yield failure(f"full: {text}; pushes are refused", fix=RAISE)
    elif used >= EARLY_SHARE * limit:
        yield warning(f"{text}; trained steps retire before a checkpoint holds them", fix=RAISE)
    else:
        yield ok(text)
    if c.settings.redis_url:
        yield from too_small(c.settings, limit)


@check("server.maxmemory server.appendfsync")
def server_settings(c: Context) -> Iterator[Finding]:
    """An embedded server that is at work was started with the settings of [server]."""
    if not c.settings.redis_url and _is_begun_by(c):
        yield from _differing(c)


def _is_begun_by(c: Context) -> bool:
    """These settings began the run that is meant, as far as its name or its batcher's settings tell, or may begin one:
    no run is there. Those of a file that lies beside another run say nothing of its server."""
    runs = _runs(c)
    name = meant_run(c.loaded, runs)
    if name not in runs or (name == c.settings.run and c.loaded.place("run") not in TYPED):
        return True
    try:
        began, here = Viewer(c.server, name, patience_seconds=0).meta().config, c.settings.batcher.as_dict()
        # A run that another version began lacks settings, or has some that are gone.
        return all(began[key] == here[key] for key in began.keys() & here.keys())
    except RlbufferError:
        return True  # another check says what is wrong with it


def _differing(c: Context) -> Iterator[Finding]:
    """The settings of [server] that an embedded server at work does not have."""
    wanted = {"maxmemory": str(memory_bytes(c.settings.server)), "appendfsync": c.settings.server.appendfsync}
    for key, value in wanted.items():
        if (real := _setting(c, key)) != value:
            name, shown = f"server.{key}", mib(int(real)) if real.isdigit() else repr(real)
            given = f"{name} = {getattr(c.settings.server, key)!r} ({c.loaded.place(name)})"
            home = f"home = {str(c.settings.home)!r}"
            fix = f"Stop it, by ending all processes that work under {home}; the next one starts it with the setting"
            yield warning(f"{given}, but the embedded server at work has {shown}", name, fix=fix)


def other_settings(loaded: Loaded) -> list[Finding]:
    """What an embedded server at work lacks of the settings that a run is to start with; nothing where none is."""
    if loaded.settings.redis_url:
        return []
    context, found = Context(loaded=loaded), list[Finding]()
    with suppress(ServerUnreachable):  # it ends with its last user: the run starts another one
        running = embedded.find(loaded.settings.home_dir)
        if running is not None:
            with _connected(context, running) as connection:
                found += _differing(replace(context, connection=connection))
    return [replace(one, check="server-settings") for one in found]


@check(lasts=True)
def persistence(c: Context) -> Iterator[Finding]:
    """What was pushed survives a restart of the server."""
    info = fullest(_infos(c))
    bad = [name for name in ("aof_last_write_status", "aof_last_bgrewrite_status") if info.get(name, "ok") != "ok"]
    if not info.get("aof_enabled") and info.get("rdb_last_bgsave_status", "ok") != "ok":
        bad.append("rdb_last_bgsave_status")
    if bad:
        fix = "Free space where the server's data are, then look at its log"
        yield failure(f"the last write to the server's disk failed ({', '.join(bad)})", fix=fix)
    elif info.get("aof_enabled"):
        yield ok(f"append-only file, appendfsync {_setting(c, 'appendfsync')}")
    else:
        fix = "redis-cli config set appendonly yes, and the same in the server's own file"
        yield warning("no append-only file: a restart of the server loses what was pushed, or much of it", fix=fix)


@check(lasts=True)
def clock(c: Context) -> Iterator[Finding]:
    """This host's clock is the server's."""
    before = time.time()
    seconds, micros = _asked(c, lambda client: client.time())
    after = time.time()
    ahead, trip = int(seconds) + int(micros) / 1e6 - (before + after) / 2, after - before
    text = f"the server is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this host"
    if abs(ahead) - trip / 2 < CLOCK_SECONDS:
        yield ok(text)
    else:
        fix = "Set both by NTP: timedatectl set-ntp true"
        yield warning(f"{text}: times in logs and metrics cannot be compared", fix=fix)


# -- the run -----------------------------------------------------------------------------------------------------------
def _runs(c: Context) -> Mapping[str, float]:
    """The runs on the server, and when each was begun."""
    try:
        return Viewer(c.server, c.settings.run, patience_seconds=0).runs()
    except ServerUnsuitable:  # a role's user reads its own run alone
        return {}


@check("run")
def run(c: Context) -> Iterator[Finding]:
    """The run that is meant can be read, and goes on."""
    names = _runs(c)
    name = meant_run(c.loaded, names)
    store = Viewer(c.server, name, patience_seconds=0)
    try:
        meta = store.meta()
    except RunGone:
        text = f'no run "{name}" is there yet; schema {SCHEMA}'
        newest = ", ".join(sorted(names, key=lambda each: -names[each])[:SHOWN_RUNS])
        fix = f"Name one that is there ({newest}); a new one begins with `rlbuffer serve`"
        yield warning(text, fix=fix) if names else ok(text)
        return
    yield ok(f'"{name}" is at step {meta.step}; schema {meta.schema}')
    if meta.error:
        yield failure(f'the batcher of run "{name}" failed: {meta.error}', fix="Start `rlbuffer serve` again")
        return
    with suppress(ServerUnsuitable):  # what it waits for, not every user may read
        yield from stands_still(store, opened=names.get(name, 0.0))


@check("run")
def learning(c: Context) -> Iterator[Finding]:
    """What the trainer measured in its last steps has no cause for which a run learns wrongly."""
    try:
        store = Viewer(c.server, meant_run(c.loaded, _runs(c)), patience_seconds=0)
        trained = newest_steps(store.history(JUDGED_STEPS, of="records"))
        archive = archive_folder(store.heartbeats("batcher"))
    except (RunGone, ServerUnsuitable):  # not every user may read it
        return
    yield from (replace(finding, archive=archive) for finding in judged(trained))


def judged(trained: Sequence[StepRecord]) -> Iterator[Finding]:
    """The causes that these steps name, in their order; else how far off the sampler is, where they know."""
    named = verdicts(trained)
    for problem in named:
        finding = (failure if problem.kind in WRONG else warning)(printable(str(problem)))
        yield replace(finding, problem=problem)
    if not named and trained and (fact := sampler_fact(trained[-1])):
        yield ok(fact)


def stands_still(store: Viewer, *, opened: float) -> Iterator[Finding]:
    """What keeps a run from going on; nothing of a run at which nobody works.

    `opened`: when it was begun, in seconds since 1970.
    """
    fix = "Do what it says; rlbuffer top shows who waits for whom, rlbuffer inspect processes the last errors"
    state = read_run_state(store, history=READ_RECORDS)
    if state.ended_step is not None:
        return
    leader = state.leader
    if leader is None or not leader.is_fresh:
        if any(process.is_fresh for process in (*state.of_kind("worker"), *state.of_kind("rank"))):
            since = f" for {duration(leader.seconds_ago)}" if leader else ""
            text = f"no batcher was seen{since}, and workers or ranks are waiting for it"
            yield warning(text, fix="Start `rlbuffer serve`")
        return
    for problem in state.problems:
        if problem.kind not in VERDICTS:
            yield warning(printable(str(problem)), fix=fix)
    times = [record["at"] for record in state.history if record.get("event") == Committed.event]
    gaps = [later - earlier for later, earlier in pairwise(times)]
    limit = max(STALL_SECONDS, STALL_STEPS * median(gaps)) if gaps else FIRST_STEP_SECONDS
    idle = state.at - (times[0] if times else opened)
    if state.waiting is not None and idle > limit:
        yield warning(f"no step for {duration(idle)}. {printable(str(state.waiting))}", fix=fix)
