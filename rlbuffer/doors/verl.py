"""The door of verl's asynchronous PPO trainers, of versions 0.9: a journal of the groups that are finished. ::

    trainer.v1.sampler.custom_sampler.path=pkg://rlbuffer.doors.verl
    trainer.v1.sampler.custom_sampler.name=ReplayBuffer
    trainer.checkpoint_callback_class=rlbuffer.doors.verl.CheckpointCallback

Prompts, agent loops, rewards, filters, loss, weights and checkpoints stay verl's own, and so does TransferQueue, which
it trains from. What changes: a finished group is pushed to the run, and verl sees it as finished when the run's stream
gives it; batches are in the order of the stream. A trainer that resumes puts the groups behind its checkpoint back into
TransferQueue, and does not dispatch their prompts when the data loader draws them again. ::

    pending -> running -> finished -> pushed -> taken -> in a batch -> trained
                                                      -> evicted by verl: unused

The state of the stream is a tag in TransferQueue, whose content verl's checkpoint holds.

Source: verl 0.9.1, trainer/ppo/v1/replay_buffer.py, trainer_base.py, agent_loop_tq.py; TransferQueue 0.1.11.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.client.stream import Stream, Taken
from rlbuffer.doors.drops import Drops
from rlbuffer.doors.labels import Labels
from rlbuffer.doors.needs import need, supported_version
from rlbuffer.doors.values import as_bytes, values_of
from rlbuffer.errors import InvalidRollout, RlbufferError
from rlbuffer.records.rollout import MIN_LOGPROB, Rollout, TokenSequence
from rlbuffer.records.spans import VersionSpan

KNOWN = ((0, 9), (0, 10))
"""Versions of verl from the first on and before the second."""
ENV = "verl"
RUN_VARIABLE = "RLBUFFER_RUN"
"""Environment variable with the name of the run, where `sampler_kwargs` name none; without it the settings say it."""
VALUES = "verl"
"""Attachment of a sequence: everything of its trajectory but the tokens."""
TRAIN = "train"
"""Partition of TransferQueue with what is trained."""
PLACE, STATE = "rlbuffer", "state"
"""Partition and key of the tag with the stream's state."""
POLL_SECONDS = 0.5
"""Pause between two looks for finished groups."""
WAITING_SECONDS = 10.0
"""Pause between two lines that say what a resumed trainer waits for."""
WAIT_SECONDS = 7 * 86_400.0
"""verl waits for groups as long as its workers are well, and so does the stream."""
IDS = ("prompts", "responses", "input_ids")
"""Fields that are the tokens, where they agree."""
DRAWN_ANEW = ("uid", "global_steps")
"""Fields of a prompt that differ when the data loader draws it again."""
MODULE = "verl.trainer.ppo.v1.replay_buffer"
NEEDED: Mapping[str, Sequence[str]] = {
    MODULE: ("ReplayBufferAsync",),
    "verl.trainer.ppo.checkpoint_callback": ("CheckpointCallback",),
    "verl.utils.tensordict_utils": ("list_of_dict_to_tensordict", "index_select_tensor_dict"),
    "transfer_queue": ("kv_list", "kv_put", "kv_batch_put", "kv_batch_get", "kv_clear"),
}
"""Module -> names of it that the door works with."""
NEEDED_OF_A_BUFFER = (
    "_sync_metadata_from_transfer_queue",
    "_stale_terminal_keys",
    "_clear_groups",
    "_select_prompt_uids",
    "sample",
)
NEEDED_OF_A_TRAINER = (
    "_resolve_filter_groups_metric",
    "_reissue_inflight_prompts",
    "_submit_batch_to_rollout",
    "_save_checkpoint",
    "checkpoint_callback",
)
_log = logging.getLogger(__name__)

