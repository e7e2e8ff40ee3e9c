"""Three envs of unequal speeds and shares: real server, batcher, workers and trainer; then one env's worker is killed.

``pytest -s tests/e2e/test_shares.py`` prints the seconds; the tests assert counts, sentences, exit codes and order.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from homes import Home
from paced import events, kill, start_trainer, start_worker

STEPS = 50
SHARES = {"slow": 0.5, "middle": 0.3, "fast": 0.2}
SECONDS = {"slow": 0.02, "middle": 0.02 / 3, "fast": 0.002}
"""Per group: speeds of 1 : 3 : 10."""
CONFIG = """
run = "shares"

[server]
appendfsync = "no"

[batcher]
row_tokens = 1024
micro_batches_per_rank = 2
max_age = 1
budgets = {{ slow = 0.5, middle = 0.3, fast = 0.2 }}
{batcher}

[model.config]
model_type = "qwen3"
vocab_size = 16
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
tie_word_embeddings = true
max_position_embeddings = 64

[trainer]
steps = 1000
timeout_seconds = {timeout}
"""


def write_config(home: Home, *, timeout: float = 30.0, **batcher: object) -> Path:
    path = home.path / "shares.toml"
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in batcher.items())
    path.write_text(CONFIG.format(timeout=timeout, batcher=settings))
    return path


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def waiting_sentences(home: Home) -> list[str]:
    return [event["sentence"] for event in events(home, "serve", "waiting")]


def names_env(sentence: str, env: str) -> bool:
    return f"{env} is " in sentence or f"{env} goes next" in sentence or f"{env} has sent nothing" in sentence


def totals(home: Home) -> str:
    """The batcher's waiting sentence, as `top --json` says it."""
    looked = home.call("top", "--once", "--run", "shares", "--json")
    assert looked.returncode == 0, looked.stderr
    return (json.loads(looked.stdout)["waiting"] or {}).get("sentence", "")


def start_all(home: Home, config: Path) -> dict[str, subprocess.Popen[str]]:
    home.start("serve", "--config", config, "--display", "json", log="serve")
    return {env: start_worker(home, "shares", env, seconds) for env, seconds in SECONDS.items()}


def trained_steps(home: Home) -> int:
    return max((r["step"] for r in home.metrics("shares")), default=0)


@pytest.mark.timeout(1800)
def test_shares_hold_and_an_env_whose_worker_was_killed_is_named_by_everyone(home: Home) -> None:
    """Takes a minute or two: shares hold over many steps only, and an env is dead after a time."""
    config = write_config(home)
    workers = start_all(home, config)
    train = home.start("train", "--config", config, "--display", "plain", log="train")
    home.wait_until(lambda: trained_steps(home) >= STEPS, seconds=1200, why=f"step {STEPS}")

    steps = events(home, "serve", "step")[:STEPS]
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    tokens: Counter[str] = Counter()
    for step in steps:
        tokens.update({env: record["tokens"] for env, record in step["envs"].items()})
    with home.connect("shares") as buffer:
        largest = max(g.tokens for g in buffer.groups(limit=10**6))
    drift = {env: abs(tokens[env] - share * tokens.total()) for env, share in SHARES.items()}
    fill = statistics.median(step["fill"] for step in steps)
    say(
        f"{STEPS} steps, {tokens.total()} tokens {dict(tokens)}: "
        f"off by { ({e: round(d) for e, d in drift.items()}) }, largest group {largest}; median fill {fill:.3f}"
    )
    assert max(drift.values()) <= largest
    assert fill >= 0.90

    kill(workers["slow"])
    killed = time.monotonic()
    home.wait_until(lambda: names_env(waiting_sentences(home)[-1], "slow"), seconds=60, why="the batcher's sentence")
    say(f"serve names it {time.monotonic() - killed:.1f} s after kill -9: {waiting_sentences(home)[-1]}")
    home.wait_until(lambda: names_env(totals(home), "slow"), seconds=60, why="top's sentence")
    say(f"top --json names it after {time.monotonic() - killed:.1f} s")
    plain = home.call("inspect", "--run", "shares", "--limit", "1").stdout
    assert names_env(" ".join(plain.split()), "slow"), plain

    assert home.ended(train, 240) == 5, home.logs()
    said = (home.path / "train.log").read_text().splitlines()[-1]
    say(f"train ended with exit code 5 after {time.monotonic() - killed:.1f} s: {said}")
    assert said.startswith("Error: no batch for step ")
    assert any(sentence in said for sentence in waiting_sentences(home) if names_env(sentence, "slow")), said

    before = max(s["step"] for s in events(home, "serve", "step"))
    again = home.start("train", "--config", config, "--display", "plain", log="train-again")
    home.wait_until(lambda: trained_steps(home) >= before, seconds=240, why="the resumed trainer's wait")
    assert max(s["step"] for s in events(home, "serve", "step")) == before
    assert home.call("env", "pause", "slow", "--run", "shares").returncode == 0
    paused = time.monotonic()
    home.wait_until(
        lambda: max(s["step"] for s in events(home, "serve", "step")) > before, seconds=60, why="a step after the pause"
    )
    say(f"the next step came {time.monotonic() - paused:.1f} s after `env pause`")
    after = next(s for s in events(home, "serve", "step") if s["step"] == before + 1)
    assert "slow" not in after["envs"]

    assert home.call("env", "resume", "slow", "--run", "shares").returncode == 0
    start_worker(home, "shares", "slow", SECONDS["slow"], name="slow-2")
    home.wait_until(
        lambda: "slow" in events(home, "serve", "step")[-1]["envs"], seconds=120, why="a step of the resumed env"
    )
    assert again.poll() is None, home.logs()
    again.terminate()
    assert home.ended(again, 120) == 130, home.logs()
    verified = home.call("verify", "--run", "shares")
    assert verified.returncode == 0, verified.stdout


