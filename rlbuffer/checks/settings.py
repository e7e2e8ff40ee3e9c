"""Settings that are each fine and cannot work together, or hardly as meant."""

from __future__ import annotations

from collections.abc import Iterator

from rlbuffer.checks.check import Context, Finding, check, failure, refused, warning
from rlbuffer.config import losses, schedules
from rlbuffer.config.addresses import host_of, is_url, parse_listen, wrong_url
from rlbuffer.config.fractions import budgets_at
from rlbuffer.config.losses import columns_of, needs_advantage
from rlbuffer.config.memory_needs import Forecast, capacity_bytes, does_not_fit, memory_bytes, steps_at_once
from rlbuffer.config.sampling import LEAST_TEMPERATURE
from rlbuffer.config.settings import RunSettings, ScoreSettings, WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.records.columns import COLUMN_NAME, REQUIRED_COLUMNS
from rlbuffer.state.text import nearest

NOWHERE = ("0.0.0.0", "::")
"""Addresses to listen at, and not to ask."""
LATE = 2**53
"""A step after every schedule of budgets has ended."""


# -- sampling ----------------------------------------------------------------------------------------------------------
@check(
    "engine-sampling",
    "with vLLM a top_p below 1 needs temperature 1, and no temperature is below its least",
    *("worker.NAME.top_p", "worker.NAME.temperature", "worker.NAME.sampler"),
)
def engine_sampling(c: Context) -> Iterator[Finding]:
    """vLLM gives logprobs of the whole vocabulary with the temperature, or of what the nucleus leaves."""
    for name, options in c.settings.worker.items():
        if options.sampler == "transformers":
            continue
        setting = f"worker.{name}.temperature"
        if options.top_p < 1 and options.temperature != 1:
            text = f"worker.{name}.top_p = {options.top_p:g} with sampler {options.sampler} and temperature"
            why = "vLLM would give logprobs of what the nucleus leaves, and every ratio would be wrong by its mass"
            yield failure(
                f"{text} = {options.temperature:g}: {why}", f"worker.{name}.top_p", setting, fix="Set temperature = 1"
            )
        if options.temperature < LEAST_TEMPERATURE:
            text = f"{setting} = {options.temperature:g} with sampler {options.sampler}"
            yield failure(f"{text}: vLLM would sample at {LEAST_TEMPERATURE:g} without a word", setting)


@check("temperatures", "workers sample at the trainer's temperature", "worker.NAME.temperature", "trainer.temperature")
def temperatures(c: Context) -> Iterator[Finding]:
    """Logprobs of two temperatures are of two distributions."""
    own = c.settings.trainer.temperature
    for name, options in c.settings.worker.items():
        if options.temperature != own:
            text = f"worker.{name}.temperature = {options.temperature:g}, but trainer.temperature = {own:g}"
            why = "the trainer would compare logprobs of two distributions"
            yield warning(f"{text}: {why}", f"worker.{name}.temperature", "trainer.temperature")


@check(
    "group-size",
    "a worker's group_size is at least 2, and the min_group_size of its env",
    *("batcher.min_group_size", "batcher.envs.NAME.min_group_size", "worker.NAME.group_size"),
)
def group_size(c: Context) -> Iterator[Finding]:
    """Groups that are never trained, or teach nothing."""
    batcher = c.settings.batcher
    for name, options in c.settings.worker.items():
        required, setting = batcher.for_env(options.env).min_group_size, f"worker.{name}.group_size"
        if required > options.group_size:
            override = batcher.envs.get(options.env)
            own = override is not None and override.min_group_size is not None
            least = f"batcher.envs.{options.env}.min_group_size" if own else "batcher.min_group_size"
            text = f"{least} = {required}, but {setting} = {options.group_size}: no group would ever be trained"
            yield failure(text, least, setting)
        elif options.group_size == 1 and needs_advantage(c.settings.trainer.loss):
            yield warning(f"{setting} = 1: advantages compare the rollouts of a group, so all of them are 0", setting)