Trajectory = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Fields and tag."""


def __getattr__(name: str) -> Any:
    """`ReplayBuffer` and `CheckpointCallback`, made when verl asks for them by their path."""
    if name in ("ReplayBuffer", "CheckpointCallback"):
        return _classes()[name]
    raise AttributeError(f"module 'rlbuffer.doors.verl' has no attribute {name!r}")


def check() -> None:
    """Raises RlbufferError in one sentence unless this is a verl that the door knows, with all that it needs."""
    version = supported_version("verl", "verl", "verl", KNOWN, "leave custom_sampler and checkpoint_callback_class out")
    for module, names in NEEDED.items():
        need("verl", module, importlib.import_module(module), *names, whose=f"verl {version}")
    buffer = importlib.import_module(MODULE).ReplayBufferAsync
    need("verl", "ReplayBufferAsync", buffer, *NEEDED_OF_A_BUFFER, whose=f"verl {version}")


def check_trainer(trainer: Any, mode: str) -> None:
    need("verl", "PPOTrainer", trainer, *NEEDED_OF_A_TRAINER, whose="this verl")
    if mode == "sync":
        raise RlbufferError(
            "trainer.v1.trainer_mode is sync, and rlbuffer.doors.verl keeps the groups of colocate_async and "
            "separate_async: a synchronous trainer has none beyond its own step"
        )
    if not isinstance(trainer.checkpoint_callback, _classes()["CheckpointCallback"]):
        raise RlbufferError(
            "rlbuffer.doors.verl must hear of checkpoints: set "
            "trainer.checkpoint_callback_class=rlbuffer.doors.verl.CheckpointCallback, or a class that extends it"
        )
    if trainer.config.skip.rollout_tq.enable:
        raise RlbufferError("skip.rollout_tq.enable puts recorded groups into TransferQueue: leave one of the two out")


# -- the codec ---------------------------------------------------------------------------------------------------------
def rollout_of(session: int, trajectories: Sequence[Trajectory], version: int, where: str) -> Rollout:
    """One session: its outputs in their order. `version` is the run's that sampled it.

    Raises:
        InvalidRollout: a field has a value that cannot be kept, such as an image; `where` and its path name it.
    """
    torch = importlib.import_module("torch")

    def fields(values: Mapping[str, Any], tag: Mapping[str, Any]) -> dict[str, Any]:
        ids, prompt = values["input_ids"], len(values["prompts"])
        mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
        mask[prompt:] = values["response_mask"].numpy() != 0
        mask[0] = False
        if "rollout_log_probs" in values:
            logprobs[prompt:] = np.clip(values["rollout_log_probs"].float().numpy(), MIN_LOGPROB, 0.0)
        agree = torch.equal(ids, torch.cat([values["prompts"], values["responses"]])) and ids.dtype == torch.int64
        kept = {name: value for name, value in values.items() if not agree or name not in IDS}
        packed = {"session": session, "prompt": prompt if agree else None, "tag": dict(tag), "fields": kept}
        return {
            "tokens": ids.numpy().astype(np.int32),
            "loss_mask": mask,
            "logprobs": logprobs,
            "version_spans": (VersionSpan(version, 0, len(ids)),),
            "attachments": {VALUES: as_bytes(packed, where)},
        }

    scores = trajectories[-1][0].get("rm_scores")
    reward = 0.0 if scores is None else float(scores.sum())
    first, *further = trajectories
    return Rollout(
        **fields(*first),
        reward=reward if math.isfinite(reward) else 0.0,
        further=tuple(TokenSequence(**fields(*sequence)) for sequence in further),
    )


def session_of(rollout: Rollout) -> tuple[int, list[Trajectory]]:
    """The inverse of :func:`rollout_of`. Raises PayloadError."""
    torch = importlib.import_module("torch")
    session, trajectories = 0, []
    for packed, sequence in zip(values_of(rollout, VALUES), rollout.sequences, strict=True):
        session, values, prompt = packed["session"], packed["fields"], packed["prompt"]
        if prompt is not None:
            ids = torch.from_numpy(sequence.tokens.astype(np.int64))
            values |= {"input_ids": ids, "prompts": ids[:prompt].clone(), "responses": ids[prompt:].clone()}
        trajectories.append((values, packed["tag"]))
    return session, trajectories


def rows_of(data: Any) -> list[dict[str, Any]]:
    """The rows of a TensorDict, without what all rows share."""
    torch = importlib.import_module("torch")
    stack = importlib.import_module("tensordict").NonTensorStack
    columns: dict[str, list[Any]] = {}
    for name, column in data.items():
        if isinstance(column, torch.Tensor):
            columns[name] = list(column.unbind())
        elif isinstance(column, stack):
            columns[name] = column.tolist()
    return [{name: column[row] for name, column in columns.items()} for row in range(len(data))]


def prompt_digest(row: Mapping[str, Any]) -> str:
    """Of what the data loader has drawn: the same when it draws the prompt again."""
    whole = hashlib.sha256()
    for name in sorted(row.keys() - set(DRAWN_ANEW)):
        with suppress(InvalidRollout):  # an image: the other fields tell prompts apart
            whole.update(name.encode() + as_bytes(row[name], name).tobytes())
    return whole.hexdigest()


# -- the seam ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class UntrainedGroup:
    """A group that the stream has given and the trainer has not trained."""

    place: int
    rollouts: tuple[str, ...]
    """Their ids."""


class Journal:
    """The run between TransferQueue and verl's sampling. The trainer's thread asks; two threads push and take."""

    def __init__(self, buffer: Buffer) -> None:
        self._tq = importlib.import_module("transfer_queue")
        self._tensordict = importlib.import_module("verl.utils.tensordict_utils").list_of_dict_to_tensordict
        self._buffer = buffer
        self._writer = buffer.writer(f"verl-{os.getpid()}")
        self._stream = buffer.stream(timeout_seconds=WAIT_SECONDS)
        self._lock = threading.Lock()
        self._pushed: dict[str, tuple[str, int]] = {}
        """Group of the run -> uid and number of rollouts, of those that are pushed and not taken yet."""
        self._standing: dict[str, UntrainedGroup] = {}
        """uid -> what the stream has given, in its order."""
        self._evicted: set[str] = set()
        self._dropped: set[str] = set()
        """uids that the batcher has dropped, and verl has not evicted yet."""
        self._given, self._taken = 0, 0
        """Last place in a batch; last place that the stream has given."""
        self._saved = 0
        """Place of the newest checkpoint."""
        self._again: Counter[str] = Counter()
        """Digests of prompts that stand here, and that the data loader will draw again."""
        self._status: dict[str, str] = {}
        """uid -> status of its prompt in the checkpoint."""
        self._before: set[str] = set()
        """uids that verl had evicted before the checkpoint, and whose places are behind it."""
        self._error: BaseException | None = None
        self._is_closed = threading.Event()

    # -- beginning -----------------------------------------------------------------------------------------------------
    def begin(self, step: int) -> None:
        """Behind the checkpoint of that step: puts what stands in the run into TransferQueue."""
        there = self._tq.kv_list() or {}
        tag = there.get(PLACE, {}).get(STATE)
        state = None if tag is None else json.loads(tag["state"])
        self._status = {uid: each["status"] for uid, each in there.get(TRAIN, {}).items() if each.get("is_prompt")}
        self._before = set() if state is None else {*state["evicted"]}
        self._stream.resume(state["stream"] if state is not None else None if step else Stream.BEGINNING)
        self._given = self._taken = self._saved = self._stream.place
        self._labels = Labels(self._stream, step)
        self._drops = Drops(self._buffer.store, ENV)
        self._start(self._take)
        self._wait_for_all()
        if self._standing:
            _log.info("%d groups behind the checkpoint of step %d stand in the run", len(self._standing), step)
        self._start(self._push_finished)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # the trainer must hear of it, in its own thread
                self._error = error

        threading.Thread(target=run, name="rlbuffer-journal", daemon=True).start()

    def _wait_for_all(self) -> None:
        """Until the stream has given all that was ever pushed."""
        waited = 0.0
        while True:
            self.check()
            account = self._buffer.ledger().envs.get(ENV)
            pending = 0 if account is None else account.pending[0]
            if not pending and self._taken >= self._buffer.store.meta().step:
                return
            if self._is_closed.wait(0.1):
                return
            waited += 0.1
            if waited >= WAITING_SECONDS:
                waited = 0.0
                _log.warning("%d rollouts wait for `rlbuffer serve` to commit them", pending)

    def check(self) -> None:
        """Raises what has ended one of the threads."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Leaves the run; acknowledges nothing."""
        self._is_closed.set()
        self._stream.close()
        self._buffer.close()

    # -- taking --------------------------------------------------------------------------------------------------------
    def _take(self) -> None:
        for taken in self._stream:
            uid = taken.prompt_id
            with self._lock:
                is_own = taken.group_id in self._pushed
            is_there = is_own or self._is_restored(uid, taken)
            with self._lock:
                self._standing[uid] = UntrainedGroup(
                    taken.place, tuple(rollout.rollout_id for rollout in taken.rollouts)
                )
                if not is_there:
                    self._evicted.add(uid)
                self._pushed.pop(taken.group_id, None)
            self._taken = taken.place

    def _is_restored(self, uid: str, taken: Taken) -> bool:
        """Puts a group of an earlier process into TransferQueue, as agent loops do. False: verl is not to have it."""
        if uid in self._before or not taken.rollouts:
            return False
        status = self._status.get(uid)
        if status == "finished":
            return True  # it came with the checkpoint
        if status is not None:  # some of its sessions may have ended before the checkpoint
            parts = [key for key in self._tq.kv_list(TRAIN)[TRAIN] if key.startswith(f"{uid}_")]
            if parts:
                self._tq.kv_clear(keys=parts, partition_id=TRAIN)
        for rollout in taken.rollouts:
            session, trajectories = session_of(rollout)
            self._tq.kv_batch_put(
                keys=[f"{uid}_{session}_{index}" for index in range(len(trajectories))],
                fields=self._tensordict([dict(fields) for fields, _ in trajectories]),
                tags=[dict(tag) for _, tag in trajectories],
                partition_id=TRAIN,
            )
        tag = {"is_prompt": True, "status": "finished", "global_steps": taken.metadata["global_steps"]}
        self._tq.kv_put(key=uid, partition_id=TRAIN, tag=tag)
        if status is None:  # its prompt was drawn behind the checkpoint
            self._again[taken.metadata["prompt"]] += 1
        return True

    def drawn(self, batch: Any) -> list[int]:
        """Rows of the drawn prompts whose groups do not stand here."""
        rows = []
        for number, row in enumerate(rows_of(batch)):
            digest = prompt_digest(row) if self._again else ""
            if self._again[digest] > 0:
                self._again[digest] -= 1
            else:
                rows.append(number)
        self._again += Counter()  # forgets those at 0
        return rows

    # -- pushing -------------------------------------------------------------------------------------------------------
    def _push_finished(self) -> None:
        while not self._is_closed.wait(POLL_SECONDS):
            with self._lock:
                journaled = {*self._standing, *self._dropped, *(uid for uid, _ in self._pushed.values())}
            there = (self._tq.kv_list(TRAIN) or {}).get(TRAIN, {})
            finished = {uid for uid, tag in there.items() if tag.get("is_prompt") and tag["status"] == "finished"}
            if new := finished - journaled:
                keys: dict[str, list[tuple[int, int, str]]] = {uid: [] for uid in sorted(new)}
                for key in there:
                    uid, *numbers = key.split("_")
                    if uid in new and numbers:
                        keys[uid].append((int(numbers[0]), int(numbers[1]), key))
                for uid, group_keys in keys.items():
                    self._push(uid, there[uid]["global_steps"], sorted(group_keys), there)
            for group_id, rollouts in self._drops.new().items():
                with self._lock:
                    uid, size = self._pushed.get(group_id, ("", 0))
                    if uid and rollouts >= size:
                        del self._pushed[group_id]
                        self._dropped.add(uid)

    def _push(self, uid: str, step: int, keys: Sequence[tuple[int, int, str]], tags: Mapping[str, Any]) -> None:
        if not keys:  # all of its sessions came back empty
            with self._lock:
                self._dropped.add(uid)
            return
        starts = [start for _, _, key in keys if (start := tags[key].get("min_global_steps")) is not None]
        version = self._labels.version(min(starts, default=None))
        sessions: dict[int, list[str]] = {}
        for session, _, key in keys:
            sessions.setdefault(session, []).append(key)
        rollouts = []
        for session, session_keys in sessions.items():
            rows = rows_of(self._tq.kv_batch_get(keys=session_keys, partition_id=TRAIN))
            trajectories = [(row, tags[key]) for row, key in zip(rows, session_keys, strict=True)]
            rollouts.append(rollout_of(session, trajectories, version, f"session {session} of prompt {uid}"))
        (prompt,) = rows_of(self._tq.kv_batch_get(keys=[uid], partition_id=TRAIN))
        (ticket,) = self._writer.take(ENV, hold=1)
        with self._lock:
            self._pushed[ticket.group_id] = uid, len(rollouts)
        metadata = {"prompt": prompt_digest(prompt), "global_steps": step}
        self._writer.push(ticket, rollouts, prompt_id=uid, planned_size=len(rollouts), metadata=metadata)

    # -- the trainer's thread ------------------------------------------------------------------------------------------
    def visible(self) -> set[str]:
        """uids that verl may see as finished."""
        with self._lock:
            return {*self._standing, *self._dropped}

    def dropped(self) -> set[str]:
        with self._lock:
            return set(self._dropped)

    def places(self) -> dict[str, int]:
        """uid -> its place in the stream."""
        with self._lock:
            return {uid: standing.place for uid, standing in self._standing.items()}

    def evicted(self, uids: Iterable[str]) -> None:
        """verl does not train these."""
        with self._lock:
            self._evicted |= set(uids) & self._standing.keys()
            self._dropped -= set(uids)

    def batch(self, uids: Iterable[str]) -> None:
        """verl is given these now."""
        places = self.places()
        self._given = max([self._given, *(places[uid] for uid in uids)])

    def trained(self) -> None:
        """What verl was given is trained."""
        with self._lock:
            done = {uid: standing for uid, standing in self._standing.items() if standing.place <= self._given}
            unused = [rollout for uid in self._evicted & done.keys() for rollout in done[uid].rollouts]
            for uid in done:
                del self._standing[uid]
            self._evicted -= done.keys()
        if done:
            self._stream.trained(self._given, unused=unused)

    def version(self, step: int) -> None:
        """The weights of this step are sampled from."""
        self._labels.version(step)

    def keep_state(self) -> None:
        """Puts the place of a checkpoint that is written now into TransferQueue."""
        self.trained()
        with self._lock:
            state = {"stream": self._stream.state, "evicted": sorted(self._evicted)}
        self._tq.kv_put(key=STATE, partition_id=PLACE, tag={"state": json.dumps(state)})

    def checkpointed(self) -> None:
        """A checkpoint is written. As it may be on its way to the disk, the one before can be resumed from, too."""
        place = self._stream.place
        self._stream.checkpointed(place, oldest_kept=self._saved)
        self._saved = place


