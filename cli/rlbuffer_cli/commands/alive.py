"""``rlbuffer alive``, asked by health checks every few seconds: without numpy, pydantic and the settings' schema.

Only the answer yes is given so. The other way reads everything, and gives every other answer: nobody was last seen, a
batcher that has stopped, a server that does not answer, a setting that is wrong.
"""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from pathlib import Path

import click

from rlbuffer.errors import NotFound
from rlbuffer.process.variables import secret, variable
from rlbuffer.state.text import duration
from rlbuffer_cli import options
from rlbuffer_cli.options import answer
from rlbuffer_cli.session import open_run

SCHEMES = ("redis://", "unix://")
"""TLS has checks of its own, and the embedded server is looked for in its home: the other way knows them."""
ANSWER_SECONDS = 5.0


@options.command("alive")
@click.argument("who", metavar="WHO...", nargs=-1, required=True)
@options.common_of_run
@click.option("--within", type=click.FloatRange(0), default=30.0, show_default=True, metavar="S", help="Seconds.")
@options.json_lines("One object.")
def command(who: tuple[str, ...], given: options.RunFlags, within: float) -> int:
    """Say whether a process of a run was seen lately: a health check. Changes nothing.

    WHO is batcher, worker NAME, gateway, scorer NAME or rank N. Of several gateways each has a name: gateway-0,
    gateway-1. Exit code 0 when it was seen within --within seconds and has not said that it stops.

    \b
    Examples:
      rlbuffer alive batcher --within 15
      rlbuffer alive worker vcopy --run math || echo 'not seen'
    """
    name = " ".join(who)
    seconds, has_stopped = heard(name, run=given.run, redis=given.redis, config=given.config), False
    if seconds is None or seconds > within:  # the careful way says what is wrong
        seconds, has_stopped = _last_heard(given, name)
    is_alive = seconds <= within and not has_stopped
    why = "" if is_alive else ", when it stopped" if has_stopped else f", more than {within:g} s"
    record = {"schema": "rlbuffer.alive/1", "process": name, "seconds_ago": seconds, "alive": is_alive}
    answer(record, f"{name} was last seen {duration(seconds)} ago{why}")
    return 0 if is_alive else 1


def _last_heard(given: options.RunFlags, who: str) -> tuple[float, bool]:
    """Seconds since then, and whether it was the goodbye of a batcher."""
    from rlbuffer.client.run_state import read_run_state

    with open_run(given) as buffer:
        seen = {process.title: process for process in read_run_state(buffer.store).processes}
        if who not in seen:
            named = ", ".join(seen) or "nobody"
            raise NotFound(f"{who!r} has never been seen in run {buffer.run!r}. Seen were: {named}.")
        return seen[who].seconds_ago, who == "batcher" and seen[who].has_stopped


def heard(who: str, *, run: str | None, redis: str | None, config: str | None) -> float | None:
    """Seconds since a process of the run was seen; None where the other way has to look: it finds the same, and has
    the words for it.

    Args:
        who: ``batcher``, ``worker NAME``, ``gateway``, ``gateway-N``, ``scorer NAME``, ``rank N``.
        run, redis, config: as the flags give them.
    """
    with suppress(Exception):
        return _heard(who, run or variable("RLBUFFER_RUN"), redis, config or variable("RLBUFFER_CONFIG"))
    return None


def _heard(who: str, run: str, redis: str | None, config: str | None) -> float | None:
    from msgpack import unpackb
    from redis import Redis

    from rlbuffer.store.keys import Keys

    file = Path(config or "rlbuffer.toml")
    given = tomllib.loads(file.read_text(encoding="utf-8-sig")) if file.is_file() else {}
    redis = redis or variable("RLBUFFER_REDIS_URL")
    url = redis or given.get("redis_url") or ""
    password = secret(os.environ.get("RLBUFFER_REDIS_PASSWORD", ""), "")
    password_file = variable("RLBUFFER_REDIS_PASSWORD_FILE")
    if not (redis or config) and (password or password_file):
        return None  # no password of the environment for a file that was only found here
    if not run or not url.startswith(SCHEMES):
        return None  # the run that was opened last is found by looking at all of them
    if not password and (password_file := password_file or given.get("redis_password_file", "")):
        password = secret(Path(password_file).expanduser().read_text(encoding="utf-8"), "")
    kind, name = _kind_and_name(who)
    with (
        Redis.from_url(
            url,
            password=password or None,
            protocol=2,
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
        ) as client,
        client.pipeline(transaction=False) as pipe,
    ):
        beat, (seconds, micros) = pipe.hget(Keys(run).heartbeats(kind), name).time().execute()
    at, _, record = beat.partition(b" ")
    if kind == "batcher" and unpackb(record).get("stopped"):
        return None
    return max(0.0, int(seconds) + int(micros) / 1e6 - int(at) / 1000)


def _kind_and_name(who: str) -> tuple[str, str]:
    """The heartbeat of a process: a gateway's name says its kind, and the batcher that is asked for is the leader."""
    kind, _, name = who.partition(" ")
    if kind.partition("-")[0] == "gateway" and not name:
        return "gateway", kind
    return kind, name or "leader"