@check(
    "long-completions",
    "a completion fits into a row; longer ones are dropped",
    *("worker.NAME.max_new_tokens", "batcher.row_tokens"),
)
def long_completions(c: Context) -> Iterator[Finding]:
    """Rollouts that the batcher drops."""
    batcher = c.settings.batcher
    for name, options in c.settings.worker.items():
        if options.max_new_tokens >= batcher.row_tokens and batcher.oversized == "drop":
            setting = f"worker.{name}.max_new_tokens"
            text = f"{setting} = {options.max_new_tokens}: what is longer than batcher.row_tokens is dropped"
            yield warning(f"{text}, and that is {batcher.row_tokens}", setting, "batcher.row_tokens")


@check("same-env", "workers of one env sample the same prompts", "worker.NAME.env", "worker.NAME.env_options")
def same_env(c: Context) -> Iterator[Finding]:
    """A ticket's number is a prompt: of two kinds of worker it must be the same one."""
    first: dict[str, tuple[str, WorkerSettings]] = {}
    for name, options in c.settings.worker.items():
        env = _name_of(options)
        other, same = first.setdefault(env or f"worker {name}", (name, options))
        if (same.env, same.env_options) != (options.env, options.env_options):
            text = f"worker.{other} and worker.{name} both sample {env}, with other options: a ticket's number is"
            fix = "Give one another name in its env_options"
            yield warning(f"{text} another prompt in each", f"worker.{name}.env_options", f"worker.{name}.env", fix=fix)


# -- what is trained ---------------------------------------------------------------------------------------------------
@check(
    "publish-age",
    "publish.every is at most max_age + 1: the newest weights would be too old when they are published",
    *("trainer.publish.every", "batcher.max_age", "batcher.envs.NAME.max_age"),
)
def publish_age(c: Context) -> Iterator[Finding]:
    """Between two published versions the newest weights are up to publish.every - 1 versions old already."""
    batcher, every = c.settings.batcher, c.settings.trainer.publish.every
    ages = {f"batcher.envs.{env}.max_age": o.max_age for env, o in batcher.envs.items() if o.max_age is not None}
    for name, age in {"batcher.max_age": batcher.max_age, **ages}.items():
        if every - 1 > age:
            text = f"trainer.publish.every = {every} leaves the newest weights up to {every - 1} versions behind"
            why = f"but {name} = {age}: nothing would ever be trained"
            yield failure(f"{text}, {why}", "trainer.publish.every", name)


@check(
    "env-names",
    "an env that settings name is sampled, and one without a budget is left a share",
    *("batcher.budgets", "batcher.envs", "batcher.remainder", "score.NAME.envs", "worker.NAME.env"),
)
def env_names(c: Context) -> Iterator[Finding]:
    """Names of envs that no worker here has; they may be sampled elsewhere."""
    batcher = c.settings.batcher
    near = nearest(batcher.remainder, ("proportional", "equal"), cutoff=0.75)
    if near and batcher.remainder != near:
        text = f"batcher.remainder = {batcher.remainder!r} is no env here"
        yield failure(text, "batcher.remainder", fix=f"Did you mean {near}?")
        return
    names = {_name_of(options) for options in c.settings.worker.values()}
    named = [(f"batcher.budgets.{env}", env) for env in batcher.budgets]
    named += [(f"batcher.envs.{env}", env) for env in batcher.envs]
    named += [("batcher.remainder", batcher.remainder)] * (batcher.remainder not in ("proportional", "equal"))
    named += [(f"score.{name}.envs", env) for name, options in c.settings.score.items() for env in options.envs]
    for setting, env in named if names and None not in names else ():
        if env not in names:
            yield warning(f"{setting}: no worker here samples {env}", setting, fix="Correct it, or start one elsewhere")
    if batcher.budgets and sum(budgets_at(batcher.budgets, LATE).values()) > 1 - 1e-9:
        for name, options in c.settings.worker.items():
            env_name = _name_of(options)
            if env_name is not None and env_name not in batcher.budgets:
                text = f"worker.{name} samples {env_name}, which has no budget while the others take all of it"
                yield warning(f"{text}: its groups will never train", f"worker.{name}.env", "batcher.budgets")


