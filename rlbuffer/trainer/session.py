"""The things that a rank needs before it can train: device, other ranks, policy, optimizer, a reader to pull from."""

from __future__ import annotations

import json
import os
import platform
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rlbuffer import __version__
from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.client.reader import Reader
from rlbuffer.client.serverless import Serverless, Source
from rlbuffer.config.losses import columns_of
from rlbuffer.config.models import router_loss
from rlbuffer.config.recorded import recorded
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError
from rlbuffer.process.files import write_whole
from rlbuffer.process.heartbeat import starting
from rlbuffer.process.ranks import Ranks
from rlbuffer.process.signals import StopRequest
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.member import Member
from rlbuffer.trainer.losses import get_loss
from rlbuffer.trainer.model.lora import add_adapter
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.model.selftest import vocabulary_of
from rlbuffer.trainer.ranks.parallel import distribute
from rlbuffer.trainer.ranks.room import when_there_is_room
from rlbuffer.trainer.ranks.stalls import StallWatch
from rlbuffer.trainer.update.update import make_optimizer
from rlbuffer.weights.companions import companions
from rlbuffer.weights.files import publish_base
from rlbuffer.weights.model import build_model, config_of, narrow_dtype
from rlbuffer.weights.publishing import weights_folder
from rlbuffer.weights.state import model_state

T = TypeVar("T")
EXCHANGE_GRACE_SECONDS = 60.0
"""Seconds that a rank waits for the other ranks in an exchange, beyond the wait for a step."""

