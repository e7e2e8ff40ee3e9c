"""vLLM opens a published version as it opens any model, and answers chats by its template."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import torch
from chat_model import CHAT_CONFIG, CHAT_IDS, GENERATION, MESSAGES, WORDS, write_chat_model
from vllm_server import ENGINE, VllmServer

from rlbuffer.config.settings import RunSettings
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.weights.companions import companions
from rlbuffer.weights.files import publish_adapter, publish_base
from rlbuffer.weights.layout import versions
from rlbuffer.weights.model import build_model, config_of
from rlbuffer.weights.state import model_state

CONTEXT, RANK = 64, 8


def test_an_engine_opens_a_trained_version_with_its_template(tmp_path: Path) -> None:
    from vllm import LLM, SamplingParams

    settings = RunSettings(
        home=tmp_path,
        batcher={"row_tokens": 128},
        model={"path": str(write_chat_model(tmp_path / "model"))},
        trainer={"steps": 1, "output": tmp_path / "out", "device": "cpu"},
    )
    assert train(settings, rank=0, world_size=1, source=FakeRun)
    (directory,) = versions(tmp_path / "out" / "weights")[1]
    engine = LLM(model=str(directory), max_model_len=CONTEXT, **ENGINE)
    assert engine.get_default_sampling_params().temperature == GENERATION["temperature"]
    (answer,) = engine.chat(MESSAGES, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert answer.prompt_token_ids == CHAT_IDS
    assert len(answer.outputs[0].token_ids) == 4
    assert set(answer.outputs[0].text.split()) <= set(WORDS)


def test_a_server_answers_chats_with_an_adapters_version_and_its_base(runner: asyncio.Runner, tmp_path: Path) -> None:
    model_path = write_chat_model(tmp_path / "model")
    model = build_model(RunSettings(model={"path": str(model_path)}).model, seed=0)
    beside = companions(model_path)
    base = publish_base(tmp_path / "weights", state=model_state(model), config=config_of(model), beside=beside)
    width, heads = CHAT_CONFIG["hidden_size"], CHAT_CONFIG["head_dim"] * CHAT_CONFIG["num_attention_heads"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    factors = {name.format("A"): torch.ones(RANK, width), name.format("B"): torch.ones(heads, RANK)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.location,
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    adapter = publish_adapter(tmp_path / "weights", 0, state=factors, config=config, base=base, keep=2, beside=beside)

    async def usage(url: str, model: str) -> dict[str, int]:
        asked = {"model": model, "messages": MESSAGES, "max_tokens": 4, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            answer = await client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        return answer.json()["usage"]

    more = ("--lora-modules", f"ours={adapter.location}")
    with VllmServer(Path(base.location), tmp_path / "log", context=CONTEXT, lora_rank=RANK, more=more) as server:
        runner.run(server.until_ready())
        for served in ("ours", base.location):
            found = runner.run(usage(server.url, served))
            assert (found["prompt_tokens"], found["completion_tokens"]) == (len(CHAT_IDS), 4)
