"""The GPUs that a process sees."""

from __future__ import annotations

from collections.abc import Sequence

from rlbuffer.config.settings import RunSettings, ScoreSettings, WorkerSettings


def visible(gpus: Sequence[int | str]) -> dict[str, str]:
    """The variables that make a process see `gpus` alone; none for an empty list. Before CUDA is first used."""
    return {GPU_VARIABLE: ",".join(map(str, gpus))} if gpus else {}


def gpus_of(options: WorkerSettings | ScoreSettings, replica: int) -> tuple[int | str, ...]:
    """The GPUs of one replica: the list dealt out in order, equally many each.

    Numbers from `replicas` on are those of other hosts, where the list is dealt out again.
    """
    replica %= options.replicas
    each = len(options.gpus) // options.replicas
    return options.gpus[replica * each : (replica + 1) * each]


def shared_gpus(settings: RunSettings) -> list[str]:
    """A sentence per GPU that is given to more than one kind of process on this machine."""
    owners: dict[str, list[str]] = {}
    named: list[tuple[str, tuple[int | str, ...]]] = [("trainer", settings.trainer.gpus)]
    named += [(f"worker.{name}", options.gpus) for name, options in settings.worker.items()]
    named += [(f"score.{name}", options.gpus) for name, options in settings.score.items()]
    for name, gpus in named:
        for gpu in dict.fromkeys(map(str, gpus)):
            owners.setdefault(gpu, []).append(name)
    return [f"GPU {gpu} is given to {' and '.join(names)}" for gpu, names in owners.items() if len(names) > 1]


GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
