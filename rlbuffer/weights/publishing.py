"""Versions of the policy, written and announced once for all ranks; a trainer of the user's own publishes here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from huggingface_hub import try_to_load_from_cache
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import RlbufferError, WeightsError
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.companions import companions
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import class_of, config_of
from rlbuffer.weights.places import announced, kept_versions
from rlbuffer.weights.state import is_sharded, model_state


class Announcements(Protocol):
    """The announced versions of a run: :class:`rlbuffer.client.buffer.Policy`, or a stand-in."""

    def current(self) -> PolicyVersion:
        """The newest announced version."""

    def announce(self, version: int, *, location: str, size: int, checksum: str) -> bool:
        """Says that `version` can be sampled from."""


def weights_folder(settings: RunSettings) -> Path:
    """The folder of the trainer's versions."""
    return settings.output_dir / "weights"


def is_due(policy: Announcements, version: int, *, ranks: Ranks, is_sharded: bool, unless: int | None = None) -> bool:
    """Samplers have neither `version` (or version `unless`) nor a newer one. Rank 0 knows it; the others say no.

    A version that was announced without weights is one that samplers do not have.

    Args:
        is_sharded: every rank holds a part of what rank 0 writes, so all of them call this and hear what rank 0 knows.
    """
    due = False
    if ranks.rank == 0:
        current, needed = policy.current(), version if unless is None else unless
        due = current.version < needed or (current.version == needed and not current.location)
    return bool(ranks.first(int(due))) if is_sharded else due


def announce(policy: Announcements, settings: RunSettings, written: PolicyVersion) -> bool:
    """Says that a version which was written can be sampled from. -> False: an equal or newer one is announced."""
    location = announced(settings, written.location)
    return policy.announce(written.version, location=location, size=written.size, checksum=written.checksum)


def publish_model(
    policy: Announcements,
    settings: RunSettings,
    model: PreTrainedModel,
    version: int,
    *,
    reader_place: tuple[int, int] | None,
    folder: Path | None,
    keep: int | None,
    tokenizer: Path | None = None,
) -> bool:
    """Publishes the model's weights, unwrapped, as :meth:`rlbuffer.client.buffer.Policy.publish` does.

    `reader_place`: rank and world size of this process's reader; None where it has none, as the further ranks behind a
    stream. Of a sharded model they hold parts, which all ranks of the process group gather.
    """
    is_with_others = dist.is_initialized() and (reader_place is None or is_sharded(model))
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_with_others else reader_place or (0, 1)
    ranks = Ranks(rank, world_size, next(model.parameters()).device)
    has_reader = reader_place is not None or rank > 0
    if not (ranks.first(int(has_reader)) if is_sharded(model) else has_reader):  # those that would gather hear it, too
        raise RlbufferError("policy.publish: rank 0 has no reader: call buffer.reader(rank, world_size) before")
    if tokenizer is not None and not tokenizer.expanduser().is_dir():
        raise WeightsError(f"tokenizer = {str(tokenizer)!r} is no directory: tokenizer.save_pretrained(DIR) makes one")
    if not is_due(policy, version, ranks=ranks, is_sharded=is_sharded(model)):
        return False
    state = model_state(model)
    if rank:
        return False
    written = publish(
        weights_folder(settings) if folder is None else folder.expanduser(),
        version,
        state=state,
        config=config_of(model),
        keep=kept_versions(settings) if keep is None else keep,
        beside=companions(origin_of(model) or settings.model.path, tokenizer or ""),
        with_delta=bool(settings.weights.url),
    )
    return announce(policy, settings, written)


def origin_of(model: PreTrainedModel) -> Path | None:
    """The directory that a model was loaded from, that of a name on the hub in Hugging Face's cache; None of a fresh
    one."""
    name = str(model.name_or_path or "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        revision = getattr(model.config, "_commit_hash", None)
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no name that the hub could know, such as a folder that is gone
        return None
    return Path(config).parent if isinstance(config, str) else None


def unwrapped(model: object) -> PreTrainedModel:
    """The language model inside of what ranks share or torch compiles. Raises WeightsError when it is none."""
    inside = model
    while isinstance(inside, nn.Module):
        if isinstance(inside, DistributedDataParallel):
            inside = inside.module
        elif hasattr(inside, "_orig_mod"):  # compiled
            inside = inside._orig_mod
        else:
            break
    if isinstance(inside, PreTrainedModel) and not inside.can_generate():
        raise WeightsError(
            f"a {class_of(inside).__name__} cannot be published: nothing can be sampled from it, since it has no head "
            "for the next token, as an AutoModelForCausalLM has it"
        )
    if isinstance(inside, PreTrainedModel) and not getattr(inside, "_hf_peft_config_loaded", False):
        return inside
    raise WeightsError(
        f"policy.publish: a model of type {type(inside).__name__} cannot be published as it is: publish() takes a "
        "Hugging Face model without a PEFT adapter, as it is or wrapped by DDP, FSDP2 or torch.compile. Write another "
        "one's folder yourself, and announce() it"
    )
