"""Settings that are each fine and together can never make a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rlbuffer.config.memory_needs import Forecast, capacity_bytes, does_not_fit, steps_at_once
from rlbuffer.config.mistakes import Mistake, never, placed
from rlbuffer.config.refusal import Places
from rlbuffer.config.sampling import LEAST_TEMPERATURE
from rlbuffer.config.settings import (
    RunSettings,
    ScoreSettings,
    WorkerSettings,
)
from rlbuffer.errors import ConfigError
from rlbuffer.records.columns import COLUMN_NAME, REQUIRED_COLUMNS
from rlbuffer.state.text import nearest

NOWHERE = ("0.0.0.0", "::")
"""Addresses to listen at, and not to ask."""


def together(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """Every mistake that can be seen in the settings alone."""
    yield from _addresses(settings, places)
    yield from _gpus(settings, places)
    yield from _nucleus(settings, places)
    yield from _temperatures(settings, places)
    yield from _publishing(settings, places)
    yield from _group_sizes(settings, places)
    yield from _remainder(settings, places)
    yield from _scorers(settings, places)
    yield from _memory(settings, places)
    yield from _trainer(settings, places)
    yield from _deterministic(settings, places)


Checks = Callable[[RunSettings, Places, Path | None], Iterator[Mistake]]
"""Further checks: of (settings, where they came from, their file)."""


def _nucleus(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """vLLM gives logprobs over the whole vocabulary with the temperature, or under a nucleus, and not both."""
    for name, options in settings.worker.items():
        if options.sampler != "transformers" and options.top_p < 1 and options.temperature != 1:
            pair = f"worker.{name}.top_p", f"worker.{name}.temperature"
            yield Mistake(
                f"worker.{name}.top_p = {options.top_p:g} needs temperature = 1 with sampler {options.sampler}, not "
                f"{options.temperature:g}: vLLM would give logprobs of what the nucleus leaves, and every ratio would "
                f"be wrong by its mass ({places(*pair)}).",
                pair,
            )


def _temperatures(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """vLLM samples with its own least temperature where less is asked for."""
    for name, options in settings.worker.items():
        if options.sampler != "transformers" and options.temperature < LEAST_TEMPERATURE:
            setting = f"worker.{name}.temperature"
            yield Mistake(
                f"{setting} = {options.temperature:g} with sampler {options.sampler}: vLLM would sample at "
                f"{LEAST_TEMPERATURE:g} without a word ({places(setting)}).",
                (setting,),
            )


def _deterministic(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """The settings that make two runs of the same settings differ."""
    if not settings.deterministic:
        return
    batcher, workers = settings.batcher, settings.worker
    wrong: list[tuple[str, str]] = []
    if (count := sum(options.replicas for options in workers.values())) > 1:
        wrong.append(("worker", f"{count} workers must be one: of several nobody knows whose group comes first"))
    ages = {f"batcher.envs.{env}.max_age": override.max_age for env, override in batcher.envs.items()}
    for name, value in ({"batcher.max_age": batcher.max_age, "batcher.lookahead": batcher.lookahead} | ages).items():
        if value:
            wrong.append((name, f"{name} = {value} must be 0"))
    for name in ("fill_timeout_seconds", "max_age_seconds"):
        if (seconds := getattr(batcher, name)) is not None:
            wrong.append((f"batcher.{name}", f"batcher.{name} = {seconds:g} must go: it goes by the clock"))
    for worker, options in workers.items():
        name, groups = f"worker.{worker}.groups_per_batch", options.groups_per_batch
        if groups != batcher.step_groups:
            wrong.append((name, f"{name} = {groups} must be batcher.step_groups = {batcher.step_groups}"))
        if options.sampler != "transformers":
            name = f"worker.{worker}.sampler"
            wrong.append((name, f"{name} = {options.sampler!r} must be 'transformers': engines batch what comes first"))
    wrong += [(f"eval.{name}", f"eval.{name} must go: it draws from the worker's sampler") for name in settings.eval]
    for name, text in wrong:
        yield Mistake(f"deterministic = true: {text} ({places(name, 'deterministic')}).", (name, "deterministic"))


def _addresses(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    from rlbuffer.config.addresses import host_of, is_url, parse_listen, wrong_url
    from rlbuffer.config.memory_needs import check_memory

    weights = settings.weights
    try:
        check_memory(settings.server)
    except ConfigError as error:
        yield placed(error, places)
    if weights.listen:
        try:
            if parse_listen(weights.listen)[1] == 0:
                text = f"weights.listen = {weights.listen!r}: port 0 is another one at every start, and nobody knows it"
                raise ConfigError(text, setting="weights.listen")
        except ConfigError as error:
            yield placed(error, places)
    if settings.metrics.listen:
        try:
            parse_listen(settings.metrics.listen, setting="metrics.listen")
        except ConfigError as error:
            yield placed(error, places)
    for name, url in [("weights.url", weights.url)] * bool(weights.url):
        if not is_url(url):
            yield placed(ConfigError(f"{name} = {url!r} must begin with http:// or https://", setting=name), places)
        elif wrong_url(url):
            yield placed(ConfigError(f"{name} = {url!r} {wrong_url(url)}", setting=name), places)
        elif host_of(url) in NOWHERE:
            text = f"{name} = {url!r} is no address that others can reach: write the host's name"
            yield placed(ConfigError(text, setting=name), places)


def _publishing(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    # Between two published versions the workers' newest weights are up to publish.every - 1 versions old already.
    behind = settings.trainer.publish.every - 1
    batcher = settings.batcher
    ages = [("batcher.max_age", batcher.max_age)] + [
        (f"batcher.envs.{env}.max_age", override.max_age)
        for env, override in batcher.envs.items()
        if override.max_age is not None
    ]
    for name, age in ages:
        if behind > age:
            yield never(
                f"trainer.publish.every = {settings.trainer.publish.every} leaves the newest weights up to {behind} "
                f"versions behind, but {name.removeprefix('batcher.')} = {age}",
                places,
                "trainer.publish.every",
                name,
            )


def _group_sizes(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    for worker, options in settings.worker.items():
        required = settings.batcher.for_env(options.env).min_group_size
        if required > options.group_size:
            override = settings.batcher.envs.get(options.env)
            own = override is not None and override.min_group_size is not None
            name = f"batcher.envs.{options.env}.min_group_size" if own else "batcher.min_group_size"
            yield never(
                f"min_group_size = {required}, but the workers' group_size = {options.group_size}",
                places,
                name,
                f"worker.{worker}.group_size",
            )


def _gpus(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    kinds: list[tuple[str, WorkerSettings | ScoreSettings]] = [(f"worker.{n}", o) for n, o in settings.worker.items()]
    for name, options in [*kinds, *((f"score.{n}", o) for n, o in settings.score.items())]:
        if len(options.gpus) % options.replicas:
            pair = f"{name}.gpus", f"{name}.replicas"
            yield Mistake(
                f"{name}.gpus = {list(options.gpus)} cannot be dealt equally over {options.replicas} replicas "
                f"({places(*pair)}).",
                pair,
            )
    trainer = settings.trainer
    if len(set(map(str, trainer.gpus))) < len(trainer.gpus):
        text = f"trainer.gpus = {list(trainer.gpus)} names a GPU twice: ranks need one each"
        yield placed(ConfigError(text, setting="trainer.gpus"), places)
    if trainer.gpus and len(trainer.gpus) < trainer.world_size and trainer.device != "cpu":
        pair = "trainer.gpus", "trainer.world_size"
        yield Mistake(
            f"trainer.gpus = {list(trainer.gpus)}: trainer.world_size = {trainer.world_size}, and each rank needs one "
            f"({places(*pair)}).",
            pair,
        )


def _remainder(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """A word that is nearly one that means something else."""
    near = nearest(settings.batcher.remainder, ("proportional", "equal"), cutoff=0.75)
    if near and settings.batcher.remainder != near:
        text = f"batcher.remainder = {settings.batcher.remainder!r} is no env here. Did you mean {near}?"
        yield placed(ConfigError(text, setting="batcher.remainder"), places)


def _scorers(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """Mistakes between the columns that scorers add and those that groups need."""
    known = "reward, rewards.NAME"
    for name, scoring in settings.score.items():
        setting = f"score.{name}"
        if scoring.model and (scoring.column in REQUIRED_COLUMNS or not COLUMN_NAME.match(scoring.column)):
            text = f"{setting}.column = {scoring.column!r} is no name of a further column"
            yield placed(ConfigError(text, setting=f"{setting}.column"), places)
        if scoring.gives and not scoring.reward:
            text = f"{setting}.gives does nothing: it says what {setting}.reward adds, which is not set"
            yield placed(ConfigError(text, setting=f"{setting}.gives"), places)
        for gives in scoring.gives:
            if not _is_reward(gives):
                text = f"{setting}.gives: {gives!r} is none of {known}"
                yield placed(ConfigError(text, setting=f"{setting}.gives"), places)


def _is_reward(name: str) -> bool:
    return name == "reward" or (name.startswith("rewards.") and len(name) > len("rewards."))


def _memory(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """Refuses an embedded server that cannot hold the steps that must be there at once."""
    from rlbuffer.config.memory_needs import memory_bytes

    if settings.redis_url:
        return
    try:
        limit = memory_bytes(settings.server)
    except ConfigError:
        return  # said already
    world_size = settings.trainer.world_size
    size = capacity_bytes(settings.batcher, world_size)
    if not limit or size is None:
        return
    forecast = Forecast(step_bytes=size, steps=steps_at_once(settings.batcher), limit=limit)
    if not forecast.fits:
        names = "server.maxmemory", "batcher.row_tokens"
        text = does_not_fit(forecast, settings.batcher, world_size=world_size)
        yield Mistake(f"{text} ({places(*names)}).", names)


def _trainer(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    from rlbuffer.config import schedules

    for mistake in schedules.mistakes(settings.trainer):
        yield placed(mistake, places)
    if settings.trainer.share_prompts and settings.trainer.layout == "padded":
        pair = "trainer.share_prompts", "trainer.layout"
        yield Mistake(
            f'{pair[0]} = true needs {pair[1]} = "packed": padded rows are computed whole ({places(*pair)}).', pair
        )
