"""The weights that samplers get: all of the policy's, or with LoRA the adapter beside a base that is written once.

A trainer of the user's own publishes its model through :mod:`rlbuffer.weights.publishing`.
"""

from __future__ import annotations

from dataclasses import replace

from rlbuffer.config.settings import RunSettings
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.trainer.model.lora import adapter_config, adapter_state
from rlbuffer.trainer.model.packed_policy import PackedPolicy
from rlbuffer.weights.files import publish, publish_adapter, publish_base
from rlbuffer.weights.model import config_of, narrow_dtype
from rlbuffer.weights.places import announced, kept_versions
from rlbuffer.weights.publishing import weights_folder
from rlbuffer.weights.state import model_state


def write_base(settings: RunSettings, policy: PackedPolicy) -> PolicyVersion:
    """Writes the model as it is, before an adapter is put into it, for the versions of the adapter to name."""
    dtype = narrow_dtype(settings.model)
    return publish_base(
        weights_folder(settings),
        state=model_state(policy, inside="model", dtype=dtype),
        config=config_of(policy.model, dtype=dtype),
    )


def write_version(
    settings: RunSettings, policy: PackedPolicy, version: int, *, ranks: Ranks, base: PolicyVersion | None
) -> PolicyVersion | None:
    """Writes a version of the policy. Sharded: all ranks must call it. -> what to announce, on rank 0; else None.

    Args:
        base: what :func:`write_base` wrote, when only an adapter is trained; None on other ranks than the first.
    """
    lora = settings.trainer.lora.rank > 0
    state = model_state(policy, inside="model", dtype=None if lora else narrow_dtype(settings.model), only_trained=lora)
    if ranks.rank != 0:
        return None
    folder, keep = weights_folder(settings), kept_versions(settings)
    if base is None:
        dtype = narrow_dtype(settings.model)
        return publish(folder, version, state=state, config=config_of(policy.model, dtype=dtype), keep=keep)
    located = replace(base, location=announced(settings, base.location))
    return publish_adapter(
        folder,
        version,
        state=adapter_state(state),
        config=adapter_config(policy.model, base=located.location),
        base=located,
        keep=keep,
    )
