"""A producer on another host: ``python trl_host.py PORT URL RUN`` runs TRL's rollout loop for a trainer elsewhere, with
the engine of trl_parts.py; ``... vllm`` with vLLM."""

from __future__ import annotations

import functools
import sys

import requests
import trl.experimental.async_grpo.async_rollout_worker as rollout_worker
from accelerate.state import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl_user import ARGUMENTS, FOLDER, NotingLoop, note, reward

import rlbuffer
from rlbuffer.records.policy_version import PolicyVersion


def load(engine: str, server: str, version: PolicyVersion) -> None:
    """Brings published weights into the engine."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": version.location}}
    calls: list[tuple[str, object]] = [("load", {"file": f"{version.location}/model.safetensors"})]
    if engine == "vllm":
        calls = [("pause?mode=keep", None), ("collective_rpc", reload), ("reset_prefix_cache", None), ("resume", None)]
    for path, body in calls:
        requests.post(f"{server}/{path}", json=body, timeout=600).raise_for_status()
    note("loaded", version=version.version, labels=dict(version.labels))


def main(port: str, url: str, run: str, engine: str = "parts") -> None:
    PartialState()
    rollout_worker._AsyncRolloutLoop = NotingLoop
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    rlbuffer.doors.trl.work(
        url,
        run=run,
        load=functools.partial(load, engine, f"http://127.0.0.1:{port}"),
        model_name=str(FOLDER / "model"),
        dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}?"}] for i in range(4000)]}),
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=ARGUMENTS["num_generations"],
        max_inflight_tasks=ARGUMENTS["max_inflight_tasks"],
        max_tokens=ARGUMENTS["max_completion_length"],
        vllm_server_url=f"http://127.0.0.1:{port}",
        chat_template_kwargs={"enable_thinking": False},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
