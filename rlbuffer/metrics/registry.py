"""Every metric that a process answers: the one list that the endpoints, their page and the dashboard go by.

A value is a number, or, for a metric with labels, a mapping: label -> value, nested in the order of the labels. A
histogram's value is a :class:`rlbuffer.metrics.histogram.Histogram`. The trainer's are the fields of its record of a
step; the leader's go there with its heartbeat, under ``buffer/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from rlbuffer.state.metric import metrics_of
from rlbuffer.state.step_record import StepRecord

Values = Mapping[str, Any]
"""Name of a metric -> its value. One that is not there yet is left out."""
Kind = Literal["gauge", "counter", "histogram"]
METRIC_PREFIX = "rlbuffer_"
FOLDER = "buffer/"
"""Beginning of the paths in `metrics.jsonl` of what the leader knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, as the registry has it."""

    name: str
    """Name without `rlbuffer_`; a counter's ends in `_total`."""
    kind: Kind
    unit: str
    """Unit of the value: ``groups``, ``seconds``, ``ratio`` (0-1); "": as the name says."""
    labels: tuple[str, ...] = ()
    meaning: str
    record: str = ""
    """Path in `metrics.jsonl`, where that has the number: ``seconds/total``."""


def _metrics(kind: Kind, *rows: tuple[str, str, str, str]) -> tuple[Metric, ...]:
    """Metrics of one kind. Rows are (name, unit, labels with blanks between, meaning)."""
    return tuple(
        Metric(name=name, kind=kind, unit=unit, labels=tuple(labels.split()), meaning=meaning)
        for name, unit, labels, meaning in rows
    )


def _recorded(kind: Kind, *rows: tuple[str, str, str, str, str]) -> tuple[Metric, ...]:
    """Metrics that `metrics.jsonl` has, too. Rows are (name, unit, labels, path in the record, meaning)."""
    return tuple(
        Metric(name=name, kind=kind, unit=unit, labels=tuple(labels.split()), meaning=meaning, record=path)
        for name, unit, labels, path, meaning in rows
    )