@functools.cache
def _classes() -> Mapping[str, Any]:
    check()
    theirs = importlib.import_module(MODULE)
    callbacks = importlib.import_module("verl.trainer.ppo.checkpoint_callback")
    select = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict

    class ReplayBuffer(theirs.ReplayBufferAsync):  # type: ignore[misc, name-defined]
        """verl's own sampling, over the groups that the run has.

        `sampler_kwargs` may name `url` and `run`; otherwise they are those of ``RLBUFFER_REDIS_URL`` and
        ``RLBUFFER_RUN``.

        Raises:
            RlbufferError: the trainer is synchronous, does not call the door's checkpoint callback, or lacks a name
                that the door needs.
        """

        def __init__(self, *, trainer_mode: str, sampler_kwargs: Any, refill_fn: Any, **others: Any) -> None:
            trainer: Any = getattr(refill_fn, "__self__", None)
            check_trainer(trainer, trainer_mode)
            super().__init__(
                trainer_mode=trainer_mode,
                sampler_kwargs=sampler_kwargs,
                refill_fn=refill_fn,
                filter_groups_metric=trainer._resolve_filter_groups_metric(),  # verl gives it to its own classes alone
                **others,
            )
            named = dict(sampler_kwargs or {})
            run = named.get("run") or os.environ.get(RUN_VARIABLE)
            self.journal = Journal(connect(named.get("url"), **({"run": run} if run else {})))
            self._extend(trainer)

        def _extend(self, trainer: Any) -> None:
            """The three moments of the trainer that no hook tells of."""
            journal = self.journal
            reissue, submit, save = (
                trainer._reissue_inflight_prompts,
                trainer._submit_batch_to_rollout,
                trainer._save_checkpoint,
            )

            def reissue_inflight_prompts(*given: Any, **named: Any) -> Any:
                journal.begin(trainer.global_steps - 1)
                return reissue(*given, **named)

            def submit_batch_to_rollout(batch: Any) -> int:
                rows = journal.drawn(batch)
                if rows:
                    submit(batch if len(rows) == len(batch) else select(batch, rows))
                return len(batch)

            def save_checkpoint() -> None:
                journal.keep_state()
                save()

            trainer._reissue_inflight_prompts = reissue_inflight_prompts
            trainer._submit_batch_to_rollout = submit_batch_to_rollout
            trainer._save_checkpoint = save_checkpoint

        def _sync_metadata_from_transfer_queue(self) -> None:
            """A finished group goes on running until the stream has given it."""
            visible = self.journal.visible()  # before the look: a group that is visible is finished in it
            super()._sync_metadata_from_transfer_queue()
            hidden = self.finished_keys[TRAIN] - visible
            self.finished_keys[TRAIN] -= hidden
            self.running_keys[TRAIN] |= hidden

        def _stale_terminal_keys(self, global_steps: int, partition_id: str) -> set[str]:
            stale = super()._stale_terminal_keys(global_steps, partition_id)
            return {*stale, *(self.journal.dropped() & self.finished_keys[partition_id])}

        def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
            super()._clear_groups(partition_id, uids)
            if partition_id == TRAIN:
                self.journal.evicted(uids)

        def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
            if partition_id != TRAIN:
                return super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
            places = self.journal.places()
            chosen = sorted(sampleable_keys, key=places.__getitem__)[:batch_size]
            trajectories = {key: tag for key, tag in self.partitions[TRAIN].items() if key.split("_")[0] in chosen}

            def place(key: str) -> tuple[int, int, int]:
                uid, session, index = key.split("_")
                return places[uid], int(session), int(index)

            ordered = {key: trajectories[key] for key in sorted(trajectories, key=place)}
            self.journal.batch(chosen)
            return chosen, ordered, dict(self.prompt_global_steps[TRAIN])

        def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> Any:
            self.journal.check()
            return super()._wait_for_next_poll(partition_id, last_debug_time)

        def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
            if partition_id == TRAIN:
                self.journal.trained()  # the batch before this one
                self.journal.version(global_steps - 1)
            return super().sample(global_steps, partition_id, batch_size)

    class CheckpointCallback(callbacks.CheckpointCallback):  # type: ignore[misc, name-defined]
        """Says to the run that a checkpoint is written. A class that extends it calls its `on_save`."""

        def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **named: Any) -> None:
            super().on_save(trainer, global_step, checkpoint_dir, **named)
            trainer.replay_buffer.journal.checkpointed()

    return {"ReplayBuffer": ReplayBuffer, "CheckpointCallback": CheckpointCallback}
