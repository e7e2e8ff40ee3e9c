"""Jobs of the launcher on a GPU: what is trained, published, checkpointed and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import QWEN3_MOE, made
from parameters import load_parameters
from safetensors.torch import load_file

from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.trainer.session import device_of
from rlbuffer.weights.layout import versions
from rlbuffer.weights.model import TINY_QWEN3
from rlbuffer.weights.state import model_state

LAUNCH = """
import sys
from rlbuffer.config.settings import from_json
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.launch.launcher import launch
sys.exit(launch(from_json(sys.argv[1]), world_size=1, source=FakeRun))
"""


def settings_of(output: Path, *, dtype: str = "bfloat16", deterministic: bool = False, **trainer: Any) -> RunSettings:
    values = {"steps": 4, "output": output, "reports": {"check_ranks": True}, "checkpoint": {"every": 2}} | trainer
    return RunSettings(
        home=output,
        deterministic=deterministic,
        batcher={"row_tokens": 128, "micro_batches_per_rank": 2},
        model={"config": dict(TINY_QWEN3) | {"num_key_value_heads": 2}, "dtype": dtype},
        trainer=values,
    )


def launched(*jobs: RunSettings) -> list[list[dict[str, Any]]]:
    """Runs them side by side. -> their records."""
    started = [
        subprocess.Popen([sys.executable, "-c", LAUNCH, to_json(job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for job in jobs
    ]
    ends = [process.communicate(timeout=300) for process in started]
    assert [(process.returncode, errors) for process, (_, errors) in zip(started, ends, strict=True)] == [
        (0, b"")
    ] * len(jobs)
    texts = [(job.output_dir / "metrics.jsonl").read_text() for job in jobs]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def test_a_gpu_is_taken_where_there_is_one_and_trains_what_the_cpu_trains(tmp_path: Path) -> None:
    ours = settings_of(tmp_path / "gpu", dtype="float64")
    assert device_of(ours) == torch.device("cuda", 0)
    ours_trained, expected = launched(ours, settings_of(tmp_path / "cpu", dtype="float64", device="cpu"))
    for mine, right in zip(ours_trained, expected, strict=True):
        assert mine["loss"] == pytest.approx(right["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-6)
        assert mine["entropy"] == pytest.approx(right["entropy"], rel=1e-6)
        assert {"forward", "backward"} <= mine["ranks"][0].keys()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"layout": "padded"},
        {"lora": {"rank": 4}},
        {"optimizer": {"passes": 2, "updates_per_pass": 2}, "loss": {"name": "kl_cov", "entropy_bonus": 0.01}},
    ],
    ids=str,
)
def test_a_job_in_bfloat16_that_is_resumed_ends_with_the_bits_of_one_that_is_not(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    whole, half = (settings_of(tmp_path / name, deterministic=True, **options) for name in ("whole", "half"))
    first = half.model_copy(update={"trainer": half.trainer.model_copy(update={"steps": 2})})
    records, _ = launched(whole, first)
    (resumed,) = launched(half)
    assert [r["parameters_sha256"] for r in resumed] == [r["parameters_sha256"] for r in records]
    assert resumed[-1]["resumed_from"] == 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_what_is_published_is_converted_beside_the_gpu(dtype: torch.dtype | None) -> None:
    """Experts are published one by one, which copies all of them."""
    model = made(QWEN3_MOE).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert {tensor.device.type for tensor in model_state(model, dtype=dtype).values()} == {"cpu"}
    assert torch.cuda.max_memory_allocated() == before


def test_versions_are_the_trained_parameters_in_bfloat16(tmp_path: Path) -> None:
    (records,) = launched(settings_of(tmp_path))
    (folder,) = versions(tmp_path / "weights")[4]
    trained = load_parameters(tmp_path, 4)
    published = load_file(folder / "model.safetensors")
    assert published
    for name, tensor in published.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, trained[f"model.{name}"].to(torch.bfloat16))
    assert all(0 < record["memory_bytes"] < 2**30 for record in records)
