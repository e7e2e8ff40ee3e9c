"""``rlbuffer replay``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.changes import combinations
from rlbuffer_cli.options import echo, say, show_json
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.replay.training import Replay
    from rlbuffer.state.step_record import StepRecord

SHOWN_ROLLOUTS = 8
"""Rollouts of a step that are listed."""


@options.command("replay")
@click.argument("archive", metavar="ARCHIVE")
@options.common
@click.option("--from", "first", type=click.IntRange(1), metavar="N", help="First step. [default: the archive's first]")
@click.option("--to", "last", type=click.IntRange(1), metavar="N", help="Last step. [default: the last trained step]")
@click.option("--world-size", type=click.IntRange(1), metavar="W", help="Ranks. [default: as many as the run had]")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE[,...]",
    help="Another value of a setting of [trainer] or [model]; of several each is trained, one after the other.",
)
@click.option(
    "--checkpoints",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="The run's checkpoints. [default: where its trainer has written them]",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Keep metrics and the last checkpoint there."
)
@click.option("--score", metavar="STEP", help="Score the rollouts of a step instead; `jump`: where the gradient did.")
@click.option(
    "--versions", metavar="V,...", help="Versions that score them. [default: those that sampled them, and are kept]"
)
@click.option("--display", type=click.Choice(["auto", "plain", "json", "none"]), default="auto", help="What it prints.")
@options.json_lines("One object per replay, or per version that scores.")
def command(
    archive: str,
    given: options.RunFlags,
    first: int | None,
    last: int | None,
    world_size: int | None,
    changes: tuple[str, ...],
    checkpoints: Path | None,
    output: Path | None,
    score: str | None,
    versions: str | None,
    display: str,
) -> int:
    """Train the recorded steps of an archive again, without server or workers.

    Behind the same checkpoint, on the same machine, with the same releases and ranks, it makes the same bits; it says
    in how many steps it did. --set trains the same steps with other settings: for some steps that tells two losses
    apart, then the rollouts are not those of the policy that trains on them, and the table says where. --score asks
    which version of the policy has sampled the rollouts of a step. The settings are the archive's; --config FILE takes
    their place. --redis, --run and --home say nothing here.

    \b
    Examples:
      rlbuffer replay /data/math
      rlbuffer replay /data/math --from 41 --to 60 --world-size 2
      rlbuffer replay /data/math --to 20 --set trainer.loss.name=dapo,clip,cispo
      rlbuffer replay /data/math --score 42 --versions 30,40,50
    """
    if score is not None and (changes or any(value is not None for value in (first, last, world_size, output))):
        raise click.UsageError("--score goes with --versions and --checkpoints alone")
    if output is not None and output.exists() and not output.is_dir():
        raise click.UsageError(f"--output {output} is a file: name a folder")
    starting("replay: reading the archive")
    from rlbuffer.config.recorded import recorded
    from rlbuffer.replay.training import planned

    kept = None if given.config is None else recorded(given.load().settings)
    if score is not None:
        return _score(archive, kept, checkpoints, score, versions)
    if versions is not None:
        raise click.UsageError("--versions goes with --score STEP")
    variants = combinations(changes)
    replay = planned(archive, first=first, last=last, checkpoints=checkpoints, given=kept)
    _head(replay)
    is_list = len(variants) > 1
    rows = []
    for number, variant in enumerate(variants):
        shown = "none" if is_list or options.is_json() else options.choose_display(display)
        folder = output / f"{number + 1}" if output is not None and is_list else output
        row = _trained(replay, variant, folder, world_size or replay.world_size, shown)
        if isinstance(row, int):
            return row
        rows.append(row)
        if options.is_json():
            show_json(row)
        elif is_list:
            if number == 0:
                echo(_line(_titles(replay, variants)))
            echo(_line(_cells(row)))
        else:
            say(_sentence(replay, row))
    if not options.is_json():
        _tail(replay, rows, is_list=is_list)
    return 0


def _head(replay: Replay) -> None:
    whose = f"settings of attempt {replay.attempt}" if replay.attempt else "settings of --config"
    start = f"checkpoint {replay.begin}" if replay.begin else "fresh weights"
    if not options.is_json():
        say(f"replays steps {replay.first}-{replay.last} of run {replay.archive.run} ({whose}, from {start})")
        for note in replay.notes:
            say(f"  {note}")


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """The folder of a replay: the one that was given, else one that is gone at its end."""
    if given is not None:
        if given.exists() and any(given.iterdir()):
            raise click.UsageError(f"--output {given} is not empty: a replay begins in a folder of its own")
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="rlbuffer-replay-") as folder:
        yield Path(folder)


def _trained(
    replay: Replay, variant: Mapping[str, Any], given: Path | None, world_size: int, display: str
) -> dict[str, Any] | int:
    """Trains once. -> what came of it; the exit code of ranks that failed, which have said why."""
    from rlbuffer.replay import training
    from rlbuffer.trainer.checkpoints import checkpoint

    with _folder(given) as folder:
        settings = replay.settings(variant, output=folder, world_size=world_size)
        code = training.run(replay, settings, display=display)
        if code:
            return code
        made = training.records_in(folder)
        comparison = training.compared(training.trained_records(replay.archive), made)
        difference = None
        theirs = checkpoint.path_of(replay.checkpoints, replay.last)
        if not variant and theirs.is_dir():
            difference = checkpoint.difference(theirs, checkpoint.path_of(folder / "checkpoints", replay.last))
    newest = made[replay.last]
    left, jump = training.left_at(made), training.jumped_at(made)
    return {
        "schema": "rlbuffer.replay/1",
        "run": replay.archive.run,
        "settings": dict(variant),
        "is_as_recorded": not variant or all(_recorded(replay, name) == value for name, value in variant.items()),
        "from": replay.first,
        "to": replay.last,
        "begin": replay.begin,
        "world_size": world_size,
        "loss": newest.loss,
        "grad_norm": newest.grad_norm,
        "kl": newest.kl,
        "ratio": dict(newest.ratio),
        "ess": newest.ess,
        "masked_fraction": newest.masked_fraction,
        "left_at": left,
        "jump": jump and {"step": jump[0], "grad_norm": jump[1], "usual": jump[2]},
        "compared": asdict(comparison),
        "checkpoint": difference and asdict(difference),
    }


def _recorded(replay: Replay, name: str) -> Any:
    value: Any = replay.kept
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _sentence(replay: Replay, row: Mapping[str, Any]) -> str:
    """A replay of the recorded settings, or of one other setting, beside the run."""
    done = row["compared"]
    text = f"step {row['to']}  loss {row['loss']:.4f}  grad {row['grad_norm']:.3g}"
    if not row["is_as_recorded"]:
        left = f"; the rollouts are not this policy's from step {row['left_at']} on" if row["left_at"] else ""
        ess = "" if row["ess"] is None else f"  ESS {row['ess']:.1%}"
        return f"{text}  k3 {row['kl']:.3g}  ratio p99 {row['ratio'].get('p99', 1.0):.3g}{ess}{left}"
    if not done["steps"]:
        return f"{text}  the archive has no records of the trainer to compare with"
    parts = []
    if done["parameters"] is not None and (row["world_size"] == replay.world_size or done["parameters"]):
        parts.append(f"parameters {done['parameters']} of {done['steps']} steps")
    if done["batches"] is not None:
        parts.append(f"micro-batches {done['batches']} of {done['steps']}")
    if done["parameters"] is None:
        parts.append(f"loss and gradient norm {done['figures']} of {done['steps']}")
    if done["figures"] < done["steps"]:
        parts.append(f"losses and gradient norms within {done['largest']:.2g}")
    if row["checkpoint"]:
        checkpoint = row["checkpoint"]
        apart = (
            "" if checkpoint["same"] == checkpoint["tensors"] else f", the others within {checkpoint['largest']:.2g}"
        )
        parts.append(f"checkpoint {row['to']}: {checkpoint['same']} of {checkpoint['tensors']} tensors{apart}")
    return f"{text}  as recorded: {', '.join(parts)}"


def _titles(replay: Replay, variants: Sequence[Mapping[str, Any]]) -> list[str]:
    names = " ".join(name.rpartition(".")[2] if name != "trainer.loss.name" else "loss" for name in variants[0])
    return [names, f"k3 at {replay.last}", "ratio p99", "ESS", "leaves the data at", "masked", "grad", ""]


def _cells(row: Mapping[str, Any]) -> list[str]:
    left = f"step {row['left_at']}" if row["left_at"] else "-"
    return [
        " ".join(map(str, row["settings"].values())),
        f"{row['kl']:.3g}",
        f"{row['ratio'].get('p99', 1.0):.3g}",
        "-" if row["ess"] is None else f"{row['ess']:.1%}",
        left,
        f"{row['masked_fraction'] or 0:.0%}",
        f"{row['grad_norm']:.3g}",
        "as recorded" if row["is_as_recorded"] else "",
    ]


def _line(cells: Sequence[str]) -> str:
    widths = (14, 10, 11, 8, 20, 8, 8, 0)
    return "".join(f"{cell:<{width}}" if width else cell for cell, width in zip(cells, widths, strict=True)).rstrip()


def _tail(replay: Replay, rows: Sequence[Mapping[str, Any]], *, is_list: bool) -> None:
    """What the figures do not say, and where to look."""
    from rlbuffer.replay import training

    if any(not row["is_as_recorded"] for row in rows):
        loss = _recorded(replay, "trainer.loss.name")
        say(
            f"The rollouts are those of the policy that {loss} has trained: their rewards say nothing of another one. "
            f"A policy leaves the data where k3 is above {training.LEFT:g}."
        )
    damaged = sorted({step for row in rows for step in row["compared"]["damaged"]})
    if damaged:
        say(
            f"{plural(len(damaged), 'step')}, the first {damaged[0]}, lacked rollouts that the run had trained, or had "
            "none of a column that the loss reads: those were masked."
        )
    jump = training.jumped_at(training.trained_records(replay.archive))
    if jump is not None and not is_list:
        step, norm, usual = jump
        say(
            f"The run's gradient norm jumped first at step {step}: {norm:.3g}, where {usual:.3g} was usual. "
            f"Its rollouts: rlbuffer replay {replay.archive.folder} --score {step}"
        )


# -- scoring -----------------------------------------------------------------------------------------------------------
def _score(
    folder: str, kept: Mapping[str, Any] | None, checkpoints: Path | None, wanted: str, versions: str | None
) -> int:
    import json

    from rlbuffer.archive.library import Archive
    from rlbuffer.replay import training
    from rlbuffer.state.verdicts import rounding

    archive = Archive(folder)
    records = training.trained_records(archive)
    step, jump = _step_of(archive.run, wanted, records)
    if kept is None:
        _, attempt = training.attempt_of(archive, step)
        kept = attempt["settings"]
    revision = next((each.revision for each in archive.steps if each.step == step), 0)
    theirs = training.checkpoints_of(kept)
    places = {"output": theirs.parent, "checkpoints": theirs if checkpoints is None else checkpoints}
    members = list(archive.rollouts(step))
    starting("replay: loading torch and the model")
    from rlbuffer.replay import scoring

    there = scoring.versions_in(**places)
    if versions is not None:
        asked, gone = _numbers(versions), ""
    else:
        asked, others = scoring.samplers(members, there)
        gone = ", ".join(map(str, others))
        if gone and not asked:
            raise scoring.not_kept(f"of the versions that sampled step {step} ({gone}) none is", there, **places)
    batcher = json.loads(archive.settings(revision)["config"])
    fits, scored = scoring.travelled(kept, batcher, members=members, versions=asked, **places)
    if jump and not options.is_json():
        say(jump)
    if gone:
        say(f"of the versions that sampled step {step} these are not kept: {gone}", err=options.is_json())
    if options.is_json():
        for fit in fits:
            columns = ("version", "sampled_by", "tokens", "rms", "ratio", "p99")
            show_json({"schema": "rlbuffer.fit/1", "step": step, **{name: getattr(fit, name) for name in columns}})
        return 0
    nearest = {fit.sampled_by: fit for fit in sorted(fits, key=lambda fit: -fit.rms)}
    scorers = plural(len(asked), "version")
    say(f"{plural(len(scored), 'rollout')} of step {step} of run {archive.run}, scored by {scorers}")
    echo(f"{'scored by':<11}{'sampled by':<12}{'tokens':>8}  {'rms':<10}{'ratio':<8}p99")
    for fit in fits:
        mark = "  nearest" if fit == nearest[fit.sampled_by] else ""
        echo(
            f"{fit.version:<11}{fit.sampled_by:<12}{fit.tokens:>8,}  {fit.rms:<10.3g}{fit.ratio:<8.4g}"
            f"{fit.p99:.4g}{mark}"
        )
    for by, fit in scoring.other_samplers(fits).items():
        say(
            f"Version {by} is said to have sampled tokens that version {fit.version} fits better: the sampler had "
            f"not loaded version {by}, or another one under its number."
        )
    record = records.get(step)
    rounded = rounding(record.bfloat16_rms if record is not None else None)
    further = sorted({0, *there} - set(asked))
    for by, fit in scoring.unexplained(fits, rounded).items():
        names = ",".join(map(str, scoring.beside(fit.version, further)))
        say(
            f"None of these has sampled what version {by} is said to have sampled: from version {fit.version}, which "
            f"is nearest, it is off by {fit.rms:.2g} nats (rms), and a sampler rounds by {rounded:.2g}. "
            + (f"Others are kept: try --versions {names}" if names else "No other version is kept.")
        )
    _list(scored, asked)
    return 0


def _step_of(run: str, wanted: str, records: Mapping[int, StepRecord]) -> tuple[int, str]:
    """The step that is asked for, and a sentence about it."""
    from rlbuffer.errors import ArchiveError
    from rlbuffer.replay import training

    if wanted.isdigit():
        return int(wanted), ""
    if wanted != "jump":
        raise click.UsageError(f"--score {wanted}: give a step, or `jump`")
    found = training.jumped_at(records)
    if found is None:
        raise ArchiveError(
            f"--score jump: of {plural(len(records), 'recorded step')} of run {run} the gradient norm jumped at none. "
            f"A jump is {training.JUMP:g} times the median of the {training.USUAL_STEPS} steps before it, of which "
            f"{training.LEAST_STEPS} must be there. Give a step: --score STEP"
        )
    step, norm, usual = found
    return step, f"step {step} is the first whose gradient norm jumped: {norm:.3g}, where {usual:.3g} was usual"


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise click.UsageError(f"--versions {text}: give numbers, with commas between them")
    return [int(word) for word in words]


def _list(scored: Sequence[Any], versions: Sequence[int]) -> None:
    """The rollouts with the largest weight in the step: advantage times tokens."""
    heaviest = sorted(scored, key=lambda each: -abs(each.rollout.row["advantage"] or 0.0) * each.tokens)
    if not heaviest:
        return
    echo()
    by = ", ".join(map(str, versions))
    echo(f"{'rollout':<24}{'env':<12}{'reward':>8}{'advantage':>11}{'tokens':>8}  rms by {by}")
    for each in heaviest[:SHOWN_ROLLOUTS]:
        row = each.rollout.row
        reward = "-" if row["reward"] is None else f"{row['reward']:.3g}"
        distances = "  ".join(f"{each.rms[version]:.2g}" for version in versions)
        figures = f"{reward:>8}{row['advantage'] or 0.0:>11.3g}{each.tokens:>8}"
        echo(f"{each.rollout.rollout_id:<24}{row['env']:<12}{figures}  {distances}")
