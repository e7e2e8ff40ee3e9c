"""verl's asynchronous trainer on a local Ray with TransferQueue, as a user starts it, without engines and without a
model: its loop, its checkpoints, its replay buffer and its agent loop workers are verl's own. Started again, it goes on
from its newest checkpoint.

``python verl_loop.py RUN URL FOLDER`` starts a process for each line ``STEPS [stock]`` of its input, and says its pid:
to import verl takes ten seconds. What is sampled, finished and trained is written down as lines of JSON in FOLDER, for
the test alone. ``stock``: without the door.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl.trainer.config
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils.dataset.rl_dataset import collate_fn

from rlbuffer.doors.verl import rows_of

BATCH, SIZE, SAVE_EVERY, PROMPTS, THRESHOLD = 3, 2, 3, 10_000, 4
SAMPLE_SECONDS, TRAIN_SECONDS = 0.3, 0.4


def note(folder: str | Path, kind: str, **values: Any) -> None:
    with (Path(folder) / f"{kind}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "at": time.time(), **values}) + "\n")


def digest(row: Any) -> str:
    """Every field of a trajectory, with its type."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes())
        if isinstance(value, np.ndarray | np.generic):
            return (str(value.dtype), value.shape, value.tobytes())
        if isinstance(value, dict):
            return [(key, plain(item)) for key, item in sorted(value.items())]
        if isinstance(value, list | tuple):
            return (type(value).__name__, [plain(item) for item in value])
        return (type(value).__name__, value)

    return hashlib.sha256(repr(plain(row)).encode()).hexdigest()[:16]


def output(dice: random.Random, version: int) -> AgentLoopOutput:
    prompt, response = dice.randint(2, 9), dice.randint(2, 9)
    return AgentLoopOutput(
        prompt_ids=[dice.randrange(99_999) for _ in range(prompt)],
        response_ids=[dice.randrange(99_999) for _ in range(response)],
        response_mask=[1, *(dice.randint(0, 1) for _ in range(response - 1))],
        response_logprobs=[-dice.random() * 5 for _ in range(response)],
        routed_experts=np.array([[[dice.randrange(64)] * 4] * 2] * (prompt + response - 1)),
        reward_score=dice.choice([0.0, 1.0, 0.3]),
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": version,
            "max_global_steps": version,
            "reward_extra_info": {"acc": dice.random()},
            "many": [dice.random() for _ in range(20)],
        },
    )


