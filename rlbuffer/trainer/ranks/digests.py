"""A hash by which ranks, or two runs, show that they hold the same parameters."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from rlbuffer.trainer.ranks.parallel import whole


def digest_parameters(module: nn.Module) -> str:
    """SHA-256 (hex) of the bytes of all parameters, by name. Where ranks hold parts, all of them must call it."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(name.encode())
        flat = whole(parameter.detach()).contiguous().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
