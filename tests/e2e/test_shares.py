"""Three envs of unequal speeds and shares, as real processes; then one env's worker is killed."""

from __future__ import annotations

import json
import statistics
from collections import Counter

import pytest
from homes import Home, model_section
from paced import events, kill, start_worker

STEPS = 20
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
step_groups = 0
max_age = 1
budgets = { slow = 0.5, middle = 0.3, fast = 0.2 }

[trainer]
steps = 1000
timeout_seconds = 15.0
"""


def waiting_sentences(home: Home) -> list[str]:
    return [event["sentence"] for event in events(home, "serve", "waiting")]


def names_env(sentence: str, env: str) -> bool:
    return f"{env} is " in sentence or f"groups of {env}" in sentence or f"{env} has sent nothing" in sentence


def totals(home: Home) -> str:
    """The batcher's waiting sentence, as `top --json` says it."""
    looked = home.call("top", "--once", "--run", "shares", "--json")
    assert looked.returncode == 0, looked.stderr
    return (json.loads(looked.stdout)["waiting"] or {}).get("sentence", "")


def trained_steps(home: Home) -> int:
    return max((r["step"] for r in home.metrics("shares")), default=0)


@pytest.mark.timeout(1800)
def test_shares_hold_and_an_env_whose_worker_was_killed_is_named_by_everyone(home: Home) -> None:
    """Takes a minute: each side waits until it has something to say."""
    config = home.path / "shares.toml"
    config.write_text(CONFIG + model_section())
    home.start("serve", "--config", config, "--display", "json", log="serve")
    workers = {env: start_worker(home, "shares", env, seconds) for env, seconds in SECONDS.items()}
    train = home.start("train", "--config", config, "--display", "plain", log="train")
    home.wait_until(lambda: trained_steps(home) >= STEPS, seconds=1200, why=f"step {STEPS}")

    steps = events(home, "serve", "step")[:STEPS]
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    tokens: Counter[str] = Counter()
    for step in steps:
        tokens.update({env: record["tokens"] for env, record in step["envs"].items()})
    with home.connect("shares") as buffer:
        largest = max(g.tokens for g in buffer.groups(limit=10**6))
    # An env may be ahead by more: by what all those are owed that have nothing ready.
    owed = {env: share * tokens.total() - tokens[env] for env, share in SHARES.items()}
    fill = statistics.median(step["fill"] for step in steps)
    assert max(owed.values()) <= largest
    assert fill >= 0.90

    kill(workers["slow"])
    home.wait_until(lambda: names_env(waiting_sentences(home)[-1], "slow"), seconds=60, why="the batcher's sentence")
    home.wait_until(lambda: names_env(totals(home), "slow"), seconds=60, why="top's sentence")
    plain = home.call("inspect", "--run", "shares", "--limit", "1").stdout
    assert names_env(" ".join(plain.split()), "slow"), plain

    assert home.ended(train, 240) == 5, home.logs()
    said = (home.path / "train.log").read_text().splitlines()[-1]
    assert said.startswith("Error: no batch for step ")
    assert any(sentence in said for sentence in waiting_sentences(home) if names_env(sentence, "slow")), said

    before = max(s["step"] for s in events(home, "serve", "step"))
    again = home.start("train", "--config", config, "--display", "plain", log="train-again")
    home.wait_until(lambda: trained_steps(home) >= before, seconds=240, why="the resumed trainer's wait")
    assert max(s["step"] for s in events(home, "serve", "step")) == before
    assert home.call("env", "pause", "slow", "--run", "shares").returncode == 0
    home.wait_until(
        lambda: max(s["step"] for s in events(home, "serve", "step")) > before, seconds=60, why="a step after the pause"
    )
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
