"""The harness of docs/examples, before `rlbuffer run` with a gateway and a real vLLM server: its reward rises."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from own_server import free_port
from taught_model import CONTEXT, guessing_model
from vllm_server import FEW_PROCESSES, VllmServer

if TYPE_CHECKING:
    from homes import Home

HARNESS = Path(__file__).parents[2] / "docs" / "examples" / "harness.py"
STEPS_AVERAGED = 3
RISE = 0.25
"""The mean reward of three steps rises so much over that of the first three; it begins below a half."""
CONFIG = """
run = "harness"

[server]
appendfsync = "no"

[batcher]
row_tokens = 8192
step_groups = 4
max_age = 4
advantage = "grpo"

[model]
path = "{model}"
dtype = "float32"

[trainer]
device = "cpu"
steps = 400
timeout_seconds = 300.0

[trainer.optimizer]
learning_rate = 1e-3

[trainer.checkpoint]
every = 1000

[gateway]
engines = ["{engine}"]
listen = "127.0.0.1:{port}"
"""


def test_a_harness_of_ones_own_learns_behind_the_gateway(home: Home, runner: asyncio.Runner, tmp_path: Path) -> None:
    model, port = guessing_model(tmp_path / "model"), free_port()
    more = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with VllmServer(model, tmp_path / "log", context=CONTEXT, more=more) as engine:
        runner.run(engine.until_ready())
        config = home.path / "rlbuffer.toml"
        config.write_text(CONFIG.format(model=model, engine=engine.url, port=port))
        home.environment |= FEW_PROCESSES | {"RLBUFFER_GATEWAY_TOKEN": "of-the-harness-alone"}
        run = home.start("run", config, "--display", "plain", log="run")
        home.wait_until(
            lambda: "listens at" in (home.path / "run.log").read_text() or run.poll() is not None,
            seconds=120,
            why="a gateway that listens",
        )
        assert run.poll() is None, home.logs()
        harness = home.start_python(str(HARNESS), f"http://127.0.0.1:{port}", log="harness")

        def rewards() -> list[float]:
            return [record["reward"] for record in home.metrics("harness")]

        def rise() -> float:
            means = [sum(rewards()[i : i + STEPS_AVERAGED]) / STEPS_AVERAGED for i in range(len(rewards()) - 2)]
            return means[-1] - means[0] if means else 0.0

        is_over = lambda: run.poll() is not None or harness.poll() is not None  # noqa: E731
        home.wait_until(lambda: rise() >= RISE or is_over(), seconds=480, why=f"a reward {RISE} higher")
        print(f"{len(rewards())} steps; rewards {[round(r, 3) for r in rewards()]}")
        assert not is_over(), home.logs()
        harness.kill()
        harness.wait()
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=120) == 130
    checked = home.call("verify", "--run", "harness")
    assert checked.returncode == 0, checked.stdout + checked.stderr
