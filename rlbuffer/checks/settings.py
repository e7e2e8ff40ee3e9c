"""Settings that are each fine and cannot work together, or hardly as meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlbuffer.checks.check import Context, Finding, check, failure, refused, warning
from rlbuffer.config import losses
from rlbuffer.config.batcher import compares
from rlbuffer.config.fractions import budgets_at
from rlbuffer.config.losses import columns_of, needs_advantage
from rlbuffer.config.memory_needs import (
    LEAST_BYTES,
    does_not_fit,
    forecast_of,
    may_not_fit,
    memory_bytes,
    mib,
)
from rlbuffer.config.schedules import planned_updates
from rlbuffer.config.settings import RunSettings, ScoreSettings, WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.state.text import did_you_mean
from rlbuffer.store.keys import check_new_run

REMAINDERS = ("proportional", "equal")
"""Receivers of what budgets leave over that are no envs."""
LATE = 2**53
"""A step after every schedule of budgets has ended."""


@check(
    """batcher.min_group_size batcher.envs.NAME.min_group_size worker.NAME.group_size batcher.advantage
    batcher.envs.NAME.advantage""",
)
def group_size(c: Context) -> Iterator[Finding]:
    """A worker's group_size is at least the min_group_size of its env, and 2 where advantages compare rollouts."""
    batcher = c.settings.batcher
    for name, options in c.settings.worker.items():
        required, setting = batcher.for_env(options.env).min_group_size, f"worker.{name}.group_size"
        if required > options.group_size:
            override = batcher.envs.get(options.env)
            is_of_env = override is not None and override.min_group_size is not None
            least = f"batcher.envs.{options.env}.min_group_size" if is_of_env else "batcher.min_group_size"
            text = f"{least} = {required}, but {setting} = {options.group_size}: no group would ever be trained"
            yield failure(text, least, setting)
        elif options.group_size == 1 and needs_advantage(c.settings.trainer.loss):
            estimator, override = batcher.for_env(options.env).advantage, batcher.envs.get(options.env)
            is_of_env = override is not None and override.advantage is not None
            by = f"batcher.envs.{options.env}.advantage" if is_of_env else "batcher.advantage"
            if compares(estimator):
                text = f"{setting} = 1: {by} = {estimator!r} compares the rollouts of a group, so all advantages are 0"
                yield warning(text, setting, by, fix='Sample larger groups, or take advantage = "reinforce"')


@check("worker.NAME.env worker.NAME.env_options")
def same_env(c: Context) -> Iterator[Finding]:
    """Workers of one env sample the same prompts.

    A ticket's number is a prompt: of two kinds of worker it must be the same one.
    """
    first: dict[str, tuple[str, WorkerSettings]] = {}
    for name, options in c.settings.worker.items():
        env = _name_of(options)
        other, same = first.setdefault(env or f"worker {name}", (name, options))
        if (same.env, same.env_options) != (options.env, options.env_options):
            text = f"worker.{other} and worker.{name} both sample {env}, with other options: a ticket's number is"
            fix = "Give one another name in its env_options"
            yield warning(f"{text} another prompt in each", f"worker.{name}.env_options", f"worker.{name}.env", fix=fix)


@check("run", parts=("run", "serve"))
def run_name(c: Context) -> Iterator[Finding]:
    """The name of a run begins with no dash: commands take such a name for an option."""
    try:
        check_new_run(c.settings.run)
    except ConfigError as error:
        yield refused(error)


# -- what is trained ---------------------------------------------------------------------------------------------------
@check("trainer.publish.every batcher.max_age batcher.envs.NAME.max_age")
def publish_age(c: Context) -> Iterator[Finding]:
    """At most max_age + 1 steps lie between two published versions: the newest weights would be too old else."""
    batcher, every = c.settings.batcher, c.settings.trainer.publish.every
    ages = {f"batcher.envs.{env}.max_age": o.max_age for env, o in batcher.envs.items() if o.max_age is not None}
    for name, age in {"batcher.max_age": batcher.max_age, **ages}.items():
        if every - 1 > age:
            text = f"trainer.publish.every = {every} leaves the newest weights up to {every - 1} versions behind"
            why = f"but {name} = {age}: nothing would ever be trained"
            yield failure(f"{text}, {why}", "trainer.publish.every", name)


