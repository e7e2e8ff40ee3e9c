"""Which further columns a step has, in which dtype and shape: decided once, when it is committed, for all ranks.

A rank sees only its own rollouts. If each made up its mind from those, one rank's micro-batches could have a column
that another's lack, and two rollouts that disagree about a column would stop one rank and not the others. So the step's
header says it, and pushes that do not fit the others of their step do not get into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlbuffer.records.info import ColumnKind, GroupInfo
from rlbuffer.records.step_plan import StepPlan

Columns = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and trailing shape."""


def agree(plan: StepPlan, infos: Mapping[str, GroupInfo], needed: Sequence[str] = ()) -> tuple[Columns, dict[str, str]]:
    """The columns of a planned step, and which of its pushes do not fit them, with the reason.

    A column's trailing shape is the one that most rollouts come with, the earliest selected among equals; its dtype
    holds the values of all pushes with that shape. `infos` by entry id; `needed` are columns that no push may lack.
    """
    sizes: dict[str, int] = {}
    for ref in plan.rollouts:
        sizes[ref.entry_id] = sizes.get(ref.entry_id, 0) + 1
    votes: dict[str, dict[tuple[int, ...], int]] = {}
    for entry_id, rollouts in sizes.items():
        for name, _, shape in infos[entry_id].columns:
            if name != "advantages":
                counts = votes.setdefault(name, {})
                counts[shape] = counts.get(shape, 0) + rollouts
    shapes = {name: max(counts, key=lambda shape: counts[shape]) for name, counts in votes.items()}
    shapes["advantages"] = ()
    dtypes: dict[str, list[str]] = {}
    odd: dict[str, str] = {}
    for entry_id in sizes:
        kinds = infos[entry_id].columns
        misfit = next((kind for kind in kinds if not _fits(kind, shapes)), None)
        if misfit is not None:
            odd[entry_id] = _sentence(misfit, shapes)
            continue
        lacking = sorted(set(needed).difference(name for name, _, _ in kinds))
        if lacking:
            odd[entry_id] = f"it lacks column {', '.join(lacking)}, without which the trainer cannot train"
            continue
        for name, dtype, _ in kinds:
            dtypes.setdefault(name, []).append(dtype)
    dtypes.pop("advantages", None)
    columns = {name: (np.result_type(*dtypes[name]).str, shapes[name]) for name in sorted(dtypes)}
    return columns, odd


def _fits(kind: ColumnKind, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    name, dtype, shape = kind
    return shape == shapes[name] and (name != "advantages" or np.dtype(dtype).kind != "b")


def _sentence(kind: ColumnKind, shapes: Mapping[str, tuple[int, ...]]) -> str:
    name, dtype, shape = kind
    arrived = f"column {name} is {np.dtype(dtype).name} [{', '.join(['T', *map(str, shape)])}]"
    if name == "advantages":
        return f"{arrived}, not [T] numbers"
    wanted = ", ".join(["T", *map(str, shapes[name])])
    return f"{arrived}, but [{wanted}] in most rollouts of its step"
