"""Settings that work together, but hardly as meant: a sentence for each combination, which is shown as a warning."""

from __future__ import annotations

from collections.abc import Iterator

from rlbuffer.config import losses
from rlbuffer.config.fractions import budgets_at
from rlbuffer.config.gpus import shared_gpus
from rlbuffer.config.losses import needs_advantage
from rlbuffer.config.refusal import Places
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.state.text import plural

LATE = 2**53
"""A step after every schedule of budgets has ended."""


def doubts(settings: RunSettings, places: Places) -> tuple[str, ...]:
    """A sentence for each combination that works, but hardly as meant."""
    subjects = (
        *(_uses, _budgets, _temperatures, _updates, _unasked_weights),
        *(_losses, _envs_elsewhere, _one_env_twice, _wasted_rollouts, _idle_gpus, _idle_settings, _absent_weights),
    )
    return tuple(sentence for subject in subjects for sentence in subject(settings, places)) + tuple(
        f"{sentence}: they share its memory." for sentence in shared_gpus(settings)
    )


def _uses(settings: RunSettings, places: Places) -> Iterator[str]:
    batcher = settings.batcher
    oldest = max([batcher.max_age, *(o.max_age for o in batcher.envs.values() if o.max_age is not None)])
    if batcher.max_uses > oldest + 1:
        yield (
            f"batcher.max_uses = {batcher.max_uses} is never reached: with max_age = {oldest} a group is young enough "
            f"for {plural(oldest + 1, 'step')} ({places('batcher.max_uses', 'batcher.max_age')})."
        )


def _budgets(settings: RunSettings, places: Places) -> Iterator[str]:
    budgets, sampled = settings.batcher.budgets, _sampled(settings)
    for env in budgets:
        if sampled and env not in sampled:
            yield (
                f"batcher.budgets.{env}: no worker here samples {env}; steps wait until one elsewhere does "
                f"({places(f'batcher.budgets.{env}')})."
            )
    if budgets and sum(budgets_at(budgets, LATE).values()) > 1 - 1e-9:
        for worker, options in settings.worker.items():
            env_name = _name_of(options)
            if env_name is not None and env_name not in budgets:
                yield (
                    f"worker.{worker} samples {env_name}, which has no budget while the others take all of it: "
                    f"its groups will never train ({places(f'worker.{worker}.env', 'batcher.budgets')})."
                )


def _temperatures(settings: RunSettings, places: Places) -> Iterator[str]:
    for worker, options in settings.worker.items():
        if options.temperature != settings.trainer.temperature:
            yield (
                f"worker.{worker}.temperature = {options.temperature:g}, but trainer.temperature = "
                f"{settings.trainer.temperature:g}: the trainer would compare logprobs of two distributions "
                f"({places(f'worker.{worker}.temperature', 'trainer.temperature')})."
            )


def _updates(settings: RunSettings, places: Places) -> Iterator[str]:
    batcher, updates = settings.batcher, settings.trainer.optimizer.updates_per_pass
    planned = batcher.step_groups is None and batcher.step_rollouts is None
    if planned and updates > batcher.micro_batches_per_rank:
        yield (
            f"trainer.optimizer.updates_per_pass = {updates}, but a step has "
            f"{batcher.micro_batches_per_rank} micro-batches on a rank, and an update has at least one "
            f"({places('trainer.optimizer.updates_per_pass', 'batcher.micro_batches_per_rank')})."
        )


def _losses(settings: RunSettings, places: Places) -> Iterator[str]:
    loss = settings.trainer.loss
    for sentence, others in losses.doubts(loss, largest_age=settings.batcher.largest_max_age):
        names = ("trainer.loss.name", "trainer.loss.old_logprobs", *others)
        yield f"trainer.loss.name = {loss.name!r}: {sentence} ({places(*names)})."


def _unasked_weights(settings: RunSettings, places: Places) -> Iterator[str]:
    if settings.weights.listen and not settings.weights.url:
        yield (
            f"weights.listen is set and weights.url is not: versions are announced as paths, and nobody will ask the "
            f"server for them ({places('weights.listen')})."
        )