@check("batcher.budgets batcher.envs batcher.remainder score.NAME.envs worker.NAME.env")
def env_names(c: Context) -> Iterator[Finding]:
    """An env that settings name is sampled, and one without a budget is left a share."""
    batcher = c.settings.batcher
    names = {f"worker.{name}.env": _name_of(options) for name, options in c.settings.worker.items()}
    named = [(f"batcher.budgets.{env}", env) for env in batcher.budgets]
    named += [(f"batcher.envs.{env}", env) for env in batcher.envs]
    named += [("batcher.remainder", batcher.remainder)] * (batcher.remainder not in REMAINDERS)
    named += [(f"score.{name}.envs", env) for name, options in c.settings.score.items() for env in options.envs]
    for setting, env in named if names and None not in names.values() else ():
        if env not in names.values():
            there, other = [*REMAINDERS, *filter(None, names.values())], "Correct it, or start a worker elsewhere"
            fix = did_you_mean(env, there, otherwise=other).strip()
            yield warning(f"{setting}: no worker here samples {env}", setting, fix=fix)
    if batcher.budgets and sum(budgets_at(batcher.budgets, LATE).values()) > 1 - 1e-9:
        for setting, sampled in names.items():
            if sampled is not None and sampled not in batcher.budgets:
                text = f"{setting}: {sampled} has no budget while the others take all of it"
                yield warning(f"{text}: its groups will never train", setting, "batcher.budgets")


@check(
    """trainer.loss.name trainer.loss.old_logprobs trainer.loss.options trainer.loss.correction batcher.max_age
    batcher.row_tokens""",
)
def loss(c: Context) -> Iterator[Finding]:
    """The loss's gradient is the policy's."""
    chosen, batcher = c.settings.trainer.loss, c.settings.batcher
    told = losses.doubts(chosen, largest_age=batcher.largest_max_age, row_tokens=batcher.row_tokens)
    for sentence, others in told:
        names = ("trainer.loss.name", "trainer.loss.old_logprobs", *others)
        yield warning(f"trainer.loss.name = {chosen.name!r}: {sentence}", *names)


@check("gateway.engines trainer.lora.rank trainer.lora.path")
def agents(c: Context) -> Iterator[Finding]:
    """Agents are answered by the weights that are trained."""
    lora = c.settings.trainer.lora
    if c.settings.gateway.engines and lora.is_used:
        text = "a gateway's engines would sample from the base model of the adapter that is trained"
        fix = "Agents are answered by whole weights alone: train without trainer.lora, or leave gateway.engines out."
        yield failure(text, "trainer.lora.path" if lora.path else "trainer.lora.rank", "gateway.engines", fix=fix)


@check("trainer.optimizer.learning_rate model.path trainer.lora.rank trainer.lora.path", parts=["train"])
def learning_rate(c: Context) -> Iterator[Finding]:
    """A model that was trained before is trained at a rate that somebody chose: the default is a fresh model's."""
    trainer, setting = c.settings.trainer, "trainer.optimizer.learning_rate"
    is_chosen = "learning_rate" in trainer.optimizer.model_fields_set
    if c.settings.model.path and not is_chosen and not trainer.lora.is_used:
        text = (
            f"{setting} = {trainer.optimizer.learning_rate:g} (default) is for a fresh model, and model.path names one"
        )
        fix = "Set it: 1e-6 to 1e-5 is usual for all weights of a pretrained model."
        yield warning(f"{text} that was trained before", setting, "model.path", fix=fix)


@check("eval.NAME.samples eval.NAME.temperature")
def samples(c: Context) -> Iterator[Finding]:
    """Several rollouts of a prompt can differ."""
    for name, options in c.settings.eval.items():
        if options.samples > 1 and options.temperature == 0:
            text = f"eval.{name}.samples = {options.samples} at temperature 0: the rollouts of a prompt are the same"
            fix = "Set its temperature, unless what the env answers is random."
            yield warning(text, f"eval.{name}.samples", f"eval.{name}.temperature", fix=fix)


@check("trainer.optimizer.decay_from_update trainer.optimizer.warmup_updates trainer.steps")
def schedule(c: Context) -> Iterator[Finding]:
    """The warm-up ends, and schedule wsd_sqrt falls, before the run ends."""
    optimizer, planned = c.settings.trainer.optimizer, planned_updates(c.settings.trainer)
    if optimizer.schedule == "wsd_sqrt" and optimizer.decay_from_update >= planned:
        setting = "trainer.optimizer.decay_from_update"
        text = f"{setting} = {optimizer.decay_from_update}, but only {planned:.0f} updates are planned"
        yield failure(f"{text}: the rate would never fall", setting, "trainer.steps")
    elif optimizer.warmup_updates >= planned:
        setting = "trainer.optimizer.warmup_updates"
        text = f"{setting} = {optimizer.warmup_updates}, but only {planned:.0f} updates are planned"
        yield warning(
            f"{text}: the rate rises to the end, and learning_rate is met there at most", setting, "trainer.steps"
        )


