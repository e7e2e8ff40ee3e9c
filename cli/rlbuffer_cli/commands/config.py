"""``rlbuffer config``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.errors import BatchTimeout, ConfigChanged, ConfigError
from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import answer, echo, say, show_json
from rlbuffer_cli.session import open_existing

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.config.loading import Loaded
    from rlbuffer.daemon.config_changes import Change
    from rlbuffer.store.records import Meta

CHANGE_POLL_SECONDS = 0.1


@options.group("config")
def command() -> None:
    """Check the settings, show them with where each came from, or give them to a run at work.

    `rlbuffer config init` makes a file to begin with. Settings come from rlbuffer.toml,
    then from RLBUFFER_* variables (RLBUFFER_BATCHER__MAX_AGE is batcher.max_age), then from flags; the last one wins.
    """


command.renamed = {"example": "`rlbuffer config init`"}


@command.command("check")
@options.common_of_file
@options.purpose
def check(given: options.RunFlags, purpose: str | None) -> int:
    """Load the settings and say everything in them that cannot work. Exit code 3 when there is anything.

    Imports modules that the settings name in a process of its own, looks at models and packages without importing any,
    and asks no server. Prompts in files are measured.
    Beside a trainer of your own no [model] is needed: `--for serve` and `--for worker` leave out what only
    `rlbuffer train` wants.

    \b
    Example:
      rlbuffer config check rlbuffer.toml
    """
    loaded = given.load(parts=options.parts_of(purpose or "run"))
    where = str(loaded.file) if loaded.file else "no config file (all defaults)"
    count, warnings = len(loaded.sources), len(loaded.warnings)
    say(f"ok: {where}, {plural(count, 'setting')} given, {plural(warnings, 'warning')}")
    return 0


@command.command("init")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), default="rlbuffer.toml")
@click.option("--env", "envs", multiple=True, metavar="ENV", help="As of [worker.NAME]; may be given several times.")
@click.option(
    "--model", metavar="DIR", help="A Hugging Face model's. [default: a tiny fresh one, for the demo's tokens]"
)
@click.option("--all", "is_all", is_flag=True, help="Instead: every setting with its default and what it means.")
@options.debug
def init(file: Path, envs: Sequence[str], model: str | None, is_all: bool) -> int:
    """Write a file to begin with, which `rlbuffer run` runs as it is. A file that is there stays as it is.

    FILE is rlbuffer.toml where none is named; - prints it. ENV is a built-in env, or one of yours as
    package.module:factory, whose module may lie beside the file. Without --env it is vcopy, the demo's.

    \b
    Examples:
      rlbuffer config init --env my_envs:Larger --model ~/models/qwen3-0.6b
      rlbuffer config init --all -
    """
    if is_all and (envs or model):
        raise click.UsageError("--all is the file of all defaults, and takes neither --env nor --model")
    from rlbuffer_cli import first_files

    text = first_files.reference() if is_all else first_files.beginning(envs or ("vcopy",), model)
    if str(file) == "-":
        click.echo(text, nl=False)
        return 0
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} is there already: name another file, or move it away") from None
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    say(f"wrote {file}. Next: rlbuffer config check {file}", err=True)
    return 0


def _complete_setting(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from rlbuffer.config.explain import known_settings

    return [name for name in known_settings() if name.startswith(incomplete)]


@command.command("explain")
@click.argument("key", metavar="SETTING", shell_complete=_complete_setting)
@options.common
@options.json_lines("One object per setting.")
def explain(key: str, given: options.RunFlags) -> int:
    """Say what a setting means, may be and is, where its value comes from, and what it is checked against.

    SETTING is a name such as batcher.max_age, its last part where that is unique, or a table: then all that is in it.
    Works with a file that has mistakes, too.

    \b
    Example:
      rlbuffer config explain batcher.max_age
    """
    from rlbuffer.config.loading import read
    from rlbuffer_cli import explanation

    given.check()
    for number, explained in enumerate(explanation.explain(key, read(given.config, flags=given.flags()))):
        lines = [*([""] if number else []), *explanation.explained_lines(explained)]
        answer(explained, "\n".join(lines), indent=" " * 12)
    return 0


@command.command("show")
@options.common_of_file
@click.option("--sources", is_flag=True, help="Also say where each value came from.")
@options.json_lines("One object per setting.")
def show(given: options.RunFlags, sources: bool) -> int:
    """Print every setting as it counts, by table: what it prints is a file of settings.

    \b
    Example:
      RLBUFFER_BATCHER__MAX_AGE=2 rlbuffer config show --sources
    """
    from rlbuffer_cli.explanation import shown

    loaded = given.load()
    rows = [(name, shown(name, value), loaded.place(name)) for name, value in loaded.values()]
    if options.is_json():
        for name, value, source in rows:
            show_json({"schema": "rlbuffer.setting/1", "name": name, "value": value, "source": source})
        return 0
    for line in _as_toml(rows, sources):
        echo(line)
    return 0


def _as_toml(rows: Sequence[tuple[str, Any, str]], has_sources: bool) -> Iterator[str]:
    """Settings by table, in the order of the schema; one that is not set is a comment."""
    from rlbuffer_cli.explanation import as_toml

    tables: dict[str, list[tuple[str, str]]] = {}
    for name, value, source in rows:
        table, _, key = name.rpartition(".")
        line = f"{key} = {as_toml(value)}" if value is not None else f"# {key} = (not set)"
        tables.setdefault(table, []).append((line, source))
    for number, (table, lines) in enumerate(sorted(tables.items(), key=lambda item: bool(item[0]))):
        if number:
            yield ""
        if table:
            yield f"[{table}]"
        width = min(max(len(line) for line, _ in lines), 60)
        for line, source in lines:
            yield f"{line:<{width}}  # {source}" if has_sources else line


@command.command("apply")
@options.common_of_file_and_run
@click.option(
    "--timeout", type=click.FloatRange(0), default=30.0, show_default=True, metavar="S", help="To wait for the batcher."
)
@options.yes
@options.json_lines("One object per change, then the outcome.")
def apply(given: options.RunFlags, timeout: float, yes: bool) -> int:
    """Change the batcher's settings of a run, also while it is at work.

    Shows what differs and what follows from it. The batcher that leads takes the settings between two steps, and so
    does every one that takes over later; without one they wait for the next. Only [batcher] counts: workers and
    trainer read their own sections when they start. The file replaces all of them: what is in force and not named there
    goes back to its default, which is asked first.

    \b
    Example:
      rlbuffer config apply rlbuffer.toml --run math
    """
    from rlbuffer.daemon.config_changes import changes, check_change, config_digest
    from rlbuffer.records.states import SettingsState
    from rlbuffer.store.operator import OperatorStore

    loaded = given.load()
    if loaded.file is None:
        raise click.UsageError(
            "which settings? Name their file, `rlbuffer config apply FILE`, or go where an rlbuffer.toml is: without "
            "one all settings of the batcher would go back to their defaults"
        )
    batcher = loaded.settings.batcher
    with open_existing(loaded) as buffer:
        seen, name = buffer.store.meta(), buffer.run
        check_change(seen.config, batcher.as_dict(), step=seen.step)
        differences = changes(seen.wanted or seen.config, batcher.as_dict()) if seen.config or seen.wanted else []
        for change in differences:
            source, consequence = loaded.place(change.setting), change.consequence
            record = {"schema": "rlbuffer.change/1", "setting": change.setting, "old": change.old, "new": change.new}
            text = f"{change}   {source}" + (f"   ({consequence})" if consequence else "")
            answer({**record, "consequence": consequence, "source": source}, text)
        forgotten = [name for change in differences for name in _forgotten(change, loaded)]
        what = f'{plural(len(forgotten), "setting")} of run "{name}" back to the default: {", ".join(forgotten)}'
        if forgotten and not options.is_wanted(f"takes {what} (not named in {loaded.file})", yes=yes):
            return 1
        state = buffer.store.role(OperatorStore).ask_config(batcher.as_dict(), config_digest(batcher), seen=seen)
        revision = seen.revision
        if state == SettingsState.ASKED and not buffer.store.is_led():
            state = SettingsState.STORED
        elif state == SettingsState.ASKED:
            state, revision = SettingsState.TAKEN, _wait_until_taken(buffer, config_digest(batcher), seen, timeout)
    sentences = {
        SettingsState.SAME: "has these settings already",
        SettingsState.STORED: "keeps them for the next batcher that starts with them: no batcher is at work",
        SettingsState.TAKEN: "has these settings from the next step on",
    }
    answer(
        {"schema": "rlbuffer.config.batcher/1", "run": name, "state": state, "revision": revision},
        f'run "{name}" {sentences[state]} (revision {revision})',
    )
    return 0


def _forgotten(change: Change, loaded: Loaded) -> list[str]:
    """The settings in force that nobody gives now, each with its value and its default."""
    from rlbuffer.config.loading import places

    old, new = change.old, change.new
    pairs = [(change.setting, old, new)]
    if isinstance(old, Mapping):
        pairs = [(f"{change.setting}.{key}", value, (new or {}).get(key)) for key, value in old.items()]
    return [
        f"{setting} ({before!r} -> {after!r})"
        for setting, before, after in pairs
        if before is not None and before != after and not places(loaded.sources, setting)
    ]


def _wait_until_taken(buffer: Buffer, digest: str, seen: Meta, timeout: float) -> int:
    """Returns the revision."""
    from rlbuffer.daemon.revisions import has_refused

    deadline = time.monotonic() + timeout
    while True:
        meta = buffer.store.meta()
        if not meta.wanted_digest and meta.config_digest == digest:
            return meta.revision
        reason = has_refused(meta, digest)
        if reason:
            raise ConfigError(f'the batcher of run "{buffer.run}" refused the settings, the old ones go on: {reason}')
        if meta.wanted_digest != digest and (meta.wanted_digest or meta.revision > seen.revision):
            raise ConfigChanged(
                f'the settings of run "{buffer.run}" (revision {meta.revision}) were changed again meanwhile, by '
                f"somebody else: yours do not count. `rlbuffer config apply` again puts yours in the place of theirs"
            )
        if time.monotonic() >= deadline:
            raise BatchTimeout(
                f'the batcher of run "{buffer.run}" has not taken the settings within {timeout:g} s; they stay stored '
                f"for it (rlbuffer inspect shows when it has)"
            )
        time.sleep(CHANGE_POLL_SECONDS)
