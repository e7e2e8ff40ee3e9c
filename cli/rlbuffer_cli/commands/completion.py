"""``rlbuffer completion``."""

from __future__ import annotations

import click

from rlbuffer_cli import options

VARIABLE = "_RLBUFFER_COMPLETE"
"""Set by the shell when it asks for completions; click's own name for a program called rlbuffer."""


@options.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@options.debug
def command(shell: str) -> int:
    """Print what makes a shell complete commands, options, and settings of `config explain`.

    \b
    Example:
      eval "$(rlbuffer completion bash)"      (in ~/.bashrc; zsh in ~/.zshrc)
      rlbuffer completion fish > ~/.config/fish/completions/rlbuffer.fish
    """
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    from rlbuffer_cli.main import cli

    kind = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}[shell]
    click.echo(kind(cli, {}, "rlbuffer", VARIABLE).source())
    return 0