@check(
    """deterministic batcher.max_age batcher.envs.NAME.max_age batcher.lookahead batcher.step_groups
    batcher.fill_timeout_seconds batcher.max_age_seconds worker.NAME.groups_in_flight worker.NAME.replicas
    worker.NAME.env eval.NAME.env""",
)
def deterministic(c: Context) -> Iterator[Finding]:
    """A deterministic run is on policy, with one worker, and a step holds as many groups as it samples at once."""
    if not c.settings.deterministic:
        return
    batcher, workers = c.settings.batcher, c.settings.worker
    must: dict[str, Any] = {"batcher.max_age": 0, "batcher.lookahead": 0}
    must |= {f"batcher.envs.{env}.max_age": 0 for env in batcher.envs}
    must |= {"batcher.fill_timeout_seconds": None, "batcher.max_age_seconds": None}  # they go by the clock
    if not batcher.step_groups:
        text = "deterministic = true: batcher.step_groups = 0 must be as many groups as the worker samples at once"
        yield failure(text, "batcher.step_groups", "deterministic")
    must |= {f"worker.{name}.groups_in_flight": batcher.step_groups for name in workers if batcher.step_groups}
    must |= {f"worker.{name}.replicas": 1 for name in workers}
    values = dict(c.loaded.values())
    for name, value in must.items():
        if values[name] not in (value, None):
            what = "must not be set" if value is None else f"must be {value!r}"
            yield failure(f"deterministic = true: {name} = {values[name]!r} {what}", name, "deterministic")
    for section in (*(f"worker.{name}" for name in list(workers)[1:]), *(f"eval.{name}" for name in c.settings.eval)):
        yield failure(f"deterministic = true: {section} must go: one worker samples", f"{section}.env", "deterministic")


@check("trainer.loss.kl_beta trainer.loss.columns score.NAME.model worker.NAME.env")
def reference(c: Context) -> Iterator[Finding]:
    """With kl_beta above 0 groups need ref_logprobs, and a scorer adds them."""
    for name, worker in c.settings.worker.items():
        given = c.settings.needs_of(_name_of(worker) or worker.env)
        lacking = [column for column in columns_of(c.settings.trainer.loss) if column not in given]
        if lacking and ":" not in worker.env:
            setting = "trainer.loss.kl_beta" if c.settings.trainer.loss.kl_beta else "trainer.loss.columns"
            text = f"{setting} needs {lacking[0]}, and env {worker.env} gives none"
            yield failure(text, setting, f"worker.{name}.env", fix='Add a [score.NAME] with model = "initial"')


@check(
    """server.maxmemory batcher.row_tokens batcher.micro_batches_per_rank batcher.rows_per_micro_batch
    trainer.world_size batcher.lookahead batcher.max_age""",
)
def memory(c: Context) -> Iterator[Finding]:
    """The server's memory holds lookahead + max_age + 3 steps in 60 % of it, of full rows."""
    if not c.settings.redis_url:
        yield from too_small(c.settings, memory_bytes(c.settings.server))


def too_small(settings: RunSettings, limit: int) -> Iterator[Finding]:
    """A failure where a server of `limit` bytes cannot hold the run, and a warning where it may not; 0: it has no
    limit."""
    if 0 < limit < LEAST_BYTES:
        text = f"a server of {mib(limit)} (server.maxmemory) has no room for a run: an empty one takes about 2 MiB"
        yield failure(text, "server.maxmemory", fix="Give it 64 MiB or more")
        return
    forecast = forecast_of(settings, limit) if limit else None
    if forecast is None or forecast.fits:
        return
    if forecast.is_most:
        fix = "Look at its memory when steps are there (rlbuffer inspect); raise server.maxmemory where it grows"
        yield warning(may_not_fit(forecast, settings.batcher), "server.maxmemory", "batcher.row_tokens", fix=fix)
    else:
        text = does_not_fit(forecast, settings.batcher, world_size=settings.trainer.world_size)
        yield failure(text, "server.maxmemory", "batcher.row_tokens")


@check("trainer.gpus trainer.world_size worker.NAME.gpus worker.NAME.replicas score.NAME.gpus score.NAME.replicas")
def gpus(c: Context) -> Iterator[Finding]:
    """Every replica gets as many GPUs, and every rank one of its own."""
    trainer = c.settings.trainer
    kinds: list[tuple[str, WorkerSettings | ScoreSettings]] = []
    kinds += [(f"worker.{name}", options) for name, options in c.settings.worker.items()]
    kinds += [(f"score.{name}", options) for name, options in c.settings.score.items()]
    for name, options in kinds:
        if len(options.gpus) % options.replicas:
            text = f"{name}.gpus = {list(options.gpus)} cannot be dealt equally over {options.replicas} replicas"
            yield failure(text, f"{name}.gpus", f"{name}.replicas")
    if trainer.gpus and len(set(map(str, trainer.gpus))) < max(trainer.world_size, len(trainer.gpus)):
        text = f"trainer.gpus = {list(trainer.gpus)}: trainer.world_size = {trainer.world_size}"
        yield failure(f"{text}, and ranks need one each", "trainer.gpus", "trainer.world_size")


def _name_of(options: WorkerSettings) -> str | None:
    """Name of the env; None where it is not known before the env is made."""
    named = options.env_options.get("name")
    if isinstance(named, str) and named:
        return named
    return None if ":" in options.env else options.env