@check(
    "updates",
    "an update has a micro-batch at least",
    *("trainer.optimizer.updates_per_pass", "batcher.micro_batches_per_rank"),
)
def updates(c: Context) -> Iterator[Finding]:
    """Fewer updates than were asked for."""
    batcher, count = c.settings.batcher, c.settings.trainer.optimizer.updates_per_pass
    is_planned = batcher.step_groups is None and batcher.step_rollouts is None
    if is_planned and count > batcher.micro_batches_per_rank:
        names = "trainer.optimizer.updates_per_pass", "batcher.micro_batches_per_rank"
        text = (
            f"{names[0]} = {count}, but {names[1]} = {batcher.micro_batches_per_rank}, and an update has at least one"
        )
        yield warning(text, *names)


@check(
    "loss",
    "the loss's gradient is the policy's",
    *("trainer.loss.name", "trainer.loss.old_logprobs", "trainer.loss.options", "batcher.max_age"),
)
def loss(c: Context) -> Iterator[Finding]:
    """Losses whose gradient points elsewhere, or hardly anywhere."""
    chosen = c.settings.trainer.loss
    for sentence, others in losses.doubts(chosen, largest_age=c.settings.batcher.largest_max_age):
        names = ("trainer.loss.name", "trainer.loss.old_logprobs", *others)
        yield warning(f"trainer.loss.name = {chosen.name!r}: {sentence}", *names)


@check(
    "learning-rate",
    "min_learning_rate is at most learning_rate, and wsd_sqrt has a stable part and an end",
    *("trainer.optimizer.min_learning_rate", "trainer.optimizer.learning_rate", "trainer.optimizer.stable_updates"),
)
def learning_rate(c: Context) -> Iterator[Finding]:
    """Schedules that cannot be meant."""
    yield from map(refused, schedules.mistakes(c.settings.trainer))


@check("shared-prompts", "prompts are shared in packed rows only", "trainer.share_prompts", "trainer.layout")
def shared_prompts(c: Context) -> Iterator[Finding]:
    """Padded rows are computed whole."""
    if c.settings.trainer.share_prompts and c.settings.trainer.layout == "padded":
        text = 'trainer.share_prompts = true needs trainer.layout = "packed": padded rows are computed whole'
        yield failure(text, "trainer.share_prompts", "trainer.layout")


@check(
    "deterministic",
    "deterministic: on policy, one worker, a step holds as many groups as it samples at once",
    *("deterministic", "batcher.max_age", "batcher.envs.NAME.max_age", "batcher.lookahead", "batcher.step_groups"),
    *("batcher.fill_timeout_seconds", "batcher.max_age_seconds", "worker.NAME.groups_per_batch"),
    *("worker.NAME.sampler", "worker.NAME.replicas", "eval.NAME.env"),
)
def deterministic(c: Context) -> Iterator[Finding]:
    """The settings that make two runs of the same settings differ."""
    if not c.settings.deterministic:
        return
    batcher, workers = c.settings.batcher, c.settings.worker
    wrong: list[tuple[str, str]] = []
    if (count := sum(options.replicas for options in workers.values())) > 1:
        wrong.append((f"worker.{next(iter(workers))}.replicas", f"{count} workers must be one"))
    ages = {f"batcher.envs.{env}.max_age": override.max_age for env, override in batcher.envs.items()}
    for name, value in ({"batcher.max_age": batcher.max_age, "batcher.lookahead": batcher.lookahead} | ages).items():
        if value:
            wrong.append((name, f"{name} = {value} must be 0"))
    for name in ("batcher.fill_timeout_seconds", "batcher.max_age_seconds"):
        if (seconds := getattr(batcher, name.partition(".")[2])) is not None:
            wrong.append((name, f"{name} = {seconds:g} must go: it goes by the clock"))
    for worker, options in workers.items():
        name, groups = f"worker.{worker}.groups_per_batch", options.groups_per_batch
        if groups != batcher.step_groups:
            wrong.append((name, f"{name} = {groups} must be batcher.step_groups = {batcher.step_groups}"))
        if options.sampler != "transformers":
            name = f"worker.{worker}.sampler"
            wrong.append((name, f"{name} = {options.sampler!r} must be 'transformers': engines batch what comes first"))
    wrong += [(f"eval.{n}.env", f"eval.{n} must go: it draws from the worker's sampler") for n in c.settings.eval]
    for name, text in wrong:
        yield failure(f"deterministic = true: {text}", name, "deterministic")


