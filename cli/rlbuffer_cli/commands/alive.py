"""``rlbuffer alive``, asked by health checks every few seconds: without numpy, pydantic and the settings' schema.

Only the answer yes is given so. The other way reads everything, and gives every other answer: nobody was heard, a
batcher that has stopped, a server that does not answer, a setting that is wrong.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo

SCHEMES = ("redis://", "unix://")
"""TLS has checks of its own, and the embedded server is looked for in its home: the other way knows them."""
ANSWER_SECONDS = 5.0


@click.command("alive")
@click.argument("who", metavar="WHO...", nargs=-1, required=True)
@options.common
@click.option("--within", type=click.FloatRange(0), default=30.0, show_default=True, metavar="S", help="Seconds.")
@click.option("--json", "as_json", is_flag=True, help="One object.")
def command(who: tuple[str, ...], given: options.Given, within: float, as_json: bool) -> int:
    """Say whether a process of a run was heard lately: a health check. Changes nothing.

    WHO is batcher, worker NAME, scorer NAME or rank N. Exit code 0 when it was heard within --within seconds, and has
    not said that it stops.

    \b
    Examples:
      rlbuffer alive batcher --within 15
      rlbuffer alive worker vcopy --run math || echo 'not heard'
    """
    from rlbuffer.state.text import duration

    name = " ".join(who)
    seconds, has_stopped = heard(name, run=given.run, redis=given.redis, config=given.config), False
    if seconds is None or seconds > within:  # the careful way says what is wrong
        seconds, has_stopped = _last_heard(given, name)
    is_alive = seconds <= within and not has_stopped
    if as_json:
        echo(json.dumps({"schema": "rlbuffer.alive/1", "process": name, "seconds_ago": seconds, "alive": is_alive}))
    else:
        why = "" if is_alive else ", when it stopped" if has_stopped else f", more than {within:g} s"
        echo(f"{name} was heard {duration(seconds)} ago{why}")
    return 0 if is_alive else 1


def _last_heard(given: options.Given, who: str) -> tuple[float, bool]:
    """Seconds since then, and whether it was the goodbye of a batcher."""
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer.errors import NotFound
    from rlbuffer_cli.session import open_existing

    with open_existing(given.load(), run_given=given.run is not None) as buffer:
        seen = {process.title: process for process in read_run_state(buffer.store).processes}
        if who not in seen:
            known = ", ".join(seen) or "nobody"
            raise NotFound(f"{who!r} has never been heard in run {buffer.run!r}. Heard were: {known}.")
        return seen[who].seconds_ago, who == "batcher" and seen[who].has_stopped


def heard(who: str, *, run: str | None, redis: str | None, config: str | None) -> float | None:
    """Seconds since a process of the run was heard; None where the other way has to look.

    Args:
        who: ``batcher``, ``worker NAME``, ``scorer NAME``, ``rank N``.
        run, redis, config: as the flags give them.
    """
    try:
        return _heard(who, run or os.environ.get("RLBUFFER_RUN", ""), redis, config)
    except Exception:  # the other way finds the same, and has the words for it
        return None


def _heard(who: str, run: str, redis: str | None, config: str | None) -> float | None:
    from rlbuffer.store.keys import Keys

    given = _file(config)
    named = redis or os.environ.get("RLBUFFER_REDIS_URL")
    url = named or given.get("redis_url") or ""
    if not (named or config or os.environ.get("RLBUFFER_CONFIG")) and _has_password():
        return None  # no password of the environment for a file that was only found here
    if not run or not url.startswith(SCHEMES):
        return None  # the run that was opened last is found by looking at all of them
    kind, _, name = who.partition(" ")
    place, field = Keys(run).heartbeats(kind), name or "leader"
    from redis import Redis

    with (
        Redis.from_url(
            url,
            password=_password(given) or None,
            protocol=2,
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
        ) as client,
        client.pipeline(transaction=False) as pipe,
    ):
        beat, (seconds, micros) = pipe.hget(place, field).time().execute()
    if beat is None:
        return None
    at, _, record = beat.partition(b" ")
    if kind == "batcher" and _has_stopped(record):
        return None
    return max(0.0, int(seconds) + int(micros) / 1e6 - int(at) / 1000)


def _has_stopped(record: bytes) -> bool:
    from msgpack import unpackb

    return bool(unpackb(record).get("stopped"))


def _file(config: str | None) -> Mapping[str, Any]:
    file = Path(config or os.environ.get("RLBUFFER_CONFIG") or "rlbuffer.toml")
    return tomllib.loads(file.read_text(encoding="utf-8-sig")) if file.is_file() else {}


def _has_password() -> bool:
    return any(os.environ.get(f"RLBUFFER_REDIS_PASSWORD{end}") for end in ("", "_FILE"))


def _password(given: Mapping[str, Any]) -> str:
    password = os.environ.get("RLBUFFER_REDIS_PASSWORD", "")
    file = os.environ.get("RLBUFFER_REDIS_PASSWORD_FILE") or given.get("redis_password_file")
    if password or not file:
        return password
    return Path(file).expanduser().read_text(encoding="utf-8-sig").rstrip("\r\n")
