"""A policy that sees images: what a loop of your own adds for rollouts with attachments.

A rollout carries its images as the attachment `pixels` [images, P], and its context has a token IMAGE for each. A
micro-batch has those of all of its rollouts behind one another, in the order of their tokens.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

IMAGE = 15


class Sees(nn.Module):
    """A language model in which an encoded image stands in the place of each token IMAGE."""

    def __init__(self, language, pixels):
        super().__init__()
        self.language = language
        self.vision = nn.Linear(pixels, language.config.hidden_size)

    def forward(self, mb):
        """Logits [T, V] of a packed micro-batch of tensors."""
        embedded = self.language.get_input_embeddings()(mb.input_ids)
        images = mb.attachments.get("pixels")  # not there where no rollout of this micro-batch has any
        if images is not None:
            embedded = embedded.masked_scatter(places_of(mb)[:, None], self.vision(images).to(embedded.dtype))
        else:
            embedded = embedded + 0 * sum(p.sum() for p in self.vision.parameters())  # DDP waits for their gradients
        out = self.language(inputs_embeds=embedded[None], position_ids=mb.position_ids[None], use_cache=False)
        return out.logits[0]


def places_of(mb):
    """[T] bool: the tokens that images stand in, which are context: the policy may sample the id IMAGE, as any other.

    In a rollout without images it is a word, too.
    """
    is_sampled = mb.loss_mask | (mb.logprobs != 0)  # also what an earlier sequence of its rollout trains
    is_place = (mb.input_ids == IMAGE) & ~is_sampled
    for sample, places in zip(mb.samples, mb.unpack(is_place), strict=True):
        images, count = len(sample.attachments.get("pixels", ())), int(places.sum())
        if not images:
            places[:] = False  # a view of is_place
        elif images != count:
            raise ValueError(
                f"rollout {sample.rollout_id} has {images} images, and {count} tokens {IMAGE} in its context: each "
                "image needs one"
            )
    return is_place


def loss_of(model, mb):
    """Policy gradient over the trained tokens of the whole step, all ranks together."""
    logprobs = -cross_entropy(model(mb), mb.targets, reduction="none")  # at t: of token t + 1
    trained = mb.loss_mask.nonzero()[:, 0]
    ratio = torch.exp(logprobs[trained - 1] - mb.logprobs[trained])
    return -(ratio * mb.advantages[trained]).sum() / max(1, mb.normalizers.loss_tokens)