# -- scorers -----------------------------------------------------------------------------------------------------------
@check(
    "scorers",
    "a scorer adds what groups can need",
    *("score.NAME.model", "score.NAME.column", "score.NAME.reward", "score.NAME.gives"),
)
def scorers(c: Context) -> Iterator[Finding]:
    """Names of columns and rewards that nobody reads."""
    for name, scoring in c.settings.score.items():
        column, gives = f"score.{name}.column", f"score.{name}.gives"
        if scoring.model and (scoring.column in REQUIRED_COLUMNS or not COLUMN_NAME.match(scoring.column)):
            yield failure(f"{column} = {scoring.column!r} is no name of a further column", column)
        if scoring.gives and not scoring.reward:
            yield failure(f"{gives} says what score.{name}.reward adds, which is not set", gives)
        for given in scoring.gives:
            if given != "reward" and not (given.startswith("rewards.") and len(given) > len("rewards.")):
                yield failure(f"{gives}: {given!r} is none of reward, rewards.NAME", gives)


@check(
    "reference",
    "with kl_beta above 0 groups need ref_logprobs, and a scorer adds them",
    *("trainer.loss.kl_beta", "trainer.loss.columns", "score.NAME.model", "worker.NAME.env"),
)
def reference(c: Context) -> Iterator[Finding]:
    """Columns that no rollout of an env here would have; an env of the user's own may give them."""
    for name, worker in c.settings.worker.items():
        given = c.settings.needs_of(_name_of(worker) or worker.env)
        lacking = [column for column in columns_of(c.settings.trainer.loss) if column not in given]
        if lacking and ":" not in worker.env:
            setting = "trainer.loss.kl_beta" if c.settings.trainer.loss.kl_beta else "trainer.loss.columns"
            text = f"{setting} needs {lacking[0]}, and env {worker.env} gives none"
            yield failure(text, setting, f"worker.{name}.env", fix='Add a [score.NAME] with model = "initial"')


# -- places ------------------------------------------------------------------------------------------------------------
@check("listen", "an address to listen at is HOST:PORT", "weights.listen", "metrics.listen")
def listen(c: Context) -> Iterator[Finding]:
    """Addresses that cannot be listened at."""
    for setting, address in (
        ("weights.listen", c.settings.weights.listen),
        ("metrics.listen", c.settings.metrics.listen),
    ):
        try:
            if address and parse_listen(address, setting)[1] == 0 and setting == "weights.listen":
                text = f"{setting} = {address!r}: port 0 is another one at every start, and nobody knows it"
                yield failure(text, setting)
        except ConfigError as error:
            yield refused(error)


@check("weights-url", "weights.url is an address that other hosts reach", "weights.url")
def weights_url(c: Context) -> Iterator[Finding]:
    """URLs that nobody can ask."""
    if not (url := c.settings.weights.url):
        return
    wrong = wrong_url(url) if is_url(url) else "must begin with http:// or https://"
    if not wrong and host_of(url) in NOWHERE:
        wrong = "is no address that others can reach: write the host's name"
    if wrong:
        yield failure(f"weights.url = {url!r} {wrong}", "weights.url")


