"""``rlbuffer what-if``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.state.text import amount, plural
from rlbuffer_cli import options
from rlbuffer_cli.changes import combinations
from rlbuffer_cli.options import echo, say, show_json
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.what_if import Estimate, Outcome, Repeated

TITLES = ("steps/h", "trained tok/h", "dropped", "wasted", "age", "wait", "distance", "long trained")
ASSUMED = (
    "It assumes that tasks take as long as recorded, that rewards and lengths do not change, and the same machines."
)


@options.command("what-if")
@click.argument("archive", metavar="ARCHIVE")
@options.common
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE[,...]",
    help="Another value of a setting of [batcher]; of several each is tried, with each of every other --set.",
)
@click.option(
    "--seeds", type=click.IntRange(1), default=5, show_default=True, help="Runs of each, whose spread is said."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Draw the estimates into a .png or .svg."
)
@options.json_lines("One object for the run, then one per setting.")
def command(archive: str, given: options.RunFlags, changes: tuple[str, ...], seeds: int, output: Path | None) -> int:
    """Estimate what a recorded run would have come to with other settings of the batcher. Needs no server.

    First every recorded decision is made again, and compared by its digest; then workers, leader and trainer of the
    record run on a virtual clock with the real batcher. What it cannot know it refuses: rewards, samplers, other loads.
    The archive has the settings: --config, --redis, --run and --home say nothing here.

    \b
    Examples:
      rlbuffer what-if /data/math
      rlbuffer what-if /data/math --set batcher.max_age=1,2,4 --set batcher.slow=wait
      rlbuffer what-if /data/math --set batcher.max_age=1,2,4,8 -o ages.png
    """
    starting("what-if: loading what reads archives")
    from rlbuffer.archive import Archive
    from rlbuffer.what_if import estimate, read, repeat
    from rlbuffer.what_if.recorded import changed, completed
    from rlbuffer_cli.plots import FILES, check_drawing
    from rlbuffer_cli.progress import showing

    if output is not None and output.suffix not in FILES:
        raise click.UsageError(f"-o {output}: write a name that ends in {' or '.join(FILES)}")
    wanted = combinations(changes)
    if output is not None:
        check_drawing(output)
    with showing("reading the archive") as tell:
        recorded = read(Archive(archive))
        variants = [(completed(recorded.config, variant), changed(recorded.config, variant)) for variant in wanted]
        tried = [({}, recorded.config), *(variant for variant in variants if variant[0])]
        commits = len(recorded.commits)
        repeated = repeat(recorded, lambda steps: tell(f"step {steps} of {commits} made again", steps / commits))
        outcome, steps = recorded.outcome, len(recorded.archive.steps)

        def trained(number: int, seed: int, count: int, groups: int) -> None:
            place = f"seed {seed + 1} of {seeds}, step {min(count + 1, steps)} of {steps}, {plural(groups, 'group')}"
            share = (number * seeds + seed + count / steps) / (len(tried) * seeds)
            tell(f"{settings_name(tried[number][0])}: {place}", share)

        estimates = [
            estimate(recorded, config, changes, seeds=seeds, progress=partial(trained, number))
            for number, (changes, config) in enumerate(tried)
        ]
    if options.is_json():
        show_json(
            {
                "schema": "rlbuffer.what-if/1",
                "steps": repeated.steps,
                "equal": repeated.equal,
                "differs": repeated.differs,
                "drops": repeated.drops,
                "equal_drops": repeated.equal_drops,
                "recorded": outcome.as_object(),
            }
        )
        for each in estimates:
            show_json({"schema": "rlbuffer.estimate/1", **each.as_object()})
    else:
        _tell(outcome, estimates, repeated)
    if output is not None:
        write_estimates(outcome, estimates, output)
        say(f"wrote {output}", err=True)
    return 0


def _tell(outcome: Outcome, estimates: Sequence[Estimate], repeated: Repeated) -> None:
    names = ["as recorded", *map(name_of, estimates)]
    rows = [_cells(outcome), *(_estimated(each) for each in estimates)]
    width = max(map(len, names))
    widths = [max(len(title), *(len(row[n]) for row in rows)) for n, title in enumerate(TITLES)]
    for name, cells in zip(["", *names], [TITLES, *rows], strict=True):
        line = "  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))
        echo(f"{name.ljust(width)}  {line}".rstrip())
    for name, reasons in ((names[0], outcome.reasons), *((name_of(e), e.outcomes[0].reasons) for e in estimates)):
        if reasons:
            echo(f"{name}: dropped {', '.join(f'{count} {reason}' for reason, count in sorted(reasons.items()))}")
    drops = f"{repeated.equal_drops} of {repeated.drops} drops"
    echo(f"Made again: {repeated.equal} of {repeated.steps} commits by their digest, {drops}.")
    if repeated.differs:
        echo(f"From {repeated.differs}. What the leader did then is not in the archive.")
    echo(f"{plural_seeds(estimates)} {ASSUMED}")


def plural_seeds(estimates: Sequence[Estimate]) -> str:
    """What the ranges are."""
    seeds = len(estimates[0].outcomes)
    return f"Ranges are those of {seeds} seeds." if seeds > 1 else "One seed."


def name_of(estimate: Estimate) -> str:
    """An estimate's settings."""
    return settings_name(estimate.changes)


def settings_name(changes: Mapping[str, Any]) -> str:
    """Settings in the place of the run's own, in words."""
    if not changes:
        return "model of it"
    return ", ".join(f"{name.removeprefix('batcher.')} {value}" for name, value in changes.items())


def _cells(outcome: Outcome | Mapping[str, float]) -> list[str]:
    get = outcome.__getitem__ if isinstance(outcome, Mapping) else lambda name: getattr(outcome, name)
    return [
        f"{get('steps_per_hour'):,.0f}",
        amount(get("trained_tokens_per_hour")),
        f"{get('dropped'):.1%}",
        f"{get('tokens_wasted'):.0%}",
        f"{get('age'):.2f}",
        f"{get('wait'):.0%}",
        f"{get('distance'):.3f}",
        f"{get('long_trained'):.0%}",
    ]


FIGURES = (
    *("steps_per_hour", "trained_tokens_per_hour", "dropped", "tokens_wasted"),
    *("age", "wait", "distance", "long_trained"),
)


def _estimated(estimate: Estimate) -> list[str]:
    """Means; with the range where that shows."""
    means = _cells({name: estimate.mean(name) for name in FIGURES})
    low, high = (_cells({name: estimate.spread(name)[end] for name in FIGURES}) for end in (0, 1))
    return [mean if a == b else f"{mean} ({a}-{b})" for mean, a, b in zip(means, low, high, strict=True)]


def write_estimates(outcome: Outcome, estimates: Sequence[Estimate], file: Path) -> None:
    """Draws trained tokens an hour, wasted tokens and the distance of lengths, with the range over seeds.

    Raises:
        RlbufferError: matplotlib is not installed, or the file cannot be written.
    """
    from rlbuffer_cli.plots import bars

    panels = {
        "trained tokens an hour": "trained_tokens_per_hour",
        "steps an hour": "steps_per_hour",
        "tokens wasted": "tokens_wasted",
        "distance of lengths": "distance",
    }
    names = ["as recorded", *map(name_of, estimates)]
    values = {
        title: [
            (float(getattr(outcome, name)),) * 3,
            *((each.mean(name), *each.spread(name)) for each in estimates),
        ]
        for title, name in panels.items()
    }
    bars(names, values, file)
