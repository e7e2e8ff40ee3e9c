"""The table by age: how far trainer and sampler are apart in the newest steps, and what that names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from rlbuffer.state.step_record import DRIFT_AGES, StepRecord
from rlbuffer.state.text import amount, printable
from rlbuffer.state.verdicts import JUDGED_STEPS, newest_steps, sampler_fact, verdicts
from rlbuffer_cli.table import Column, Target, View, figure
from rlbuffer_cli.text import WIDE, signs

DRIFT_LEGEND = (
    "ratio: trainer over sampler   >10%: tokens off by more   rms, KL, surprise: nats   ESS: effective sample size   "
    "clipped, corrected: no gradient"
)


class DriftRow(NamedTuple):
    """The tokens of one age in a step."""

    record: StepRecord
    age: str
    is_first: bool
    """Of the step."""

    @property
    def least_age(self) -> int:
        """Of the tokens; the last row has all that are older than those of the rows before it."""
        return int(self.age) if self.age.isdecimal() else len(DRIFT_AGES) - 1

    def number(self, name: str) -> float | None:
        """One number of the table; None where the trainer did not measure it."""
        return self.record.drift[self.age].get(name)


def _read(run: Any, where: str, most: int) -> list[DriftRow]:
    """The newest steps first."""
    records = newest_steps(run.records(JUDGED_STEPS))
    return [
        DriftRow(record, age, age == next(iter(record.drift))) for record in reversed(records) for age in record.drift
    ][:most]


def _above(run: Any, items: Sequence[DriftRow], width: int) -> Sequence[RenderableType]:
    """The verdicts of the newest steps; else how far off the sampler is."""
    records = list({row.record.step: row.record for row in reversed(items)}.values())
    named = verdicts(records)
    if named:
        return [Text(f"✕ {printable(str(problem))}", "dropped") for problem in named]
    return [Text(fact, "faint")] if records and (fact := sampler_fact(records[-1])) else []


def _small(value: float) -> str:
    """Four places, and the size of what has none there."""
    return signs(f"{value:.4f}" if value >= 1e-4 or not value else f"{value:.0e}")


def _of(title: str, name: str, form: str | Callable[[Any], str] = ".4f", at: int = 0) -> Column:
    return figure(title, lambda row: row.number(name), form, at)


DRIFT = View(
    name="drift",
    one="age of a step",
    many="ages of steps",
    press="d",
    answers="How far are trainer and sampler apart, by the age of tokens? Is it staleness, or the sampler?",
    read=_read,
    key=lambda row: f"{row.record.step} {row.age}",
    record=lambda row: {
        "schema": "rlbuffer.drift/1",
        "step": row.record.step,
        "age": row.age,
        "bfloat16_rms": row.record.bfloat16_rms,
        **row.record.drift[row.age],
    },
    opens=lambda row: Target("step", str(row.record.step)),
    above=_above,
    fields={
        "step": lambda row: row.record.step,
        "age": lambda row: row.least_age,
        "tokens": lambda row: row.number("tokens"),
    },
    filter_help="step:40 age>=1",
    empty="no step was measured by age: `rlbuffer train` does it",
    legend=lambda rows: DRIFT_LEGEND,
    columns=(
        Column("step", lambda row: row.record.step if row.is_first else "", lambda row: row.record.step, True),
        Column("age", lambda row: row.age, lambda row: row.age, True),
        _of("tokens", "tokens", amount),
        _of("ratio", "ratio"),
        _of(">10%", "far", ".1%"),
        _of("rms", "rms", _small),
        _of("KL", "kl", ".1e", 1),
        _of("ESS", "ess", ".1%", 1),
        _of("slope", "slope", "+.3f", 2),
        _of("surprise", "surprise", "+.3f", 2),
        _of("entropy", "entropy", ".3f", WIDE),
        _of("clipped", "clipped", ".1%"),
        _of("corrected", "corrected", ".1%", 3),
    ),
)
