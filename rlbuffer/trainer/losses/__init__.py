"""Losses by name: pure functions of per-token tensors, each with the count over all ranks that it divides by.

Each name (`rlbuffer/config/losses.py`) is a function of a few lines in `clipping` or `weighting`; `corrections` are
weights that go with any loss. Ratios are against the policy that sampled (its inference logprobs), or the one at the
start of the step where a correction needs that (gspo brings one) or ``trainer.loss.old_logprobs = "recomputed"``. To
add a loss: write a function of (tokens, options) that gives [N], and call :func:`register_loss`, or name it:
``trainer.loss.name = "package.module:name"``.

Nothing here is a mean over a micro-batch: every term is a sum, and the divisor is a constant of the whole update. So a
step gives the same gradient in however many pieces and on however many ranks it is trained, where a mean of means was
24 % off. Tokens are selected over the whole update, too (`selection`).

Open first: `registry`, then `clipping`.
"""

from rlbuffer.config.losses import Options, uses_old
from rlbuffer.trainer.losses.corrections import CORRECTIONS
from rlbuffer.trainer.losses.masking import clipped_of, masks_of
from rlbuffer.trainer.losses.registry import get_loss, register_loss
from rlbuffer.trainer.losses.terms import kl_to_reference
from rlbuffer.trainer.losses.tokens import TrainedTokens
from rlbuffer.trainer.losses.total import divisor_of, loss_of, per_token_of, weights_of

__all__ = [
    "CORRECTIONS",
    "Options",
    "TrainedTokens",
    "clipped_of",
    "divisor_of",
    "get_loss",
    "kl_to_reference",
    "loss_of",
    "masks_of",
    "per_token_of",
    "register_loss",
    "uses_old",
    "weights_of",
]
