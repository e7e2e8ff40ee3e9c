"""``python -m benchmarks.deltas_of_a_model MODEL LEARNING_RATE [STEPS]``: how small the deltas of a real model are.

MODEL is a folder of a language model, as `save_pretrained` writes it. Its weights are rounded to bfloat16 first, as a
published model's are; AdamW as rlbuffer makes it trains float32 masters on the model's own samples with random
advantages. Each version is published with its delta, rebuilt from the one before and compared.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rlbuffer.process.files import sha256_of
from rlbuffer.weights.delta import apply_delta, write_delta
from rlbuffer.weights.files import publish
from rlbuffer.weights.layout import DELTA_FILE, WEIGHTS_FILE
from rlbuffer.weights.state import model_state

GROUP, PROMPT, ANSWER = 8, 8, 40


def main(path: str, rate: float, steps: int) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # its methods carry no types
    model.eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(weights.bfloat16().float())
    prompts = torch.randint(0, model.config.vocab_size, (4, PROMPT)).repeat_interleave(4, 0)
    sampling = {"do_sample": True, "top_k": 0, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER, "pad_token_id": 0}
    with torch.inference_mode():
        rows = model.generate(prompts, **sampling).clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
    dice = np.random.default_rng(1)
    print("version  whole MB  delta MB  share  publish s  of it delta, wall (CPU) s  rebuild, wall (CPU) s  equal")
    with tempfile.TemporaryDirectory(prefix="rlb-") as folder:
        before = None
        for version in range(steps + 1):
            if version:
                _train(model, optimizer, rows, dice)
            state = model_state(model, dtype=torch.bfloat16)
            began = time.perf_counter()
            policy = publish(Path(folder), version, state=state, config={}, keep=2, with_delta=True)
            seconds = time.perf_counter() - began
            now = Path(policy.location)
            if before is not None:
                _show(version, before, now, seconds, Path(folder), policy.checksum)
            before = now
        if before is not None:
            _show_memory(Path(folder), before)


def _train(model: Any, optimizer: torch.optim.Optimizer, rows: torch.Tensor, dice: np.random.Generator) -> None:
    batch = rows[torch.from_numpy(dice.permutation(len(rows))[:GROUP])]
    advantages = torch.from_numpy(dice.standard_normal(GROUP)).float()
    logits = model(input_ids=batch, use_cache=False).logits[:, PROMPT - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(2, batch[:, PROMPT:, None])[..., 0]
    loss = -(torch.exp(logprobs - logprobs.detach()) * (advantages - advantages.mean())[:, None]).mean()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _show(version: int, before: Path, now: Path, seconds: float, folder: Path, checksum: str) -> None:
    delta, whole = now / DELTA_FILE, (now / WEIGHTS_FILE).stat().st_size
    wall, cpu = time.perf_counter(), time.process_time()
    write_delta(before / WEIGHTS_FILE, now / WEIGHTS_FILE, folder / "again")
    written = f"{time.perf_counter() - wall:.2f} ({time.process_time() - cpu:.2f})"
    wall, cpu = time.perf_counter(), time.process_time()
    made = apply_delta(before / WEIGHTS_FILE, delta, folder / "made")
    rebuilt = f"{time.perf_counter() - wall:.2f} ({time.process_time() - cpu:.2f})"
    is_equal = made == checksum == sha256_of(folder / "made")
    size = delta.stat().st_size
    print(
        f"{version:7}  {whole / 1e6:8.2f}  {size / 1e6:8.3f}  {size / whole:.3%}  {seconds:9.2f}  {written:>24}"
        f"  {rebuilt:>21}  {is_equal}",
        flush=True,
    )


def _show_memory(folder: Path, now: Path) -> None:
    before = next(path for path in sorted(folder.glob("v*")) if path != now)
    for name, work in (
        ("write", lambda: write_delta(before / WEIGHTS_FILE, now / WEIGHTS_FILE, folder / "again")),
        ("rebuild", lambda: apply_delta(before / WEIGHTS_FILE, now / DELTA_FILE, folder / "made")),
    ):
        tracemalloc.start()
        work()
        print(f"memory of {name}: {tracemalloc.get_traced_memory()[1] / 1e6:.0f} MB beside the mapped files")
        tracemalloc.stop()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 30)
