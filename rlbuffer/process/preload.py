"""Imported by the forkserver, and only there: what workers and ranks have in common.

Importing it has side effects: the process leaves the terminal's session, see
`rlbuffer.process.forkserver.leave_terminal`.
"""

from __future__ import annotations

import contextlib
import importlib

from rlbuffer.process.forkserver import leave_terminal

MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "safetensors.torch",
    "rlbuffer.client.buffer",
    "rlbuffer.worker.loop",
    "rlbuffer.worker.samplers.decoding",
    "rlbuffer.trainer.loop",
    "rlbuffer.trainer.launch.launcher",
)

leave_terminal()
for _module in MODULES:
    # A missing extra shows where it is needed, with a message of its own.
    with contextlib.suppress(ImportError):
        importlib.import_module(_module)