def _envs_elsewhere(settings: RunSettings, places: Places) -> Iterator[str]:
    """Settings of envs that no worker here samples."""
    batcher, sampled = settings.batcher, _sampled(settings)
    overridden = [(f"batcher.envs.{env}", env) for env in batcher.envs]
    if batcher.remainder not in ("proportional", "equal"):
        overridden.append(("batcher.remainder", batcher.remainder))
    overridden += [(f"score.{name}.envs", env) for name, options in settings.score.items() for env in options.envs]
    for setting, env in overridden:
        if sampled and env not in sampled:
            yield f"{setting}: no worker here samples {env}, so it says nothing here ({places(setting)})."


def _one_env_twice(settings: RunSettings, places: Places) -> Iterator[str]:
    first: dict[str, tuple[str, WorkerSettings]] = {}
    for worker, options in settings.worker.items():
        env_name = _name_of(options)
        other, same = first.setdefault(env_name or f"worker {worker}", (worker, options))
        if (same.env, same.env_options) != (options.env, options.env_options):
            yield (
                f"worker.{other} and worker.{worker} both sample {env_name}, with other options: a ticket's number is "
                f"another prompt in each. Give one another name in its env_options "
                f"({places(f'worker.{worker}.env_options', f'worker.{worker}.env')})."
            )


def _wasted_rollouts(settings: RunSettings, places: Places) -> Iterator[str]:
    """Groups without an advantage, and rollouts that the batcher drops."""
    batcher = settings.batcher
    if batcher.flat != "keep" and not batcher.flat_by and not needs_advantage(settings.trainer.loss):
        which = "trainer.loss.kl_beta" if settings.trainer.loss.kl_beta else "trainer.loss.columns"
        yield (
            f"batcher.flat = {batcher.flat!r} drops nothing: with {which} a group teaches whatever its rewards are. "
            f"batcher.flat_by = 'reward' drops it by its rewards all the same ({places('batcher.flat', which)})."
        )
    for worker, options in settings.worker.items():
        if options.group_size == 1 and needs_advantage(settings.trainer.loss):
            yield (
                f"worker.{worker}.group_size = 1: advantages compare the rollouts of a group, so all of them are 0 "
                f"({places(f'worker.{worker}.group_size')})."
            )
        if options.max_new_tokens >= batcher.row_tokens and batcher.oversized == "drop":
            yield (
                f"worker.{worker}.max_new_tokens = {options.max_new_tokens}: what is longer than batcher.row_tokens = "
                f"{batcher.row_tokens} is dropped ({places(f'worker.{worker}.max_new_tokens', 'batcher.row_tokens')})."
            )


def _idle_gpus(settings: RunSettings, places: Places) -> Iterator[str]:
    kinds = [(f"worker.{n}", o.gpus, o.device) for n, o in settings.worker.items() if o.sampler == "transformers"]
    for name, gpus, device in [("trainer", settings.trainer.gpus, settings.trainer.device), *kinds]:
        if gpus and device == "cpu":
            pair = f"{name}.gpus", f"{name}.device"
            yield f"{name}.gpus = {list(gpus)} does nothing with device = cpu ({places(*pair)})."


def _idle_settings(settings: RunSettings, places: Places) -> Iterator[str]:
    trainer = settings.trainer
    optimizer, loss = trainer.optimizer, trainer.loss
    is_constant = optimizer.schedule == "constant"
    for setting, value, reader in (
        (
            "optimizer.stable_updates",
            optimizer.stable_updates and optimizer.schedule != "wsd_sqrt",
            "schedule = wsd_sqrt",
        ),
        ("optimizer.min_learning_rate", optimizer.min_learning_rate and is_constant, "another schedule"),
        ("loss.kl_estimator", loss.kl_estimator != "k3" and not loss.kl_beta, "kl_beta above 0"),
        ("lora", trainer.lora.targets != ("all-linear",) and not trainer.lora.rank, "lora.rank above 0"),
    ):
        if value:
            yield f"trainer.{setting} does nothing without {reader} ({places(f'trainer.{setting}')})."


def _absent_weights(settings: RunSettings, places: Places) -> Iterator[str]:
    weights = settings.weights
    if weights.url and not weights.listen:
        yield f"weights.url is set and weights.listen is not: another server must be there ({places('weights.url')})."


def _sampled(settings: RunSettings) -> set[str]:
    """Names of the envs that workers here sample; none where one is not known before the env is made."""
    names = {_name_of(options) for options in settings.worker.values()}
    return set() if None in names else {name for name in names if name is not None}


def _name_of(options: WorkerSettings) -> str | None:
    named = options.env_options.get("name")
    if isinstance(named, str) and named:
        return named
    return None if ":" in options.env else options.env