@pytest.mark.parametrize(
    "settings",
    [
        {"on_dead_env": "borrow", "env_dead_after_seconds": 2.0},
        {"spillover": "borrow", "spill_after_seconds": 2.0},
        {"spillover": "partial", "spill_after_seconds": 2.0},
    ],
    ids=["borrow-dead", "borrow-short", "partial"],
)
def test_what_a_step_does_without_an_env_is_what_the_settings_say(home: Home, settings: dict[str, object]) -> None:
    workers = start_all(home, write_config(home, **settings))
    start_trainer(home, "shares", steps=10**6, timeout=600.0)
    home.wait_until(lambda: len(events(home, "serve", "step")) >= 5, seconds=120, why="the fifth step")
    kill(workers["slow"])
    home.wait_until(lambda: names_env(waiting_sentences(home)[-1], "slow"), seconds=60, why="the batcher's sentence")
    killed, before = time.monotonic(), len(events(home, "serve", "step"))

    home.wait_until(lambda: len(events(home, "serve", "step")) >= before + 4, seconds=120, why="four steps without it")
    taken = events(home, "serve", "step")[before + 1 : before + 4]
    say(f"{settings}: four steps after {time.monotonic() - killed:.1f} s, of {[sorted(s['envs']) for s in taken]}")
    assert all("slow" not in step["envs"] for step in taken)
    assert {step["closed_by"] for step in taken} <= (
        {"partial"} if settings.get("spillover") == "partial" else {"capacity", "fill"}
    )
    start_worker(home, "shares", "slow", SECONDS["slow"], name="slow-2")
    home.wait_until(
        lambda: "slow" in events(home, "serve", "step")[-1]["envs"], seconds=120, why="a step with it again"
    )


def test_on_dead_env_stop_ends_the_batcher_and_tells_the_trainer_why(home: Home) -> None:
    config = write_config(home, on_dead_env="stop", env_dead_after_seconds=2.0)
    serve = home.start("serve", "--config", config, "--display", "json", log="serve")
    workers = {env: start_worker(home, "shares", env, seconds) for env, seconds in SECONDS.items()}
    trainer = start_trainer(home, "shares", steps=10**6, timeout=600.0)
    home.wait_until(lambda: len(events(home, "serve", "step")) >= 5, seconds=120, why="the fifth step")
    kill(workers["slow"])
    killed = time.monotonic()
    assert home.ended(serve, 120) == 1, home.logs()
    assert home.ended(trainer, 120) == 1, home.logs()
    error = events(home, "trainer", "error")[-1]
    say(f"stopped {time.monotonic() - killed:.1f} s after kill -9: {error['text']}")
    reason = (home.path / "serve.log").read_text().splitlines()[-1].removeprefix("Error: ")
    assert error["kind"] == "BatcherFailed"
    assert error["text"] == f"the batcher of run 'shares' failed: RlbufferError: {reason}"
    assert names_env(reason, "slow")
    assert "batcher.on_dead_env" in reason