SERVER = _metrics(
    "counter",
    ("server_errors_total", "errors", "op", "Calls of this process that the Redis or Valkey server did not answer."),
)
"""Metrics of every process that has a connection."""
SERVE = (
    *_metrics(
        "gauge",
        ("leader", "0 or 1", "", "1 while this batcher leads the run. A standby answers this, and no figures."),
        ("server_up", "0 or 1", "", "1 when the server has answered; else what it knows is left out."),
        ("server_memory_bytes", "bytes", "", "Memory of the server that counts against its limit."),
        ("server_memory_limit_bytes", "bytes", "", "The server's maxmemory; 0: none."),
        ("workers_alive", "workers", "env", "Workers that were heard of in the last 8 seconds."),
        ("tickets_out", "tickets", "env", "Tickets that workers hold."),
        ("rollouts_pending", "rollouts", "env", "In the pool, by the ledger."),
        ("tokens_pending", "tokens", "env", "In the pool, by the ledger."),
        ("rollouts_packed", "rollouts", "env", "In steps that are not trained yet, by the ledger."),
        ("policy_version", "version", "", "Newest version that workers can sample from."),
        ("step", "step", "", "Last committed step."),
        ("trained_step", "step", "", "Last step that the trainer has trained."),
        ("trainer_step", "step", "rank", "Last step that each rank has trained, by its heartbeat."),
    ),
    *_recorded(
        "gauge",
        (
            "new_groups",
            "groups",
            "env",
            "buffer/new_groups",
            "Groups, or parts of one, that came between the last two steps.",
        ),
        ("new_rollouts", "rollouts", "env", "buffer/new_rollouts", "Rollouts of the same."),
        (
            "new_generated_tokens",
            "tokens",
            "env",
            "buffer/new_generated_tokens",
            "Tokens of the same that can be trained.",
        ),
        ("groups_ready", "groups", "env", "buffer/groups_ready", "In the pool, whole."),
        (
            "groups_forming",
            "groups",
            "env",
            "buffer/groups_forming",
            "In the pool, waiting for more of their rollouts.",
        ),
        ("rollouts_ready", "rollouts", "env", "buffer/rollouts_ready", "Of the groups that are ready."),
        ("tokens_ready", "tokens", "env", "buffer/tokens_ready", "Of the groups that are ready."),
        ("tokens_forming", "tokens", "env", "buffer/tokens_forming", "Of the groups that are forming."),
        (
            "budget_ratio",
            "ratio",
            "env",
            "buffer/budget",
            "Share of a step's tokens that the settings promise the env.",
        ),
        (
            "reward_mean",
            "reward",
            "env name",
            "buffer/reward_mean",
            "Of the rollouts in the last 256 pushes; name reward: the whole one.",
        ),
        ("reward_std", "reward", "env name", "buffer/reward_std", "Standard deviation of the same, with n - 1."),
        (
            "on_policy_ratio",
            "ratio",
            "env",
            "buffer/frac_on_policy",
            "Rollouts of the last 256 pushes, all tokens by the newest version.",
        ),
        (
            "truncated_ratio",
            "ratio",
            "env",
            "buffer/frac_truncated",
            "Rollouts of the last 256 pushes that ended at a length limit.",
        ),
        (
            "flat_ratio",
            "ratio",
            "env",
            "buffer/frac_flat",
            "Whole groups among the last 256 pushes that teach nothing.",
        ),
        (
            "used_in_batch_ratio",
            "ratio",
            "env",
            "buffer/frac_used_in_batch",
            "Groups that were ready at the last step, and went into it.",
        ),
        ("batch_used_ratio", "ratio", "env", "buffer/frac_used", "Share of the last step's tokens."),
    ),
    *_metrics(
        "gauge",
        ("batch_age_mean", "versions", "env", "Mean age of the last step's rollouts."),
        ("batch_age_max", "versions", "env", "Age of the oldest one."),
        ("batch_reward_mean", "reward", "env", "Mean reward of the last step's rollouts."),
        ("batch_response_tokens_mean", "tokens", "env", "Mean length of the last step's responses."),
        ("batch_tokens", "tokens", "", "Of the last step."),
        ("batch_rollouts", "rollouts", "", "Of the last step."),
        ("batch_groups", "groups", "", "Of the last step."),
        ("batch_fill_ratio", "ratio", "", "Share of the last step's capacity that holds tokens."),
        ("last_step_time_seconds", "Unix seconds", "", "When the last step was committed, by the server's clock."),
    ),
    *_metrics(
        "counter",
        ("rollouts_received_total", "rollouts", "env", "Pushed, by the ledger."),
        ("tokens_received_total", "tokens", "env", "Pushed, by the ledger."),
        ("rollouts_trained_total", "rollouts", "env", "Trained, by the ledger."),
        ("tokens_trained_total", "tokens", "env", "Trained, by the ledger."),
        ("rollouts_dropped_total", "rollouts", "env reason", "Dropped, by the ledger."),
        ("tokens_dropped_total", "tokens", "env reason", "Dropped, by the ledger."),
        ("rollouts_damaged_total", "rollouts", "", "Missing or damaged when they were pulled, by the ledger."),
        ("pushes_lost_total", "pushes", "", "Pushes that producers know are missing, by the ledger."),
        ("groups_dropped_total", "groups", "env reason", "Dropped, or refused as late, since this process started."),
        ("groups_received_total", "groups", "env", "Groups, or parts of one, since this process leads."),
        ("tokens_generated_total", "tokens", "env", "Tokens of the same that can be trained."),
        ("batches_total", "steps", "closed_by", "Committed since this process leads, by the rule that closed them."),
    ),
    *_recorded(
        "histogram",
        ("age_versions", "versions", "env", "buffer/age", "Age of each trained rollout, in the step that trains it."),
        ("wait_seconds", "seconds", "env", "buffer/wait", "From the push to the step, of each push that a step took."),
        (
            "response_tokens",
            "tokens",
            "env",
            "buffer/response_tokens",
            "Tokens behind the prompt, of each rollout that a step took.",
        ),
        (
            "packed_rollout_tokens",
            "tokens",
            "env",
            "buffer/packed_tokens",
            "Length of each rollout that a step took.",
        ),
        (
            "dropped_rollout_tokens",
            "tokens",
            "env",
            "buffer/dropped_tokens",
            "Length of each rollout of a push that was dropped whole.",
        ),
        (
            "prompt_reward",
            "reward",
            "env",
            "buffer/prompt_reward",
            "Mean reward of each pushed group: how hard prompts are.",
        ),
    ),
    *_metrics(
        "histogram",
        ("batch_build_seconds", "seconds", "", "From the first look at the pool to the commit."),
    ),
    *SERVER,
)
"""Metrics of `serve`."""
WORKER = (
    *_metrics(
        "gauge",
        ("worker_policy_version", "version", "env", "Version that samples; -1 before the first."),
        ("worker_waiting", "0 or 1", "env", "1 while it has nothing to sample."),
        ("worker_reward_mean", "reward", "env", "Mean over its last 256 groups."),
    ),
    *_metrics(
        "counter",
        ("worker_groups_total", "groups", "env", "Pushed."),
        ("worker_rollouts_total", "rollouts", "env", "Pushed."),
        ("worker_tokens_total", "tokens", "env", "Pushed."),
        ("worker_failed_groups_total", "groups", "env kind", "Given up, by the name of the exception."),
        ("worker_prompts_total", "groups", "env difficulty", "Pushed: all rollouts solved it, all failed, or mixed."),
        ("worker_troubles_total", "troubles", "env", "Troubles of any kind that it went on from."),
    ),
    *_metrics(
        "histogram",
        ("worker_group_seconds", "seconds", "env", "From the prompt of a group to its push."),
        ("worker_load_seconds", "seconds", "env", "Loading a policy version."),
    ),
    *SERVER,
)
"""Metrics of a worker."""
SCORE = (
    *_metrics(
        "counter",
        ("score_groups_total", "groups", "env", "Scored, and pushed in their own place."),
        ("score_rollouts_total", "rollouts", "env", "Of the same."),
        ("score_tokens_total", "tokens", "env", "Of the same."),
        ("score_late_groups_total", "groups", "", "Another scorer was faster, or the group had been dropped."),
        ("score_troubles_total", "troubles", "", "Groups that could not be scored at a try."),
    ),
    *_metrics("histogram", ("score_group_seconds", "seconds", "env", "From the claim of a group to its push.")),
    *SERVER,
)
"""Metrics of a scorer."""
TRAIN = tuple(
    Metric(name=each.name, kind=each.kind, unit="", labels=each.labels, meaning=each.meaning, record=field)
    for field, each in metrics_of(StepRecord)
)
"""Metrics of the trainer's rank 0."""
METRICS: Mapping[str, tuple[Metric, ...]] = MappingProxyType(
    {"serve": SERVE, "worker": WORKER, "score": SCORE, "train": TRAIN}
)
"""Kind of a process -> what it answers."""
