"""A loss of your own: learn from a teacher's logprobs, and trust a token the less the older it is.

[trainer.loss]
name = "teacher:loss"
columns = ["teacher_logprobs"]            # a rollout without them is left out
options = { clip = 0.4 }
"""

import torch


def loss(tokens, options):
    """Clipped policy gradient towards the teacher: where it finds a token likelier than we do, that token is good."""
    gain = tokens.column("teacher_logprobs") - tokens.logprobs.detach()
    width = options["clip"] / (1 + tokens.ages)  # 0.4 at age 0, 0.2 at age 1
    within = torch.minimum(torch.maximum(tokens.ratio, 1 - width), 1 + width)
    return -torch.minimum(tokens.ratio * gain, within * gain)
