"""The settings of sampling that there are, and why there are no others.

A trainer's logprob of a token is over the whole vocabulary, at the temperature. A sampler records the same, so that
their ratio is 1 while the policy is the same. A setting that bends the distribution beyond that is refused where it is
written: nothing after that place could tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CUTS = "top_k min_p typical_p top_h epsilon_cutoff eta_cutoff"
_BENDS = """repetition_penalty presence_penalty frequency_penalty encoder_repetition_penalty length_penalty
    diversity_penalty penalty_alpha exponential_decay_length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    logit_bias sequence_bias bad_words bad_words_ids allowed_token_ids suppress_tokens begin_suppress_tokens
    force_words_ids forced_bos_token_id forced_eos_token_id constraints structured_outputs min_tokens min_new_tokens
    min_length guidance_scale renormalize_logits remove_invalid_values logits_processors thinking_token_budget
    trace_decode_token_ids watermarking watermarking_config watermark_config num_beams num_beam_groups do_sample
    dola_layers"""
_ENDS = "stop stop_strings stop_token_ids eos_token_id ignore_eos max_time repetition_detection token_healing"
_LENGTHS = "max_tokens max_length max_completion_tokens"
_DEFAULTS = "generation_config override_generation_config"
_SPECULATES = """speculative_config speculative_model num_speculative_tokens spec_method spec_model spec_tokens
    assistant_model prompt_lookup_num_tokens"""
_OURS = "temperature top_p max_new_tokens"

BENT = (
    "tokens would be drawn from another distribution than the one that their logprobs, and every ratio, are made of; "
    "no worker samples with it"
)
SPECULATION = (
    "logprobs of speculated tokens were missing or wrong in several releases of vLLM (its issues 17876 and 34497), "
    "some of its methods draw other tokens than the policy, and no version reaches a draft model"
)
REFUSED_SAMPLING: Mapping[str, str] = {
    name: reason
    for names, reason in (
        (_CUTS, "tokens are left out by top_p alone"),
        (_BENDS, BENT),
        (_ENDS, "the env says where a completion ends: eos_token_ids, and stop_token_ids of episode.sample"),
        (_LENGTHS, "the longest completion is max_new_tokens of the worker"),
        ("n num_return_sequences", "the completions of a prompt are group_size of the worker"),
        (_SPECULATES, SPECULATION),
        (_DEFAULTS, "each request names all that a model's generation_config.json may set"),
    )
    for name in names.split()
}
"""Setting of engines and servers -> why a worker does not have it."""


def why_not(name: str) -> str:
    """The reason why a worker has no such setting of sampling; "" for a name that is no setting of sampling."""
    return REFUSED_SAMPLING.get(name, "")


def refused_option(options: Mapping[str, Any]) -> str:
    """A sentence about the first of a sampler's options that would change how tokens are drawn; "" when none does."""
    for name in options:
        if name in _OURS.split():
            return f"sampler_options.{name} is a setting of the worker itself: worker.NAME.{name}"
        if reason := why_not(name):
            return f"sampler_options.{name}: {reason}"
    return ""
