"""The policy versions that samplers get, and the rule by which one is written and announced.

A version is all of the policy's weights, or with LoRA the adapter beside a base that is written once. The trainer only
announces. Workers find out how good a version is: they evaluate announced versions (``[eval.NAME]``), so that no rank
ever waits for an evaluation.

A trainer of the user's own publishes its model through :mod:`rlbuffer.weights.publishing`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.trainer.model.lora import adapter_config, adapter_state
from rlbuffer.trainer.session import TrainerSession
from rlbuffer.weights.companions import companions
from rlbuffer.weights.files import publish as publish_model
from rlbuffer.weights.files import publish_adapter
from rlbuffer.weights.model import config_of, narrow_dtype
from rlbuffer.weights.places import announced, kept_versions
from rlbuffer.weights.publishing import announce_once, weights_folder
from rlbuffer.weights.state import is_sharded, model_state


def publish_if_due(session: TrainerSession, step: Step) -> None:
    """Publishes after `step` was trained: at every ``publish.every``, at the end, and where it is waited for."""
    settings = session.settings.trainer
    if step.number % settings.publish.every == 0 or step.number == settings.steps:
        publish(session, step.number)
    elif step.header.waiting_for_version is not None:
        # Nothing that could be sampled with an older one would still be young enough for the next step.
        publish(session, step.number, unless=step.header.waiting_for_version)


def publish(session: TrainerSession, version: int, *, unless: int | None = None) -> None:
    """Rank 0 writes and announces a version, unless samplers have it (or version `unless`), or a newer one. All ranks
    call it: they wait together while there is no room for it."""
    session.when_there_is_room(
        partial(
            announce_once,
            session.buffer.policy,
            session.settings,
            version,
            ranks=session.ranks,
            is_sharded=is_sharded(session.policy),
            unless=unless,
            write=partial(_write, session, version),
        )
    )


def _write(session: TrainerSession, version: int) -> PolicyVersion | None:
    """Writes a version of the policy. Sharded: all ranks must call it. -> what to announce, on rank 0; else None."""
    settings, policy = session.settings, session.policy
    lora = settings.trainer.lora.is_used
    dtype = narrow_dtype(settings.model)
    state = model_state(policy, inside="model", dtype=None if lora else dtype, only_trained=lora)
    if not session.is_first:
        return None
    folder, keep = weights_folder(settings), kept_versions(settings)
    beside = companions(settings.model.path, settings.trainer.lora.path)
    if session.base is None:
        config = config_of(policy.model, dtype=dtype)
        return publish_model(
            folder,
            version,
            state=state,
            config=config,
            keep=keep,
            beside=beside,
            with_delta=bool(settings.weights.url),
        )
    located = replace(session.base, location=announced(settings, session.base.location))
    return publish_adapter(
        folder,
        version,
        state=adapter_state(state),
        config=adapter_config(policy.model, base=located.location),
        base=located,
        keep=keep,
        beside=beside,
    )