class Agents(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's worker; in the place of a conversation with an engine stand drawn tokens and a drawn time."""

    def __init__(self, config: Any) -> None:
        self.config, self.folder = config, config.folder
        self.processor, self.reward_loop_worker_handles, self.distillation_enabled = None, None, False
        self.background_tasks: set[Any] = set()

    async def _run_prompt(self, prompt: dict[str, Any], *given: Any, **named: Any) -> None:
        uid, index = prompt["uid"], int(prompt["index"])
        note(self.folder, "sampled", uid=uid, index=index)
        await super()._run_prompt(prompt, *given, **named)
        note(self.folder, "finished", uid=uid, index=index)

    async def _run_agent_loop(
        self, sampling_params: Any, trajectory: dict[str, Any], *, agent_name: str, trace: bool = True, **prompt: Any
    ) -> None:
        dice = random.Random(os.urandom(8))
        version = int(prompt["global_steps"]) - 1
        await asyncio.sleep(SAMPLE_SECONDS * dice.expovariate(1.0))
        outputs = [output(dice, version) for _ in range(dice.choice([1, 1, 2]))]
        await self._agent_loop_postprocess(outputs, trajectory["validate"], **prompt)


class Manager(agent_loop_tq.AgentLoopManagerTQ):
    """verl's manager, of one worker in this process: to import verl in another one takes ten seconds."""

    def __init__(self, config: Any) -> None:
        self._agents = Agents(config)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def generate_sequences(self, prompts: Any) -> None:
        asyncio.run_coroutine_threadsafe(self._agents.generate_sequences(prompts), self._loop).result()


class Weights:
    """What a checkpoint holds beside the data loader and TransferQueue."""

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        Path(path).mkdir(parents=True)

    def load_checkpoint(self, **_: Any) -> None: ...


class Loop(PPOTrainerColocateAsync):
    """verl's trainer; in the place of its models stands a pause."""

    def _setup(self) -> None:
        rows = [
            {
                "raw_prompt": [{"role": "user", "content": f"{index}é"}],
                "data_source": "tiny",
                "reward_model": {"ground_truth": str(index)},
                "index": index,
                "extra_info": {"split": "train"},
                "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
            }
            for index in range(PROMPTS)
        ]
        order = torch.utils.data.RandomSampler(rows, generator=torch.Generator().manual_seed(1))
        self.train_dataloader = StatefulDataLoader(rows, batch_size=1, collate_fn=collate_fn, sampler=order)
        self.train_dataloader_it = None
        self.config.data.gen_batch_size = 1
        self.steps_per_epoch, self.total_training_steps = PROMPTS // BATCH, self.config.trainer.total_training_steps
        self.actor_rollout_wg = Weights()
        self.checkpoint_manager = Namespace(
            update_weights=lambda _: None,
            resume_generation_replicas=lambda: None,
            abort_replicas=lambda: None,
            sleep_replicas=lambda: None,
        )
        self.reward_loop_manager = Namespace(reward_loop_worker_handles=[])
        self.replay_buffer.poll_interval = 0.1
        self._init_dump_executor()
        self._load_checkpoint()

    def _start_profiling(self) -> None:
        self.curr_step_profile = False

    def _stop_profiling(self) -> None: ...

    def _same(self, batch: Any, **_: Any) -> Any:
        return batch

    _balance_batch = _compute_old_log_prob = _compute_ref_log_prob = _compute_advantage = _same

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        rows = rows_of(tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id))
        digests = [[key, int(row["index"]), digest(row)] for key, row in zip(batch.keys, rows, strict=True)]
        time.sleep(TRAIN_SECONDS)
        note(self.config.folder, "trained", step=self.global_steps, rows=digests, tags=[digest(t) for t in batch.tags])
        return batch

    def _compute_metrics(self, *_: Any, **__: Any) -> None: ...


def config(run: str, url: str, folder: str, steps: int, is_stock: bool) -> Any:
    file = Path(verl.trainer.config.__file__).parent / "_generated_ppo_trainer.yaml"
    made = OmegaConf.load(file)
    changes = [
        f"folder={folder}",
        f"data.train_batch_size={BATCH}",
        f"actor_rollout_ref.rollout.n={SIZE}",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "critic.enable=False",
        "trainer.v1.trainer_mode=colocate_async",
        f"trainer.v1.sampler.max_off_policy_threshold={THRESHOLD}",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={SAVE_EVERY}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.total_epochs=1000",
        "trainer.logger=[]",
        f"trainer.default_local_dir={folder}/checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
    if not is_stock:
        changes += [
            "trainer.v1.sampler.custom_sampler.path=pkg://rlbuffer.doors.verl",
            "trainer.v1.sampler.custom_sampler.name=ReplayBuffer",
            "trainer.checkpoint_callback_class=rlbuffer.doors.verl.CheckpointCallback",
            f"trainer.v1.sampler.sampler_kwargs.url={url}",
            f"trainer.v1.sampler.sampler_kwargs.run={run}",
        ]
    return OmegaConf.merge(made, OmegaConf.from_dotlist(changes))


def main(run: str, url: str, folder: str, steps: int, is_stock: bool) -> None:
    settings = config(run, url, folder, steps, is_stock)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 -- else its processes wait for all others of a busy machine
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        _temp_dir=f"{folder}/r",
        log_to_driver=False,
        object_store_memory=80_000_000,
    )
    tq.init(settings.transfer_queue)
    trainer = Loop(settings)
    trainer.init()
    trainer.fit(Manager(settings))
    if not is_stock:
        trainer.replay_buffer.journal.close()
    note(folder, "ended")
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        steps, *kind = line.split()
        if not (pid := os.fork()):
            os.setpgid(0, 0)  # its Ray is killed with it
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(f"{sys.argv[3]}/trainer.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                main(*sys.argv[1:4], int(steps), kind == ["stock"])
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        print(pid, flush=True)
