"""Settings that are checked against each other, in words: what `rlbuffer config explain` names beside a setting.

The checks themselves are in :mod:`rlbuffer.config.cross_checks`, :mod:`rlbuffer.config.doubts` and
:mod:`rlbuffer.run.env_checks`; a test breaks each of these rules and sees that what is said of it names the settings.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold between settings; NAME stands for a name that the user chooses."""

    settings: tuple[str, ...]
    text: str
    is_strict: bool = True
    """Settings that break it are refused, not only warned of."""


RULES = (
    Rule(
        ("batcher.min_group_size", "batcher.envs.NAME.min_group_size", "worker.NAME.group_size"),
        "a worker's group_size is at least the min_group_size of its env",
    ),
    Rule(
        ("trainer.publish.every", "batcher.max_age", "batcher.envs.NAME.max_age"),
        "publish.every is at most max_age + 1: the newest weights would be too old when they are published",
    ),
    Rule(("batcher.row_tokens", "worker.NAME.env"), "the env's shortest rollout fits into a row"),
    Rule(
        (
            *("server.maxmemory", "batcher.row_tokens", "batcher.micro_batches_per_rank"),
            *("batcher.rows_per_micro_batch", "trainer.world_size", "batcher.lookahead", "batcher.max_age"),
        ),
        "lookahead + max_age + 3 full steps fit into 60 % of the server's memory",
    ),
    Rule(("batcher.step_rollouts", "batcher.step_groups"), "at most one of the two is set"),
    Rule(("model.path", "model.config"), "exactly one of the two is set"),
    Rule(("worker.NAME.gpus", "worker.NAME.replicas"), "every replica gets as many GPUs"),
    Rule(("trainer.gpus", "trainer.world_size"), "every rank has a GPU of its own"),
    Rule(
        ("worker.NAME.top_p", "worker.NAME.temperature", "worker.NAME.sampler"),
        "with vLLM a top_p below 1 needs temperature 1",
    ),
    Rule(
        ("trainer.optimizer.min_learning_rate", "trainer.optimizer.learning_rate"),
        "min_learning_rate is at most learning_rate",
    ),
    Rule(("trainer.share_prompts", "trainer.layout"), "prompts are shared in packed rows only"),
    Rule(("trainer.loss.kl_beta", "score.NAME.model"), "above 0, groups need ref_logprobs, and a scorer adds them"),
    Rule(
        (
            "deterministic",
            "batcher.max_age",
            "batcher.lookahead",
            "batcher.step_groups",
            "worker.NAME.groups_per_batch",
        ),
        "deterministic: both are 0, and a step holds as many groups as the one worker samples at once",
    ),
    Rule(
        ("worker.NAME.temperature", "trainer.temperature"),
        "equal, or logprobs of two distributions are compared",
        is_strict=False,
    ),
    Rule(
        ("batcher.budgets", "worker.NAME.env"),
        "an env with a budget has a worker, and one without is left a share",
        is_strict=False,
    ),
    Rule(
        ("batcher.max_uses", "batcher.max_age"),
        "max_uses is at most max_age + 1: a group is young enough for no more steps",
        is_strict=False,
    ),
    Rule(
        ("worker.NAME.max_new_tokens", "batcher.row_tokens"),
        "a completion fits into a row; longer ones are dropped",
        is_strict=False,
    ),
    Rule(
        ("trainer.optimizer.updates_per_pass", "batcher.micro_batches_per_rank"),
        "an update has a micro-batch at least",
        is_strict=False,
    ),
    Rule(("weights.listen", "weights.url"), "both are set, or none", is_strict=False),
)


def rules_of(setting: str) -> tuple[Rule, ...]:
    """The rules that name `setting`, a name of the settings' page such as ``worker.NAME.env``."""
    return tuple(rule for rule in RULES if setting in rule.settings)
