"""``rlbuffer doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import answer, say
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.archive import Archive
    from rlbuffer.checks.check import Finding
    from rlbuffer.state.verdicts import Spell

SHOWN_SPELLS = 6
"""Spells of steps that a cause is said to be named in."""
LEVEL_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@options.command("doctor")
@options.common_of_run
@options.purpose
@click.option(
    "--archive", type=click.Path(path_type=Path), metavar="DIR", help="Look at the steps of an archive alone."
)
@options.json_lines("One object per line.")
def command(given: options.RunFlags, purpose: str | None, archive: Path | None) -> int:
    """Look at settings, host and server, and say what to do about each trouble. Changes nothing.

    One line each: ok, warning, or failure with its fix. Exit code 1 when there is a failure. Starts no server; modules
    that the settings name are imported in a process of its own. Of a run it says what its last steps name as a cause
    for which it learns wrongly; of an archive all causes, and from which step to which. Where weights may not arrive,
    it scores some of what was sampled by the versions that are kept, on the CPU: that proves it, or the contrary.

    \b
    Examples:
      rlbuffer doctor --redis redis://host:6379
      rlbuffer doctor --run math
      rlbuffer doctor --archive /data/math
    """
    from rlbuffer.checks.check import Level
    from rlbuffer.checks.loading import diagnose
    from rlbuffer.config.loading import DEFAULT_FILE

    starting("looking at settings, host and server" if archive is None else "looking at the archive")
    given.check()
    has_file = bool(given.config or os.environ.get("RLBUFFER_CONFIG") or Path(DEFAULT_FILE).is_file())
    parts = options.parts_of(purpose or ("run" if has_file else ""))
    if archive is None:
        found = of_run(diagnose(given.config, given.flags(), parts))
    else:
        found = _of_archive(archive)
    counts = dict.fromkeys(Level, 0)
    for finding in found:
        counts[finding.level] += 1
        level, text = str(finding.level), " ".join(finding.text.split())
        record = {"check": finding.check, "level": level, "settings": finding.settings}
        fix = f"\n    fix: {finding.fix}" if finding.fix else ""
        answer(
            {"schema": "rlbuffer.check/1", **record, "text": text, "fix": finding.fix},
            f"{level:<8} {finding.check:<15} {text}{fix}",
            indent="    ",
            colour=LEVEL_COLOURS[level],
        )
    if not options.is_json():
        say(", ".join(plural(counts[level], str(level)) for level in (Level.FAILURE, Level.WARNING)))
    return 1 if counts[Level.FAILURE] else 0


def of_run(findings: Iterable[Finding]) -> Iterator[Finding]:
    """What was found of a run at work, with what its archive proves."""
    from rlbuffer.archive import Archive
    from rlbuffer.errors import ArchiveError
    from rlbuffer.state.verdicts import OF_WEIGHTS

    for finding in findings:
        yield finding
        if finding.problem is None or finding.problem.kind not in OF_WEIGHTS:
            continue
        folder = finding.archive
        if not folder:
            fix = "Keep one (archive.dir) from the next start of rlbuffer serve on"
            yield _not_proved("the run has no archive, so what was sampled cannot be scored", fix)
            continue
        try:
            archive = Archive(folder)
        except ArchiveError as error:
            yield _not_proved(str(error), f"Look again later, or where it is: rlbuffer doctor --archive {folder}")
            continue
        shown = [spell for spell in _spells(archive) if spell.problem.kind in OF_WEIGHTS]
        if shown:
            yield _proof(archive, shown[-1])
        else:
            yield _not_proved(f"the archive {folder} has no step yet that shows it", "Look again later")


def _spells(archive: Archive) -> list[Spell]:
    """What the steps of an archive that count name."""
    from rlbuffer.state.verdicts import readable, spells

    trained = {record["step"]: readable(record) for record in archive.trained}
    return spells([trained[step] for step in sorted(trained)])


def _steps(spells: Sequence[Spell]) -> str:
    """The steps of spells: ``3 to 5, 9 and 12 to 20``; of many the newest ones."""
    shown = [f"{s.first} to {s.last}" if s.last > s.first else f"{s.first}" for s in spells[-SHOWN_SPELLS:]]
    earlier = [f"{len(spells) - len(shown)} earlier spells"] if len(spells) > len(shown) else []
    *rest, last = [*earlier, *shown]
    return f"{', '.join(rest)} and {last}" if rest else last


def _of_archive(folder: Path) -> Iterator[Finding]:
    """What the steps that the archive knows of name."""
    from rlbuffer.archive import Archive
    from rlbuffer.checks.check import failure, ok, warning
    from rlbuffer.state.text import printable
    from rlbuffer.state.verdicts import OF_WEIGHTS, WRONG

    archive = Archive(folder)
    causes: dict[tuple[str, str], list[Spell]] = {}
    for spell in _spells(archive):
        causes.setdefault(spell.problem.key, []).append(spell)
    for spells in causes.values():
        problem = spells[-1].problem
        text = f"named in steps {_steps(spells)}. {printable(problem.in_words(f'{archive.folder}/'))}"
        yield replace((failure if problem.kind in WRONG else warning)(text), check="learning")
        if problem.kind in OF_WEIGHTS:
            yield _proof(archive, spells[-1])
    if not causes:
        records = archive.trained
        measured = sum(bool(record.get("drift")) for record in records)
        text = f"{plural(len(records), 'trained step')}, {measured} measured by the age of tokens; no cause is named"
        fix = "`rlbuffer train` records it; a trainer of your own does with reader.add_record"
        yield replace(ok(text) if measured else warning(text, fix=fix), check="learning")


def _proof(archive: Archive, spell: Spell) -> Finding:
    """Whether the weights that a sampler named were those that it had, as far as a kept version can tell."""
    from rlbuffer.checks.check import failure, ok
    from rlbuffer.errors import RlbufferError

    starting("scoring what was sampled: loading torch and the model")
    command = f"rlbuffer replay {archive.folder} --score {spell.last}"
    try:
        from rlbuffer.replay.proof import weights_proof

        proof = weights_proof(archive, spell.first - 1, spell.last)  # two steps name it
    except ModuleNotFoundError as error:
        return _not_proved(
            f"scoring needs {error.name}, which is not installed here", f"Where the trainer is: {command}"
        )
    except RlbufferError as error:
        return _not_proved(str(error), f"With what is missing: {command} --versions V,... --checkpoints DIR")
    if proof.has_arrived:
        return replace(ok(str(proof)), check="weights")
    command = f"rlbuffer replay {archive.folder} --score {proof.step}"
    is_found = proof.other is not None and proof.other.rms <= proof.rounded
    versions = proof.to_score if proof.further and not is_found else [fit.version for fit in proof.fits]
    fix = f"Look closer: {command} --versions {','.join(map(str, versions))}"
    if proof.other is None:
        return _not_proved(str(proof), fix)
    return replace(failure(str(proof), fix=fix), check="weights")


def _not_proved(why: str, fix: str) -> Finding:
    from rlbuffer.checks.check import warning

    return replace(warning(f"not proved: {why}", fix=fix), check="weights")
