"""The training loop of one rank: agree on a step, train it, publish the version it makes, acknowledge it, go on.

    pull -> agree -> forward/backward over the micro-batches -> exchange -> optimizer
         -> publish + announce version s -> acknowledge step s -> checkpoint every N

A crash anywhere in between loses nothing: until the checkpoint that contains it is written, a step can be pulled and
trained again with the same bytes; what was announced before is not announced again.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rlbuffer.batches import Step, digest_step
from rlbuffer.client import Buffer, connect
from rlbuffer.errors import ConfigError, RlbufferError
from rlbuffer.reader import Reader
from rlbuffer.settings import RunSettings
from rlbuffer.trainer import checkpoint as checkpoints
from rlbuffer.trainer.agreement import Agreement, Ranks, Verdict, refuse_adapters
from rlbuffer.trainer.checkpoint import Checkpoint
from rlbuffer.trainer.digests import digest_parameters
from rlbuffer.trainer.fake import FakeBuffer, FakeReader
from rlbuffer.trainer.lora import add_adapter
from rlbuffer.trainer.losses import check_losses
from rlbuffer.trainer.metrics import MetricsFile, Stopwatch, step_record
from rlbuffer.trainer.model import PackedPolicy, prepare, vocabulary_of
from rlbuffer.trainer.parallel import distribute, is_sharded
from rlbuffer.trainer.publishing import write_base, write_version
from rlbuffer.trainer.schedules import learning_rate_at
from rlbuffer.trainer.stopping import StopRequest
from rlbuffer.trainer.update import SUMS, Updates, make_optimizer, take_step
from rlbuffer.weights.cache import announced
from rlbuffer.weights.files import Written
from rlbuffer.weights.model import build_model, narrow_dtype

OnEvent = Callable[[dict[str, Any]], None]

MAX_PULLS = 3
"""Times that a step is pulled again because ranks hold different ones, before giving up."""

EXCHANGE_GRACE_SECONDS = 60.0
"""How much longer than the wait for a step a rank waits for the other ranks in an exchange."""

_KEPT_OPEN: list[nn.Module] = []
"""What holds a gloo process group is never let go of. Its destructor joins a thread while it holds Python's lock, and
that thread may be waiting for the lock to release the last exchange's tensors: torch 2.13 then hangs for good. Ranks
end by ``os._exit``, as every forked process does; nothing is lost, because nothing is in flight."""


def train(
    settings: RunSettings,
    *,
    rank: int,
    world_size: int,
    on_event: OnEvent | None = None,
    stop: StopRequest | None = None,
    fake_data: bool = False,
) -> bool:
    """Trains until ``settings.trainer.steps``, from the newest checkpoint if there is one.

    With a world size above 1 the process group is joined from the environment (MASTER_ADDR and so on, as torchrun
    sets it). `on_event` is called on rank 0 with ``start``, ``step``, ``checkpoint`` and ``end`` objects.

    Returns:
        True when the planned steps are trained, False when it was asked to stop before (with a checkpoint written).

    Raises:
        BatchTimeout: no step came in time. RankFailed: another rank could not go on. Further rlbuffer errors: see
            `Reader.steps`, `agree`, `prepare`.
    """
    check_losses(settings.trainer)
    device = device_of(settings)
    if world_size > 1:
        _join(settings, device)
    _seed(settings.trainer.seed)
    model = build_model(settings.model, seed=settings.trainer.seed)
    nn.Module.to(model, device)
    source: Buffer | FakeBuffer
    if fake_data:
        source = FakeBuffer(settings, vocabulary=vocabulary_of(model))
    else:
        source = connect(settings.redis_url, run=settings.run, config=settings, name=f"rank-{rank}")
    with source as buffer:
        policy = prepare(
            model,
            layout=settings.trainer.layout,
            compute=narrow_dtype(settings.model),
            longest=settings.batcher.row_tokens,
            recompute=settings.trainer.gradient_checkpointing,
        )
        trainer = _Trainer(settings, Ranks(rank, world_size, device), policy, buffer, on_event, stop)
        try:
            finished = trainer.run()
        finally:
            trainer.close()
    if device.type == "cuda" and world_size > 1:
        dist.destroy_process_group()
    elif world_size > 1:
        _KEPT_OPEN.append(trainer.module)
    return finished


def device_of(settings: RunSettings) -> torch.device:
    """The device that this rank trains on; with CUDA, the one of its LOCAL_RANK."""
    wanted = settings.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device = cuda, but torch sees no CUDA device", setting="trainer.device")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class _Trainer:
    """One rank's state while it trains."""

    def __init__(
        self,
        settings: RunSettings,
        ranks: Ranks,
        policy: PackedPolicy,
        buffer: Buffer | FakeBuffer,
        on_event: OnEvent | None,
        stop: StopRequest | None,
    ) -> None:
        self.settings = settings
        self.ranks = ranks
        self.policy = policy
        self.buffer = buffer
        self.is_first = ranks.rank == 0
        self._on_event = on_event if self.is_first else None
        self.stop = stop or StopRequest()
        self.output: Path = settings.output_dir
        self.base: Written | None = None
        if settings.trainer.lora.rank:
            self.base = write_base(settings, policy) if self.is_first else None
            add_adapter(policy.model, settings.trainer.lora, seed=settings.trainer.seed)
        self.module = distribute(policy, ranks, parallel=settings.trainer.parallel)
        self.optimizer = make_optimizer(policy, settings.trainer)
        self.reader: Reader | FakeReader = buffer.reader(
            ranks.rank,
            ranks.world_size,
            timeout_seconds=settings.trainer.timeout_seconds,
            pad_to_multiple_of=settings.trainer.pad_to_multiple_of,
        )
        self.updates = 0
        self.trained = 0
        self.checkpointed = 0
        self.resumed_from = 0
        self.metrics = MetricsFile(self.output) if self.is_first else None

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def event(self, kind: str, **values: Any) -> None:
        if self._on_event is not None:
            self._on_event({"event": kind, **values})

    # -- the run ---------------------------------------------------------------------------------------------------
    def run(self) -> bool:
        planned = self.settings.trainer.steps
        self._resume()
        self.event(
            "start",
            step=self.trained,
            steps=planned,
            world_size=self.ranks.world_size,
            device=str(self.ranks.device),
            attention=self.policy.attention,
            parameters=sum(p.numel() for p in self.policy.parameters()),
            output=str(self.output),
        )
        if self.trained >= planned:
            self.event("end", step=self.trained, finished=True)
            return True
        self.reader.start(self.trained)
        self._write_pids()
        self.ranks.barrier()  # rank 0 has registered the attempt: the others' reports are not fenced by an older one
        # After a resume samplers have this version, or a newer one, unless the server lost what was newer.
        self._publish(self.trained)
        finished = self._loop(planned)
        if self.trained > self.checkpointed:
            self._checkpoint()
        self.event("end", step=self.trained, finished=finished)
        return finished

    def _write_pids(self) -> None:
        """``ranks.json``: rank -> pid, for whoever wants to look at one of them, or to kill it."""
        pids = self.ranks.gather(torch.tensor([os.getpid()], dtype=torch.int64))[:, 0].tolist()
        if self.is_first:
            temporary = self.output / "ranks.json.tmp"
            temporary.write_text(json.dumps({f"rank-{r}": pid for r, pid in enumerate(pids)}) + "\n", encoding="utf-8")
            temporary.replace(self.output / "ranks.json")

    def _loop(self, planned: int) -> bool:
        steps = self._steps()
        pulls = 0
        while self.trained < planned:
            watch = Stopwatch()
            with watch.measure("wait"):
                step, agreement = self._next(steps)
            if agreement.verdict is Verdict.STOP:
                return False
            if agreement.verdict is Verdict.PULL_AGAIN or step is None:
                pulls += 1
                if pulls >= MAX_PULLS:
                    raise RlbufferError(
                        f"the ranks pulled different steps {MAX_PULLS} times: {'; '.join(agreement.held)}. "
                        "`rlbuffer verify` checks the steps; are all ranks on the same run and server?"
                    )
                if hasattr(steps, "close"):
                    steps.close()
                steps = self._steps()
                continue
            pulls = 0
            self._train(step, agreement, watch)
        return True

    def _steps(self) -> Iterator[Step]:
        return self.reader.steps(self.trained + 1, until=lambda: self.stop.is_set)

    def _next(self, steps: Iterator[Step]) -> tuple[Step | None, Agreement]:
        """The next step as all ranks agree on it. Errors of this rank's reader reach the others through `agree`."""
        step: Step | None = None
        failure: RlbufferError | None = None
        try:
            step = None if self.stop.is_set else next(steps, None)
            if step is None and not self.stop.is_set:
                failure = RlbufferError("the reader ended without a step")
        except RlbufferError as error:
            failure = error
        if step is not None and step.number != self.trained + 1:
            failure = RlbufferError(f"the reader gave step {step.number}, expected was {self.trained + 1}")
        elif step is not None:
            failure = refuse_adapters(step)
        return step, self.ranks.agree(
            step,
            failure=failure,
            is_stopping=self.stop.is_set,
            max_damaged=self.settings.trainer.max_damaged,
        )

    def _train(self, step: Step, agreement: Agreement, watch: Stopwatch) -> None:
        settings = self.settings.trainer
        sums, norm, rate = self._make_updates(step, watch)
        self.trained = step.number
        with watch.measure("publish"):
            if step.number % settings.publish_every == 0 or step.number == settings.steps:
                self._publish(step.number)
            elif step.header.get("waiting_for_version") is not None:
                # Nothing that could be sampled with an older one would still be young enough for the next step.
                self._publish(step.number, unless=int(step.header["waiting_for_version"]))
            self.reader.trained(step)
        totals = self.ranks.sum(sums)
        record = step_record(
            step,
            totals,
            gradient_norm=norm,
            learning_rate=rate,
            damaged_tokens=agreement.damaged_tokens,
            seconds=watch.seconds,
            world_size=self.ranks.world_size,
        )
        record |= {"resumed_from": self.resumed_from} | self._proofs(step)
        if self.metrics is not None:
            self.metrics.write(record)
        if self._on_event is not None:
            self._on_event(record)
        if len(set(record.get("parameters_sha256", ()))) > 1:
            raise RlbufferError(f"step {step.number}: the ranks' parameters differ: {record['parameters_sha256']}")
        if step.number % settings.checkpoint_every == 0 or step.header.get("checkpoint_now"):
            self._checkpoint()

    def _make_updates(self, step: Step, watch: Stopwatch) -> tuple[torch.Tensor, float, float]:
        """Makes every update of a step. -> sums [len(SUMS)] of this rank, last gradient norm, last learning rate."""
        settings = self.settings.trainer
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        norm = rate = 0.0
        with watch.measure("train"):
            updates = Updates(self.module, step, settings, self.ranks, longest=self.settings.batcher.row_tokens)
        for part in updates.parts:
            with watch.measure("train"):
                sums += updates.accumulate(part)
            with watch.measure("optimizer"):
                self.updates += 1
                rate = learning_rate_at(self.updates, settings)
                norm = take_step(
                    self.policy,
                    self.optimizer,
                    learning_rate=rate,
                    gradient_clip=settings.gradient_clip,
                    place=f"step {step.number}",
                )
        sums[SUMS.index("loss")] /= max(1, len(updates.parts))  # each update has a loss of its own: their mean
        return sums, norm, rate

    def _proofs(self, step: Step) -> dict[str, Any]:
        """Hashes that were asked for, of all ranks."""
        proofs: dict[str, Any] = {}
        if self.settings.trainer.check_parameters:
            proofs["parameters_sha256"] = self.ranks.gather_digests(digest_parameters(self.policy))
        if self.settings.trainer.record_batches:
            proofs["batch_sha256"] = self.ranks.gather_digests(digest_step(step))
        return proofs

    # -- what others see -------------------------------------------------------------------------------------------
    def _publish(self, version: int, *, unless: int | None = None) -> None:
        """Rank 0 writes and announces a version, unless samplers have it (or version `unless`), or a newer one."""
        policy = self.buffer.policy()
        wanted = self.is_first and policy.current().version < (version if unless is None else unless)
        if is_sharded(self.policy):
            wanted = bool(self.ranks.first(int(wanted)))  # every rank has a part of what rank 0 writes
        if not wanted:
            return
        written = write_version(self.settings, self.policy, version, ranks=self.ranks, base=self.base)
        if written is not None:
            location = announced(self.settings, written.location)
            policy.announce(version, location=location, size=written.size, checksum=written.checksum)

    # -- checkpoints -----------------------------------------------------------------------------------------------
    @property
    def _checkpoint_dir(self) -> Path:
        return self.output / "checkpoints"

    def _resume(self) -> None:
        """Loads the newest whole checkpoint; which one that is, rank 0 decides for all."""
        step, problems = checkpoints.newest(self._checkpoint_dir) if self.is_first else (0, [])
        instead = "an older checkpoint is used" if step else "there is no older one: training begins again at step 1"
        for problem in problems:
            self.event("warning", message=f"{problem}; {instead}")
        step = self.ranks.first(step)
        if step == 0:
            return
        loaded = checkpoints.load(self._checkpoint_dir, step, run=self.settings.run)
        path = checkpoints.path_of(self._checkpoint_dir, step)
        checkpoints.restore(path, self.policy, self.optimizer, ranks=self.ranks)
        self.reader.load_state_dict(loaded.reader)
        checkpoints.set_random_state(loaded.random)
        self.updates = loaded.updates
        self.trained = self.checkpointed = self.resumed_from = loaded.step

    def _checkpoint(self) -> None:
        """Every rank writes its part."""
        saved = checkpoints.save(
            self._checkpoint_dir,
            Checkpoint(
                step=self.trained,
                updates=self.updates,
                reader=self.reader.state_dict(),
                world_size=self.ranks.world_size,
                run=self.settings.run,
                random=checkpoints.random_state(),
            ),
            self.policy,
            self.optimizer,
            keep=self.settings.trainer.keep_checkpoints,
            ranks=self.ranks,
        )
        # The fresh weights count as checkpoint 0, because they can be made again: nothing is retired before a real
        # checkpoint is the oldest of `keep`, so a short run can be replayed, and looked into, from step 1.
        kept = saved[0] if len(saved) >= self.settings.trainer.keep_checkpoints else 0
        self.checkpointed = self.trained
        kept = self.ranks.first(kept)
        self.reader.checkpointed(self.trained, oldest_kept=kept)
        self.event("checkpoint", step=self.trained, path=str(checkpoints.path_of(self._checkpoint_dir, self.trained)))


def _seed(seed: int) -> None:
    """The same on every rank, so that a checkpoint's random states serve any world size."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _join(settings: RunSettings, device: torch.device) -> None:
    """Joins the process group. A rank that is lost ends the others' exchanges, at the latest after the timeout."""
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=settings.trainer.timeout_seconds + EXCHANGE_GRACE_SECONDS),
        )
