"""Every format that is read; a record tells by the fields that it has."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlbuffer.traces import (
    agent_lightning,
    agent_lightning_events,
    harbor,
    nemo_gym,
    open_instruct,
    openenv,
    prime_rl,
    slime,
    verifiers,
)
from rlbuffer.traces.attempt import TraceAttempt
from rlbuffer.traces.values import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One shape of record."""

    name: str
    """How it is asked for: `read(..., format=name)`."""
    is_called: str
    """What it is, for people."""
    fields: tuple[str, ...]
    """A record that has all of these, of any depth (``steps.0.metrics``), is one."""
    attempts: Callable[[Sequence[Value]], Iterator[TraceAttempt]]
    """What the records of one rollout say."""
    rollout: Callable[[Value], Hashable] = lambda record: None
    """What the records of one rollout have in common; None: this one is a rollout, or several, by itself."""
    parts: Callable[[Value], Iterable[Value]] = lambda record: (record,)
    """The records that one record of a file holds."""
    grouped_by: str = ""
    """What the attempts of a group have in common."""
    note: str = ""
    """What else a user should know."""


FORMATS = (
    Format(
        name="verifiers",
        is_called="episodes of verifiers, as prime-rl writes them",
        fields=("traces", "task"),
        attempts=verifiers.episodes,
        grouped_by="group, else task",
        note=verifiers.ROUNDED,
    ),
    Format(
        name="verifiers-traces",
        is_called="traces of verifiers",
        fields=("nodes", "rewards"),
        attempts=verifiers.episodes,
        grouped_by="group_id, else task",
        note=verifiers.ROUNDED,
    ),
    Format(
        name="openenv",
        is_called="training traces of OpenEnv",
        fields=("turns", "schema_version"),
        attempts=openenv.traces,
        grouped_by="task_id, else prompt",
    ),
    Format(
        name="harbor",
        is_called="results of Harbor's trials",
        fields=("task_name", "agent_result"),
        attempts=harbor.trials,
        grouped_by="task_name",
    ),
    Format(
        name="atif",
        is_called="trajectories in ATIF",
        fields=("schema_version", "agent", "steps"),
        attempts=harbor.trajectories,
        rollout=harbor.run_of,
        grouped_by="prompt",
    ),
    Format(
        name="nemo-gym-entries",
        is_called="token entries of NeMo Gym",
        fields=("rollout_id", "model_call_id", "generation_token_ids"),
        attempts=nemo_gym.entries,
        rollout=nemo_gym.rollout_of,
        grouped_by="task index",
    ),
    Format(
        name="nemo-gym",
        is_called="rollouts of NeMo Gym",
        fields=("response.output", "reward"),
        attempts=nemo_gym.rollouts,
        grouped_by="task index",
    ),
    Format(
        name="agent-lightning-spans",
        is_called="spans of Agent Lightning",
        fields=("rollout_id", "attempt_id", "span_id", "attributes"),
        attempts=agent_lightning.spans,
        rollout=agent_lightning_events.rollout_of,
        grouped_by="prompt",
    ),
    Format(
        name="agent-lightning-events",
        is_called="events of Agent Lightning",
        fields=("rollout_id", "attempt_id", "event_type", "data"),
        attempts=agent_lightning_events.events,
        rollout=agent_lightning_events.rollout_of,
        grouped_by="prompt",
    ),
    Format(
        name="agent-lightning",
        is_called="triplets of Agent Lightning",
        fields=("rollout_id", "triplets"),
        attempts=agent_lightning_events.triplets,
        grouped_by="data_id, else prompt",
    ),
    Format(
        name="slime",
        is_called="samples of slime",
        fields=("tokens", "response_length", "status"),
        attempts=slime.samples,
        rollout=slime.rollout_of,
        parts=slime.parts,
        grouped_by="group_index, else prompt",
    ),
    Format(
        name="slime",
        is_called="samples of slime",
        fields=("rollout_id", "samples"),
        attempts=slime.samples,
        rollout=slime.rollout_of,
        parts=slime.parts,
        grouped_by="group_index, else prompt",
    ),
    Format(
        name="open-instruct",
        is_called="rollouts of open-instruct",
        fields=("prompt_tokens", "response_tokens", "prompt_idx"),
        attempts=open_instruct.responses,
        grouped_by="step and prompt_idx",
    ),
    Format(
        name="prime-rl",
        is_called="prime-rl's rows of 2025",
        fields=("input_tokens", "output_tokens", "rewards"),
        attempts=prime_rl.rows,
        grouped_by="step and problem_id, else prompt",
    ),
)


def recognised(record: Value, name: str | None) -> Format:
    """The format of a record, which may be asked for by name.

    Raises:
        InvalidRollout: it is none that is known.
    """
    fields = record.mapping
    found = next((one for one in FORMATS if (one.name == name if name else _has_all(fields, one.fields))), None)
    if found is None:
        names = ", ".join(dict.fromkeys(one.name for one in FORMATS))
        if name:
            raise record.wrong(f"format {name} is not known; known are {names}")
        raise record.wrong(
            f"no format that is known has the fields {', '.join(sorted(map(str, fields))[:12])}; known are {names}"
        )
    return found


def is_known(record: Value) -> bool:
    """The record is of one of these formats."""
    return any(_has_all(record.mapping, one.fields) for one in FORMATS)


def _has_all(record: Mapping[str, object], fields: Sequence[str]) -> bool:
    return all(_has(record, field) for field in fields)


def _has(record: object, field: str) -> bool:
    for name in field.split("."):
        if not isinstance(record, Mapping) or name not in record:
            return False
        record = record[name]
    return True
