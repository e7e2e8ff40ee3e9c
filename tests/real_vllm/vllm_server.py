"""vLLM's OpenAI-compatible server, as people start it for rlbuffer."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from own_server import free_port

ENGINE = {"dtype": "float32", "enforce_eager": True}
"""Engine arguments that a tiny model on the CPU wants."""
FEW_PROCESSES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Environment for engines on few cores: no process of its own for the model, no threads that wait for a core, and not
every engine on the same one. With them the conformance suite took a tenth of the time on two busy cores."""
START_SECONDS = 400.0


def with_tokenizer(model: str, directory: Path) -> Path:
    """A copy of a model directory with a tokenizer of the 13 symbols."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from rlbuffer.state.vocabulary import SYMBOLS

    shutil.copytree(model, directory)
    vocabulary = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SYMBOLS[10]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


class VllmServer:
    """vLLM's OpenAI-compatible server as people start it for rlbuffer."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        context: int,
        lora_rank: int = 0,
        mode: str = "processed_logprobs",
        more: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self.more, self.python = more, python
        self.model, self.log, self.context, self.lora_rank, self.mode = model, log, context, lora_rank, mode
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns at once; :meth:`until_ready` waits."""
        extension = "rlbuffer.worker.samplers.vllm_extension.WeightsExtension"
        command = [
            *(self.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(self.context)),
            *("--logprobs-mode", self.mode, "--enable-scale-out", "--worker-extension-cls", extension),
        ]
        if self.lora_rank:
            command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(self.lora_rank)]
        command += self.more
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the engine's own processes end with it
                env={
                    **os.environ,
                    **FEW_PROCESSES,
                    "VLLM_SERVER_DEV_MODE": "1",
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
                },
            )

    def kill(self) -> None:
        """Sends SIGKILL to the server and its engine."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    async def until_ready(self) -> None:
        """Waits until it answers; fails with its log when it does not."""
        import httpx

        deadline = time.monotonic() + START_SECONDS
        async with httpx.AsyncClient(base_url=self.url) as client:
            while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
                try:
                    if (await client.get("/health", timeout=2)).status_code == 200:
                        return
                except httpx.HTTPError:
                    await asyncio.sleep(0.5)
        pytest.fail(f"the vLLM server did not start:\n{self.log.read_text()[-4000:]}")