@check(
    "memory",
    "lookahead + max_age + 3 full steps fit into 60 % of the server's memory",
    *("server.maxmemory", "batcher.row_tokens", "batcher.micro_batches_per_rank", "batcher.rows_per_micro_batch"),
    *("trainer.world_size", "batcher.lookahead", "batcher.max_age"),
)
def memory(c: Context) -> Iterator[Finding]:
    """An embedded server that cannot hold the steps that must be there at once."""
    try:
        limit = memory_bytes(c.settings.server)
    except ConfigError as error:
        yield refused(error)
        return
    if not c.settings.redis_url:
        yield from too_small(c.settings, limit)


def too_small(settings: RunSettings, limit: int) -> Iterator[Finding]:
    """A failure where a server of `limit` bytes cannot hold the run; 0: it has no limit."""
    world_size = settings.trainer.world_size
    size = capacity_bytes(settings.batcher, world_size)
    if limit and size is not None:
        forecast = Forecast(step_bytes=size, steps=steps_at_once(settings.batcher), limit=limit)
        if not forecast.fits:
            text = does_not_fit(forecast, settings.batcher, world_size=world_size)
            yield failure(text, "server.maxmemory", "batcher.row_tokens")


@check(
    "gpus",
    "every replica gets as many GPUs, and every rank one of its own; nothing is given GPUs that runs on the CPU",
    *("trainer.gpus", "trainer.world_size", "trainer.device", "worker.NAME.gpus", "worker.NAME.replicas"),
    *("worker.NAME.device", "score.NAME.gpus", "score.NAME.replicas"),
)
def gpus(c: Context) -> Iterator[Finding]:
    """GPUs that cannot be dealt out, are not used, or are used twice."""
    trainer = c.settings.trainer
    kinds: list[tuple[str, WorkerSettings | ScoreSettings]] = []
    kinds += [(f"worker.{name}", options) for name, options in c.settings.worker.items()]
    kinds += [(f"score.{name}", options) for name, options in c.settings.score.items()]
    owners = {str(gpu): ["trainer"] for gpu in trainer.gpus}
    for name, options in kinds:
        for gpu in dict.fromkeys(map(str, options.gpus)):
            owners.setdefault(gpu, []).append(name)
        if len(options.gpus) % options.replicas:
            text = f"{name}.gpus = {list(options.gpus)} cannot be dealt equally over {options.replicas} replicas"
            yield failure(text, f"{name}.gpus", f"{name}.replicas")
        if options.gpus and options.device == "cpu" and getattr(options, "sampler", "transformers") == "transformers":
            text = f"{name}.gpus = {list(options.gpus)} does nothing with device = cpu"
            yield warning(text, f"{name}.gpus", f"{name}.device")
    if trainer.gpus and trainer.device == "cpu":
        yield warning(f"trainer.gpus = {list(trainer.gpus)} does nothing with device = cpu", "trainer.gpus")
    elif trainer.gpus and len(set(map(str, trainer.gpus))) < max(trainer.world_size, len(trainer.gpus)):
        text = (
            f"trainer.gpus = {list(trainer.gpus)}: trainer.world_size = {trainer.world_size}, and ranks need one each"
        )
        yield failure(text, "trainer.gpus", "trainer.world_size")
    for gpu, names in owners.items():
        if len(names) > 1:
            text = f"GPU {gpu} is given to {' and '.join(names)}: they share its memory"
            yield warning(text, *(f"{name}.gpus" for name in names))


def _name_of(options: WorkerSettings) -> str | None:
    """Name of the env; None where it is not known before the env is made."""
    named = options.env_options.get("name")
    if isinstance(named, str) and named:
        return named
    return None if ":" in options.env else options.env
