"""Whether an engine's logprobs are those that a trainer computes: at the run's temperature, of the whole vocabulary, or
of the tokens that `top_k` left.

Both are told by answers of one token behind odd prompts, where no model is sure of itself:

- A nucleus of 0.01 % holds one token. In the whole vocabulary its logprob is below 0; in the nucleus it is 0.
- Of one token that `top_k` left the logprob is 0, and below 0 in the whole vocabulary.
- At the temperatures 0.02 and 0.1 the same token is drawn, the likeliest. Its logprob is another one at each; without
  the temperature it is the same.

vLLM's ``raw_logprobs`` heed neither, its ``processed_logprobs`` both. At temperature 1 without a nucleus both are the
same, and nothing is asked. Only what is surely wrong is refused: a model that is sure of everything is let through.
"""

from __future__ import annotations

import numpy as np

from rlbuffer.errors import ConfigError, RequestFailed
from rlbuffer.gateway.engines.base import Engine, Rendering
from rlbuffer.gateway.request import AgentRequest
from rlbuffer.worker.samplers.base import Sampling

SETTING = "gateway.engines"
SIMPLEST = AgentRequest(messages=({"role": "user", "content": "x"},))
"""A conversation that every template takes."""
PROMPTS = 8
NARROW = Sampling(max_new_tokens=1, top_p=1e-4)
ALONE = Sampling(max_new_tokens=1, top_k=1)
COLD, COOL = (Sampling(max_new_tokens=1, temperature=temperature) for temperature in (0.02, 0.1))
ZERO = 1e-6
"""Logprobs nearer to 0 are those of a token that has all of the probability."""
EQUAL = 1e-3
"""Logprobs nearer to each other are of one distribution, whatever else the engine computes at the same time."""
UNSURE = -0.02
"""Mean logprob below which a model is not sure."""
Drawn = list[tuple[int, float]]
"""Token and logprob behind each prompt."""


async def check_logprobs(engine: Engine, *, temperature: float, top_p: float, top_k: int = 0) -> None:
    """Tries an engine with what the run's settings need.

    Raises:
        ConfigError: its logprobs are others.
        RequestFailed, SamplerUnavailable: it does not answer.
    """
    if top_k:  # logprobs that heed it are vLLM's processed ones, or SGLang's of its sampling: with the temperature
        try:
            drawn = await _drawn(engine, ALONE)
        except RequestFailed as error:  # it does not tell what was left, of any answer
            raise ConfigError(str(error), setting=SETTING) from error
        if any(logprob < -EQUAL for _, logprob in drawn):
            raise ConfigError(
                f"{engine.url} gives logprobs of the whole vocabulary, and trainers compute those of the tokens that "
                f"were left (gateway.top_k = {top_k}). Start it with --logprobs-mode processed_logprobs",
                setting=SETTING,
            )
        return
    if top_p < 1 and all(logprob > -ZERO for _, logprob in await _drawn(engine, NARROW)):
        raise ConfigError(
            f"{engine.url} gives logprobs of the nucleus, and trainers compute those of the whole vocabulary "
            f"(gateway.top_p = {top_p:g}). Start it with --logprobs-mode raw_logprobs and set gateway.temperature = 1, "
            "or set gateway.top_p = 1",
            setting=SETTING,
        )
    if temperature != 1 and _are_of_one(await _drawn(engine, COLD), await _drawn(engine, COOL)):
        raise ConfigError(
            f"{engine.url} gives logprobs without the temperature, and trainers compute those with it "
            f"(gateway.temperature = {temperature:g}). Start it with --logprobs-mode processed_logprobs and set "
            "gateway.top_p = 1, or set gateway.temperature = 1",
            setting=SETTING,
        )


def _are_of_one(cold: Drawn, cool: Drawn) -> bool:
    """Both are surely of one distribution."""
    pairs = [(a, b) for (token, a), (other, b) in zip(cold, cool, strict=True) if token == other]
    is_unsure = bool(pairs) and float(np.mean(pairs)) < UNSURE
    return is_unsure and all(abs(a - b) < EQUAL for a, b in pairs)


async def _drawn(engine: Engine, sampling: Sampling) -> Drawn:
    """What the engine draws behind single tokens of a conversation, which its vocabulary has for certain."""
    tokens = (await engine.render(SIMPLEST, opens=True)).tokens
    found = []
    for place in np.linspace(0, len(tokens) - 1, PROMPTS).astype(int):
        prompt = tokens[place : place + 1]
        answer = (await engine.generate(SIMPLEST, Rendering(tokens=prompt), prompt, sampling)).completion
        if len(answer.tokens):
            found.append((int(answer.tokens[0]), float(answer.logprobs[0])))
    return found
