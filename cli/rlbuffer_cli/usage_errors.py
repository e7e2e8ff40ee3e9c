"""What click refuses of a typed command, in the words that settings are refused in."""

from __future__ import annotations

import re

import click

from rlbuffer_cli.options import names_of_options

_KINDS = {
    r"(?P<value>.+) is not a valid integer(?: range)?\.": "must be an integer",
    r"(?P<value>.+) is not a valid float(?: range)?\.": "must be a number",
    r"(?P<value>.+) is not in the range x>=(?P<least>[\d.]+)\.": "must be {least} or more",
    r"(?P<value>.+) is not one of (?P<choices>.+)\.": "must be one of {choices}",
    r"File (?P<value>.+) does not exist\.": "there is no such file",
    r"(?:File|Path) (?P<value>.+) is a directory\.": "it is a directory, name a file in it",
    r"(?:File|Path) (?P<value>.+) is not readable\.": "cannot be read by this user",
}
"""What click says of a value -> what we say."""
_SURPLUS = re.compile(r"Got unexpected extra arguments? \((.+)\)")
_NO_VALUE = re.compile(r"Option (.+) requires (?:an argument|\d+ arguments)\.")


def sentence(error: click.ClickException) -> str:
    """What was wrong, with what was typed, and what may be typed instead."""
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        return _no_option(error)
    if isinstance(error, click.MissingParameter):
        return f"{_name(error)} is missing: {_meaning(error)}"
    if isinstance(error, click.BadParameter):
        for pattern, words in _KINDS.items():
            if found := re.fullmatch(pattern, error.message):
                values = {key: text.replace("'", "") for key, text in found.groupdict().items() if key != "value"}
                return f"{_name(error)} {found['value']}: {words.format(**values)}"
        return f"{_name(error)}: {error.message}"
    if found := _SURPLUS.fullmatch(message):
        return f"{found[1]!r} is one argument too many: {_usage(error)}"
    if found := _NO_VALUE.fullmatch(message):
        return f"{_unquoted(found[1])} needs a value behind it"
    return message


def _name(error: click.BadParameter) -> str:
    """An option as it is typed, an argument as the usage line has it."""
    parameter = error.param
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return parameter.human_readable_name if parameter is not None else _unquoted(str(error.param_hint or "a value"))


def _meaning(error: click.MissingParameter) -> str:
    """What an option is for, what an argument may be, or where it stands."""
    parameter = error.param
    if isinstance(parameter, click.Option) and parameter.help:
        return parameter.help.removesuffix(".")
    if parameter is not None and isinstance(parameter.type, click.Choice):
        return f"one of {', '.join(map(str, parameter.type.choices))}"
    return _usage(error)


def _no_option(error: click.NoSuchOption) -> str:
    from rlbuffer.state.text import did_you_mean

    name, ctx = error.option_name, error.ctx
    if ctx is None:
        return f"there is no option {name}"
    of_file = [p for p in ctx.command.params if isinstance(p, click.Argument) and p.name == "config"]
    if name == "--config" and of_file:
        return f"`{ctx.command_path}` has no option --config: name the file without it, `{ctx.command_path} FILE`"
    names = names_of_options(ctx)
    begun = [option for option in names if option.startswith(name)]
    where = f"`{ctx.command_path} --help` lists them" if ctx.parent else "Those of a command stand behind its name"
    hint = f" Did you mean {begun[0]}?" if begun else did_you_mean(name, names, cutoff=0.75, otherwise=f" {where}.")
    return f"`{ctx.command_path}` has no option {name}.{hint}"


def _usage(error: click.ClickException) -> str:
    ctx = getattr(error, "ctx", None)
    if ctx is None:
        return "take it away"
    words = ctx.command.collect_usage_pieces(ctx)
    return f"the command is `{' '.join([ctx.command_path, *words])}`"


def _unquoted(text: str) -> str:
    return text.strip("'\"")
