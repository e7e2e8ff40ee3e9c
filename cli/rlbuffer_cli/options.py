"""Options that several commands share, and the settings that come out of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlbuffer_cli.starting import clear, has_colours, is_drawable, starting

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded

EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
COMMON = frozenset({"--config", "--redis", "--run", "--home", "--debug", "--help"})
"""Options that every command has."""
JSON, SETTINGS = "rlbuffer.json", "rlbuffer.settings"
"""What a command's context keeps: whether JSON is asked for, and the settings among its flags."""
F = TypeVar("F", bound=Callable[..., Any])


class WithHelp(click.Command):
    """A command that has ``-h``, whoever asks: click keeps the option as the first context had it."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["-h", "--help"]


class CliCommand(WithHelp):
    """A command whose help has its own options first, and those that every command has last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tables: dict[str, list[tuple[str, str]]] = {"Options": [], "Common": []}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)):
                tables["Common" if COMMON & set(option.opts) else "Options"].append(record)
        for title, rows in tables.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def names_of_options(ctx: click.Context) -> list[str]:
    """The options that a command shows in its help."""
    shown = (p for p in ctx.command.get_params(ctx) if isinstance(p, click.Option) and not p.hidden)
    return [name for option in shown for name in option.opts if name.startswith("--")]


class CliGroup(WithHelp, click.Group):
    """Commands of one kind below a name of their own."""

    command_class = CliCommand
    renamed: Mapping[str, str] = {}
    """Command of an older checkout -> what to type in its place."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            from rlbuffer.state.text import did_you_mean

            place = f" `{ctx.command_path} {args[0]}`" if ctx.parent else f" {args[0]!r}"
            hint = did_you_mean(args[0], names, cutoff=0.5, otherwise=f" There are {', '.join(names)}.")
            instead = f" Type {self.renamed[args[0]]}." if args[0] in self.renamed else hint
            raise click.UsageError(f"there is no command{place}.{instead}", ctx)
        return super().resolve_command(ctx, args)


def command(name: str) -> Callable[[Callable[..., Any]], CliCommand]:
    """Makes a function a command of the first level."""
    return click.command(name, cls=CliCommand)


def group(name: str) -> Callable[[Callable[..., Any]], CliGroup]:
    """Makes a function a group of commands."""
    return click.group(name, cls=CliGroup)


def echo(text: str = "") -> None:
    """Prints lines as they are; what a server or a file put into them does not control the terminal."""
    from rlbuffer.state.text import printable

    clear()
    click.echo(printable(text, lines=True))


def say(text: str, *, err: bool = False, indent: str | None = None, colour: str = "") -> None:
    """Prints prose, broken between words where the terminal is too narrow for a line; elsewhere as :func:`echo`.

    Args:
        indent: begins the rows after the first of a line; None: two blanks more than the line has.
        colour: of the first word, where the terminal has colours.
    """
    from rlbuffer.state.text import printable
    from rlbuffer_cli.text import wrapped

    clear()
    for line in printable(text, lines=True).split("\n"):
        for row in wrapped(line, indent=indent, stream=sys.stderr if err else sys.stdout):
            word, blank, rest = row.partition(" ")
            is_coloured = colour and has_colours(sys.stdout)
            click.echo(click.style(word, fg=colour) + blank + rest if is_coloured else row, err=err)
            colour = ""


def show_json(record: Any) -> None:
    """Prints a record as one line; types of msgpack become those of JSON."""
    import json

    from rlbuffer_cli.text import as_json

    echo(json.dumps(as_json(record), default=str))


def json_lines(what: str) -> Callable[[F], F]:
    """Adds --json, which is not handed to the command: :func:`answer` and :func:`is_json` know it. `what` is printed
    then."""

    def keep(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
        ctx.meta[JSON] = is_given

    return click.option("--json", is_flag=True, expose_value=False, callback=keep, help=what)


def is_json() -> bool:
    """The command that runs shall print JSON."""
    return bool(click.get_current_context().meta.get(JSON))


def answer(record: Mapping[str, Any], text: str, *, indent: str | None = None, colour: str = "") -> None:
    """Prints how a command went: the record as JSON, or the text for people, as :func:`say`."""
    if is_json():
        show_json(record)
    else:
        say(text, indent=indent, colour=colour)


yes = click.option("--yes", is_flag=True, help="Do it; without, it is asked on a terminal, else refused.")


def is_wanted(what: str, *, yes: bool) -> bool:
    """Asks before a command does what nobody can undo. -> True to go on; False: a person said no, and was answered.

    `what` goes on from "this ", with what will be lost in numbers. Raises UsageError where nobody can be asked.
    """
    if yes:
        return True
    if is_json() or not sys.stdin.isatty():
        raise click.UsageError(f"this {what}: say so with --yes")
    clear()
    if click.confirm(f"this {what}: do it?"):
        return True
    say("nothing was changed")
    return False


def _debug(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given and isinstance(ctx.obj, dict):
        ctx.obj["debug"] = True


debug = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    hidden=True,
    callback=_debug,
    help="Show the traceback of an error.",
)


def setting(name: str, what: str, *, flag: str = "", is_handed: bool = False, **how: Any) -> Callable[[F], F]:
    """Adds a flag that is a setting: :meth:`RunFlags.load` takes it, and the command where `is_handed`.

    Args:
        name: dotted; one that begins with a dot is of the section that is run.
        what: for the help.
        flag: "": the last part of the name.
    """
    flag = flag or f"--{name.rpartition('.')[2].replace('_', '-')}"

    def keep(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
        several = isinstance(value, tuple)
        ctx.meta.setdefault(SETTINGS, {})[name] = flag, (list(value) or None) if several else value
        return value

    return click.option(flag, callback=keep, expose_value=is_handed, help=what, **how)


display = click.option(
    "--display",
    type=click.Choice(["auto", "rich", "plain", "json", "none"]),
    default="auto",
    show_default=True,
    help="rich: a live view. plain: lines. json: one object per line. auto: rich on a terminal, else plain.",
)


purpose = click.option(
    "--for",
    "purpose",
    type=click.Choice(["run", "serve", "worker", "gateway", "score", "train"]),
    help="Check what this command needs on this host. [default: all that the file starts]",
)


def parts_of(purpose: str) -> Collection[str]:
    """The parts of a run that a command needs; "" for none."""
    from rlbuffer.checks.check import EVERYTHING

    return EVERYTHING if purpose == "run" else (purpose,) if purpose else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """The flags of every command that works on a run, as they were typed."""

    config: str | None
    redis: str | None
    run: str | None
    home: str | None

    def flags(self, *parts: str) -> dict[str, tuple[str, Any]]:
        """Setting -> (flag, value), also of those that :func:`setting` declares; `parts`: as of :meth:`load`."""
        flags = {"redis_url": ("--redis", self.redis), "run": ("--run", self.run), "home": ("--home", self.home)}
        typed = click.get_current_context().meta.get(SETTINGS, {})
        return flags | {f"{parts[0]}{name}" if name.startswith(".") else name: typed[name] for name in typed}

    def again(self, run: str) -> str:
        """The flags that lead another command to this run."""
        import shlex

        places = {"--config": self.config, "--redis": self.redis, "--home": self.home, "--run": run}
        return shlex.join(word for flag, value in places.items() if value for word in (flag, value))

    def load(self, flags: Mapping[str, tuple[str, Any]] | None = None, *, parts: Collection[str] = ()) -> Loaded:
        """Settings from file, environment and these flags, then `flags` (dotted name -> (flag, value)).

        `parts` is what shall run in this process and those that it starts: what they need must be here. Modules beside
        the config file can be imported from then on, until the command ends.
        """
        starting("reading the settings")
        from rlbuffer.checks.loading import load
        from rlbuffer.config import imports
        from rlbuffer.config.loading import folders_of

        self.check()
        loaded = load(self.config, flags={**self.flags(*parts), **(flags or {})}, parts=parts)
        context = click.get_current_context()
        if isinstance(context.obj, dict):
            context.obj["sources"] = loaded.sources
        if parts:
            added = imports.make_importable(folders_of(loaded.file))
            context.call_on_close(lambda: imports.forget(added))
        for warning in loaded.warnings:
            say(f"Warning: {warning}", err=True)
        clear()
        return loaded

    def check(self) -> None:
        """Raises ConfigError for a password among the flags."""
        from rlbuffer.errors import ConfigError
        from rlbuffer.store.server.address import has_password, redacted

        if self.redis and has_password(self.redis):
            raise ConfigError(
                f"--redis {redacted(self.redis)}: a password on the command line is shown to everybody by `ps`. Leave "
                "it out of the address and set RLBUFFER_REDIS_PASSWORD, or name a file that holds it "
                "(RLBUFFER_REDIS_PASSWORD_FILE); or put the whole address into RLBUFFER_REDIS_URL."
            )


def common_with(*, config: str, run: str, has_file: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds --config, --redis, --run, --home and --debug; the command gets the first four as `given`.

    Args:
        config, run: for the help: what counts without these options.
        has_file: the command is about a file of settings, which is its argument and no option.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_given(
            *args: Any, config: str | None, redis: str | None, run: str | None, home: str | None, **others: Any
        ) -> Any:
            return command(*args, given=RunFlags(config=config, redis=redis, run=run, home=home), **others)

        decorated: Callable[..., Any] = with_given
        for option in options:
            decorated = option(decorated)
        return decorated

    of_file = click.argument("config", metavar="[FILE]", required=False)
    of_option = click.option("--config", metavar="FILE", help=f"Settings. [default: {config}]")
    options = (
        debug,
        click.option("--home", metavar="DIR", help="Embedded server, weights, metrics. [default: ~/.rlbuffer]"),
        click.option("--run", metavar="NAME", help=f"Which run on the server. [default: {run}]"),
        click.option("--redis", metavar="URL", help="redis://HOST:PORT or unix://PATH. [default: embedded server]"),
        of_file if has_file else of_option,
    )
    return decorate


_FILE = "./rlbuffer.toml where there is one"
_OF_FILE, _OF_SERVER = "the file's, else `default`", "the file's, else the one opened last"
common = common_with(config=_FILE, run=_OF_FILE)
"""For a command that begins a run, or takes part in it."""
common_of_run = common_with(config=_FILE, run=_OF_SERVER)
"""For a command that looks at a run that is there, or acts on it (:func:`rlbuffer_cli.session.open_run`)."""
common_of_file = common_with(config="", run=_OF_FILE, has_file=True)
"""For a command about a file of settings, which is its argument; without one ./rlbuffer.toml counts, where it is."""
common_of_file_and_run = common_with(config="", run=_OF_SERVER, has_file=True)


def redis_origin(loaded: Loaded) -> str:
    """The origin of the server's address, for error messages; "" for the embedded server."""
    return loaded.place("redis_url") if loaded.settings.redis_url else ""


@contextmanager
def writing(display: str, write: Callable[[str], None] | None = None, *, clock: bool = True) -> Iterator[None]:
    """Writes what this process logs while the block runs; the line of a start is taken away by the first one."""
    from rlbuffer.process import logs

    def line(text: str) -> None:
        clear()
        (write or logs.to_stdout)(text)

    with logs.written(display, clock=clock, write=line):
        yield


def choose_display(display: str) -> str:
    """`auto` resolved: rich on a terminal that can be drawn on, plain elsewhere."""
    if display == "auto":
        return "rich" if is_drawable(sys.stdout) else "plain"
    return display


def program() -> str:
    """The words with which this command can be typed again: its name where it is on the PATH, else as it was called."""
    import shutil

    return "rlbuffer" if shutil.which("rlbuffer") or not sys.argv[0].endswith("rlbuffer") else sys.argv[0]
