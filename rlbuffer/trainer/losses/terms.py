"""Terms that add to any loss: the KL to a reference policy."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlbuffer.errors import ConfigError
from rlbuffer.trainer.losses.tokens import TrainedTokens, ratio_of


def k1(difference: Tensor) -> Tensor:
    """``-d`` with d = ref - logprob: unbiased as a number; as a term of a loss its expected gradient is 0.

    Shapes: [N] -> [N]. Source: Schulman 2020, "Approximating KL divergence".
    """
    return -difference


def k2(difference: Tensor) -> Tensor:
    """``d^2 / 2``: biased as a number, but its gradient is that of the KL where tokens are the policy's own.

    Shapes: [N] -> [N]. Source: Schulman 2020, "Approximating KL divergence".
    """
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """``exp(d) - d - 1`` >= 0: unbiased, and of less variance than k1.

    Shapes: [N] -> [N]. Source: Schulman 2020, "Approximating KL divergence"; in GRPO, arXiv 2402.03300, equation 4.
    """
    return ratio_of(difference) - difference - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "weighted_k3": k3}
"""Estimators by their name in ``trainer.loss.kl_estimator``; the last is multiplied by the ratio to the policy that
sampled."""


def kl_to_reference(tokens: TrainedTokens, estimator: str = "k3") -> Tensor:
    """Estimate, per token ([N]), of the KL divergence from the policy to the reference. Units: nats.

    k1 to k3 are meant for tokens that the policy itself would sample; over those of an older one they are biased, value
    and gradient. ``weighted_k3`` is k3 times pi / pi_inference, gradient included, and is not.

    Source of the weight: DeepSeek-V3.2, arXiv 2512.02556, section 3.1; TRL's ``use_bias_correction_kl``.

    Raises:
        ConfigError: the rollouts carry no reference logprobs, or some of them do not.
    """
    if not len(tokens.logprobs):
        return tokens.logprobs
    envs = tokens.envs_without("ref_logprobs")
    if tokens.ref_logprobs is None or envs:
        whose = f" of env {', '.join(envs)}" if envs else ""
        raise ConfigError(
            f"trainer.loss.kl_beta is above 0, but the rollouts{whose} carry no column ref_logprobs: push it with "
            "them, or set trainer.loss.kl_beta = 0",
            setting="trainer.loss.kl_beta",
        )
    divergence = KL_ESTIMATORS[estimator](tokens.ref_logprobs - tokens.logprobs)
    if estimator != "weighted_k3":
        return divergence
    return ratio_of(tokens.logprobs - tokens.inference_logprobs) * divergence