_KEPT_OPEN: list[nn.Module] = []
"""Modules that hold a gloo process group, kept until the process ends. The group's destructor joins a thread while it
holds Python's lock, and that thread may be waiting for the lock to release the last exchange's tensors: torch 2.13 then
hangs for good. Ranks end by ``os._exit``, as every forked process does; nothing is lost, because nothing is in
flight."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerSession:
    """Everything that one rank trains with."""

    settings: RunSettings
    ranks: Ranks
    policy: PackedPolicy
    """The model, as it is checkpointed and published."""
    module: nn.Module
    """Entry of the forward pass: `policy`, shared over the ranks."""
    optimizer: torch.optim.Optimizer
    buffer: Buffer | Serverless
    reader: Reader | Serverless
    stop: StopRequest
    stalls: StallWatch
    base: PolicyVersion | None = None
    """The model beside a LoRA adapter, once written; on rank 0."""

    @property
    def publishes(self) -> bool:
        """Versions of the policy are written, for somebody who samples."""
        return not isinstance(self.buffer, Serverless) or self.buffer.publishes

    @property
    def is_first(self) -> bool:
        """Rank 0 writes what is written once."""
        return self.ranks.rank == 0

    def when_there_is_room(self, write: Callable[[], T]) -> T:
        """Does `write` to the output folder on all ranks, and waits while a disk takes nothing: see
        :func:`rlbuffer.trainer.ranks.room.when_there_is_room`."""
        return when_there_is_room(
            write, folder=self.settings.output_dir, ranks=self.ranks, stop=self.stop, reader=self.reader
        )

    def write_pids(self) -> None:
        """``ranks.json``: rank -> pid, for whoever wants to look at one of them, or to kill it. All ranks call it."""
        pids = self.ranks.gather(torch.tensor([os.getpid()], dtype=torch.int64))[:, 0].tolist()
        if self.is_first:
            text = json.dumps({f"rank-{r}": pid for r, pid in enumerate(pids)}) + "\n"
            write_whole(self.settings.output_dir / "ranks.json", text)


@contextmanager
def open_session(
    settings: RunSettings,
    *,
    rank: int,
    world_size: int,
    stop: StopRequest | None,
    source: Source | None,
) -> Iterator[TrainerSession]:
    """Joins the other ranks, builds or loads the policy, and connects; with a `source` there is no server.

    Raises:
        ConfigError: no such device or loss, settings that it does not read, a model that asks for a router loss.
        PackedForwardError: see `prepare`.
    """
    get_loss(settings.trainer.loss.name)
    stop = stop or StopRequest()
    device = device_of(settings)
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses matrix products without it
        torch.use_deterministic_algorithms(True)
    ranks = Ranks(rank, world_size, device)
    store = _join(settings, device) if world_size > 1 else None
    # The same on every rank; from a checkpoint on, each goes on with its own states.
    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    random.seed(settings.seed)
    with _telling_start(settings, rank) if source is None else nullcontext():
        model = build_model(settings.model, seed=settings.seed)
    if why := router_loss(model.config.to_dict()):
        raise ConfigError(why, setting="model")
    nn.Module.to(model, device)
    vocabulary = vocabulary_of(model)
    run: Buffer | Serverless = (
        connect(settings.redis_url, run=settings.run, config=settings, name=f"rank-{rank}")
        if source is None
        else source(settings, vocabulary)
    )
    with closing(run) as buffer:
        policy = prepare(
            model,
            layout=settings.trainer.layout,
            compute=narrow_dtype(settings.model),
            longest=settings.batcher.row_tokens,
            recompute=settings.trainer.gradient_checkpointing,
        )
        if policy.no_replay and settings.trainer.replay_experts:
            for name, worker in settings.worker.items():
                if worker.record_experts:
                    why = "trainer.replay_experts = false trains with the router's own choice"
                    raise ConfigError(
                        f"worker.{name} records experts, and the trainer cannot compute with them: "
                        f"{policy.no_replay}. {why}",
                        setting="trainer.replay_experts",
                    )
        base = None
        if settings.trainer.lora.is_used:
            if not isinstance(buffer, Serverless) or buffer.publishes:
                write = partial(_write_base, settings, policy) if rank == 0 else lambda: None
                base = when_there_is_room(write, folder=settings.output_dir, ranks=ranks, stop=stop)
            add_adapter(policy.model, settings.trainer.lora, seed=settings.seed)
        module = distribute(policy, ranks, parallel=settings.trainer.parallel)
        reader = buffer.reader(
            rank,
            world_size,
            timeout_seconds=settings.trainer.timeout_seconds,
            pad_to_multiple_of=64 if device.type == "cuda" else 1,
            vocabulary=vocabulary,
            adapters=False,
            columns=columns_of(settings.trainer.loss),
        )
        reader.warns = False  # the command's own lines say what is waited for
        yield TrainerSession(
            settings=settings,
            ranks=ranks,
            policy=policy,
            module=module,
            optimizer=make_optimizer(policy, settings.trainer.optimizer),
            buffer=buffer,
            reader=reader,
            stop=stop,
            stalls=StallWatch(ranks, store),
            base=base,
        )
    if device.type == "cuda" and world_size > 1:
        dist.destroy_process_group()
    elif world_size > 1:
        _KEPT_OPEN.append(module)


def attempt_settings(session: TrainerSession) -> dict[str, Any]:
    """What this attempt trains with, for the archive: settings, and the machine on which bits are the same again."""
    machine = {
        "rlbuffer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "device": str(session.ranks.device),
        "threads": torch.get_num_threads(),
    }
    return {**recorded(session.settings), "machine": machine}


@contextmanager
def _telling_start(settings: RunSettings, rank: int) -> Iterator[None]:
    """Says that this rank loads the model while the block does."""
    with connect(settings.redis_url, run=settings.run, config=settings, name=f"rank-{rank}") as buffer:
        store = buffer.store.role(Member)

        def tell(record: dict[str, Any]) -> Mapping[str, Any] | None:
            store.meta()  # RunGone where there is none: this begins none
            return store.heartbeat("rank", str(rank), record)

        with starting(tell, "which loads its model"):
            yield


def _write_base(settings: RunSettings, policy: PackedPolicy) -> PolicyVersion:
    """Writes the model as it is, before an adapter is put into it, for the versions of the adapter to name."""
    dtype = narrow_dtype(settings.model)
    return publish_base(
        weights_folder(settings),
        state=model_state(policy, inside="model", dtype=dtype),
        config=config_of(policy.model, dtype=dtype),
        beside=companions(settings.model.path),
    )


def device_of(settings: RunSettings) -> torch.device:
    """The device that this rank trains on; with CUDA, the one of its LOCAL_RANK."""
    setting = settings.trainer.device
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device = cuda, but torch sees no CUDA device", setting="trainer.device")
    if setting == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(settings: RunSettings, device: torch.device) -> Store | None:
    """Joins the process group; a lost rank ends the others' exchanges, at the latest after the timeout. -> its store.

    None where the caller has joined one already.
    """
    if dist.is_initialized():
        return None
    store, rank, world_size = next(rendezvous("env://"))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("exchange", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=settings.trainer.timeout_seconds + EXCHANGE_GRACE_SECONDS),
    )
    return PrefixStore("place", store)
