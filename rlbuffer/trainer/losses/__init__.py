"""Losses by name: pure functions of per-token tensors, each with the count over all ranks that it divides by.

With r = exp(logprob - old logprob), A the advantage, sg a stopped gradient, w = exp(old - inference logprob):

============  =====================================================================  =================================
name          loss per token                                                         divided by
============  =====================================================================  =================================
clip          -min(r A, clip(r, 1 - low, 1 + high) A)                                rollouts (of the mean over tokens)
dapo          the same                                                               trained tokens
dr_grpo       the same                                                               rollouts x longest length
ratio         -min(r, cap) A                                                         trained tokens
kl_cov        -r A, + coefficient |logprob - old| on selected tokens                 trained tokens
clip_cov      as clip, 0 on selected tokens                                          trained tokens
gspo          -min(s A, clip(s) A), s = exp(mean over the rollout of logprob - old)  rollouts
cispo         -sg(min(r, cap)) A logprob                                             trained tokens
masked_ratio  -r A where low <= r <= high, else 0                                    trained tokens
dppo_tv       -keep A r + penalty (logprob - old)^2                                  trained tokens
tis           as clip, x min(w, cap)                                                 rollouts
icepop        as clip, x (w where low <= w <= high, else 0)                          trained tokens
decoupled     as clip, x min(w, cap)                                                 trained tokens
============  =====================================================================  =================================

"old" is the policy that sampled (its inference logprobs), or the one at the start of the step where a correction needs
that (gspo brings one) or ``trainer.loss.old_logprobs = "recomputed"``. Each name is a function of a few lines
(`clipping`, `weighting`), the weights of the last three are corrections (`corrections`) that go with any loss. To add a
loss: write a function of (tokens, options) that gives [N], and call :func:`register_loss`, or name it:
``trainer.loss.name = "package.module:name"``.

Nothing here is a mean over a micro-batch: every term is a sum, and the divisor is a constant of the whole update. So a
step gives the same gradient in however many pieces and on however many ranks it is trained, where a mean of means was
24 % off. Tokens are selected over the whole update, too (`selection`).

Open first: `registry`, then `clipping`.
"""

from rlbuffer.config.losses import Divisor, Options, corrections_of, uses_old
from rlbuffer.trainer.losses.corrections import CORRECTIONS, Correction
from rlbuffer.trainer.losses.registry import Loss, TokenLoss, get_loss, register_loss
from rlbuffer.trainer.losses.terms import KL_ESTIMATORS, kl_to_reference
from rlbuffer.trainer.losses.tokens import TrainedTokens
from rlbuffer.trainer.losses.total import clipped_of, divisor_of, loss_of, per_token_of, token_weights

__all__ = [
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "Correction",
    "Divisor",
    "Loss",
    "Options",
    "TokenLoss",
    "TrainedTokens",
    "clipped_of",
    "corrections_of",
    "divisor_of",
    "get_loss",
    "kl_to_reference",
    "loss_of",
    "per_token_of",
    "register_loss",
    "token_weights",
    "uses_old",
]
