"""Settings of workers that their env, once it is known, can never work with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlbuffer.config.losses import columns_of
from rlbuffer.config.mistakes import Mistake, never, placed
from rlbuffer.config.refusal import Places
from rlbuffer.config.settings import EvaluationSettings, RunSettings, WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.state.text import plural

PROMPTS = 16
"""Prompts of an env whose length is looked at; a rollout has at least one token more than its prompt."""


def with_envs(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """Every mistake that only the envs show: requests, lengths of prompts, columns that none gives."""
    if not settings.worker and not settings.eval:
        return  # commands that look need no envs, and their modules take a while
    yield from _requests(settings, places)
    yield from _rows(settings, places)
    yield from _references(settings, places)


def _requests(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """Requests of a verifiers env's agents that the worker's sampler would refuse in every rollout."""
    sections: list[tuple[str, WorkerSettings | EvaluationSettings, float]]
    sections = [(f"worker.{name}", options, options.top_p) for name, options in settings.worker.items()]
    sections += [(f"eval.{name}", evaluation, 1.0) for name, evaluation in settings.eval.items()]
    for section, options, top_p in sections:
        if options.env != "verifiers":
            continue
        from rlbuffer.worker.envs.gateway import refusal

        agents = options.env_options.get("agents")
        named = agents.items() if isinstance(agents, Mapping) else ()
        for name, given in (("agent", options.env_options.get("agent")), *((f"agents.{n}", a) for n, a in named)):
            sampling = given.get("sampling") if isinstance(given, Mapping) else None
            if not isinstance(sampling, Mapping):
                continue
            extra = sampling.get("extra_body")
            request = {**(extra if isinstance(extra, Mapping) else {}), **sampling}
            lengths = ("extra_body", "max_completion_tokens")
            request = {key: value for key, value in request.items() if value is not None and key not in lengths}
            if text := refusal(request, temperature=options.temperature, top_p=top_p):
                setting = f"{section}.env_options.{name}.sampling"
                yield Mistake(f"{setting}: {text} ({places(setting)}).", (setting,))


def _rows(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    # Only built-in envs are asked for a prompt: reading a config file runs nobody's code.
    from rlbuffer.worker.envs import BUILT_IN, make_env

    row_tokens = settings.batcher.row_tokens
    for worker, options in settings.worker.items():
        if options.env not in BUILT_IN:
            continue
        try:
            env = make_env(options.env, **options.env_options)
            shortest = 1 + min(len(env.prompt(number).tokens) for number in range(PROMPTS))
        except ConfigError as error:
            yield placed(error, places, f"worker.{worker}.env_options")
            continue
        except (TypeError, ValueError) as error:
            what = f"env {options.env} cannot be made with {dict(options.env_options)}: {error}"
            yield placed(ConfigError(what), places, f"worker.{worker}.env_options")
            continue
        if shortest > row_tokens:
            yield never(
                f"row_tokens = {row_tokens}, but the shortest rollout of {options.env} has {plural(shortest, 'token')}",
                places,
                "batcher.row_tokens",
                f"worker.{worker}.env",
            )


def _references(settings: RunSettings, places: Places) -> Iterator[Mistake]:
    """Without ref_logprobs nobody can train a rollout with a KL; of the envs here only the user's own may give them."""
    from rlbuffer.worker.envs import ADAPTERS, BUILT_IN

    for name, worker in settings.worker.items():
        if worker.env not in (*BUILT_IN, *ADAPTERS):
            continue
        named = worker.env_options.get("name")
        given = settings.needs_of(named if isinstance(named, str) else worker.env)
        for column in columns_of(settings.trainer.loss):
            if column in given:
                continue
            pair = "trainer.loss.kl_beta", f"worker.{name}"
            yield Mistake(
                f"trainer.loss.kl_beta = {settings.trainer.loss.kl_beta:g} needs {column}, and env {worker.env} "
                f'gives none: add a [score.NAME] with model = "initial" '
                f"({places(*pair)}).",
                pair,
            )
