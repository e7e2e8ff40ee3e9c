"""vLLM's OpenAI-compatible server, as people start it for rlbuffer."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

ENGINE = {"dtype": "float32", "enforce_eager": True}
"""Engine arguments that a tiny model on the CPU wants."""
START_SECONDS = 400.0


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_tokenizer(model: str, directory: Path) -> Path:
    """A copy of a model directory with a tokenizer of the 13 symbols: `/v1/completions` wants one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from rlbuffer.worker.envs.vocabulary import SYMBOLS

    shutil.copytree(model, directory)
    vocabulary = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SYMBOLS[10]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


class VllmServer:
    """vLLM's OpenAI-compatible server as people start it for rlbuffer."""

    def __init__(self, model: Path, log: Path, *, context: int) -> None:
        self.model, self.log, self.context = model, log, context
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once; :meth:`ready` waits."""
        extension = "rlbuffer.worker.samplers.vllm_extension.WeightsExtension"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(self.context)),
            *("--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--worker-extension-cls", extension),
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the engine's own processes end with it
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
            )

    def kill(self) -> None:
        """kill -9 of the server and its engine."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[VllmServer]:
        """Started and answering; killed at the end."""
        import httpx

        self.start()
        try:
            async with httpx.AsyncClient(base_url=self.url) as client:
                for _ in range(round(START_SECONDS / 0.5)):
                    if self._process is None or self._process.poll() is not None:
                        break
                    try:
                        if (await client.get("/health", timeout=2)).status_code == 200:
                            yield self
                            return
                    except httpx.HTTPError:
                        await asyncio.sleep(0.5)
            pytest.fail(f"the vLLM server did not start:\n{self.log.read_text()[-4000:]}")
        finally:
            self.kill()
