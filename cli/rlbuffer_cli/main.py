"""``rlbuffer``: the commands by name, each loaded only when it runs.

``rlbuffer --help`` must stay instant, so this module imports click and nothing else: the table below repeats the
first line of every command's help, and a test compares the two.

Exit codes: 0 ok, 1 failure, 2 usage, 3 config, 4 server unreachable, 5 timed out, 6 refused until somebody has done
what the message says, 130 interrupted, 141 the reader of a pipe left before the output was at its end.
"""

from __future__ import annotations

import importlib
import io
import os
import select
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from rlbuffer_cli.options import EXIT_CLOSED_PIPE, EXIT_INTERRUPTED, CliGroup, say
from rlbuffer_cli.starting import RUN_COMMANDS, SLOW_COMMANDS, clear, starting

GROUPS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Run it": {
            "demo": "Watch a tiny model learn: everything on this machine, nothing to set up.",
            "run": "Start and supervise every process of a run on this machine.",
            "serve": "Run the batcher: decides what each step trains on.",
            "worker": "Sample and score rollouts of one env and push them.",
            "gateway": "Answer agents of other programs, and record their rollouts.",
            "score": "Add what groups need before they train: reference logprobs, slow rewards.",
            "train": "Train on the batches, with one or more data-parallel ranks.",
        },
        "Look": {
            "inspect": "Look at the pool, a group or a rollout. Changes nothing.",
            "top": "See both sides of a run at a glance: who waits for whom, rates, lag, drops. Changes nothing.",
            "replay": "Train the recorded steps of an archive again, without server or workers.",
            "plot": "Draw reward, loss, age, fill, drops or any other figure over the steps. Changes nothing.",
            "what-if": "Estimate what a recorded run would have come to with other settings of the batcher.",
        },
        "Act": {
            "env": "Pause an env, or all, say that nothing more comes of one, or let it take part again.",
            "drop": "Drop pending groups that match a filter.",
            "runs": "List, take back and remove whole runs.",
        },
        "Check": {
            "config": "Check the settings, show them with where each came from, or give them to a run at work.",
            "doctor": "Look at settings, host and server, and say what to do about each trouble. Changes nothing.",
            "verify": "Recompute the ledger and check every invariant. Changes nothing.",
            "alive": "Say whether a process of a run was seen lately: a health check. Changes nothing.",
            "completion": "Print what makes a shell complete commands, options, and settings of `config explain`.",
        },
        "Move": {
            "push": "Push groups from a JSON Lines or Parquet file.",
            "export": "Write groups into a file that `rlbuffer push` reads, or into a page for people.",
            "weights": "Serve policy versions to other hosts.",
        },
    }
)
"""What a person wants -> the commands for it, with the first line of their help."""
COMMANDS: Mapping[str, str] = MappingProxyType(
    {name: about for group in GROUPS.values() for name, about in group.items()}
)


class Commands(CliGroup):
    """A group that knows its commands by name and imports a command's module when it is called."""

    renamed = MappingProxyType({"drain": "`rlbuffer env pause --all`"})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if not ctx.resilient_parsing and not {"--help", "-h"} & set(sys.argv):
            if cmd_name in RUN_COMMANDS:
                from rlbuffer.process import logs

                logs.outlive_readers()
            if cmd_name in SLOW_COMMANDS:
                starting(f"rlbuffer {cmd_name} starts")
        command = importlib.import_module(f"rlbuffer_cli.commands.{cmd_name.replace('-', '_')}").command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), about) for name, about in commands.items()])


def _version(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        from rlbuffer import __version__

        click.echo(f"rlbuffer {__version__}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="First time here?  rlbuffer demo      Then:  rlbuffer inspect",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."
)
def cli() -> None:
    """The experience buffer of asynchronous RL post-training.

    Workers push scored rollouts, a batcher decides what each optimizer step trains on, trainers pull that step.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. -> exit code; errors are one line on stderr, with a traceback only under ``--debug``.

    A command whose reader leaves (``rlbuffer inspect | head -1``) ends there, quietly and with one exit code, as the
    shell has it for every program. One that works for a run goes on.
    """
    _open_closed()
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except (BrokenPipeError, SystemExit):  # click makes the one into the other
        if not _hush():
            raise
        return EXIT_CLOSED_PIPE


def _open_closed() -> None:
    """Gives the streams that were closed at the start (``>&-``) a place: else the next file or socket that is opened
    gets the number, and with it what others print there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _hush() -> bool:
    """Points the streams whose reader has left at nothing: Python would complain once more while flushing them.

    -> False: none has left, and some other pipe was broken.
    """
    has_left = False
    for stream in (sys.stdout, sys.stderr):
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:
            continue
        look = select.poll()
        look.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in look.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            has_left = True
    return has_left


def _run(arguments: Sequence[str] | None) -> int:
    state: dict[str, Any] = {"debug": bool(os.environ.get("RLBUFFER_DEBUG"))}
    try:
        try:
            result = cli.main(
                args=None if arguments is None else list(arguments),
                prog_name="rlbuffer",
                standalone_mode=False,
                obj=state,
            )
        finally:
            clear()
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and error.ctx is not None:
            say(f"{error.ctx.get_usage()}\nTry `{error.ctx.command_path} --help`.", err=True)
        from rlbuffer_cli.usage_errors import sentence

        say(f"Error: {sentence(error)}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        if state["debug"]:
            raise
        click.echo("Interrupted.", err=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        if state["debug"] or isinstance(error, BrokenPipeError):
            raise
        return _failure(error, state.get("sources", {}))
    return result if isinstance(result, int) else 0


def _failure(error: Exception, sources: Mapping[str, str]) -> int:
    """Says it. `sources`: of the settings that were loaded before, each with its place."""
    from rlbuffer.errors import ConfigError, RlbufferError

    if isinstance(error, RlbufferError):
        place = ""
        if isinstance(error, ConfigError) and error.setting and sources:
            from rlbuffer.config.loading import located

            place = located(sources, error.setting)
        say(f"Error: {place}{error}", err=True)
        return error.exit_code
    if isinstance(error, OSError) and error.errno is not None:
        from rlbuffer.process.files import owner_of

        whose = f" ({owner_of(Path(error.filename))})" if isinstance(error.filename, str) else ""
        say(f"Error: this host refused: {error}{whose}\n  --debug shows what asked for it.", err=True)
        return 1
    say(f"Error: {type(error).__name__}: {error}\n  This is a defect: --debug shows where.", err=True)
    return 1
