"""A live run as docs/guide/deploy.md has it: every process is a user of its own of deploy/users.acl, and no more.

`/metrics`, asked as anybody would: every metric of the page is there, and true.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
import waits
from fake_engine import FakeEngine
from forked import Parent
from homes import Home, a_home
from own_server import OwnServer, free_port

from rlbuffer.client.scrapes import READ_SECONDS
from rlbuffer.records.waiting import Wait
from rlbuffer.state.metric import Metric
from rlbuffer.state.prometheus import METRIC_PREFIX, all_metrics
from rlbuffer.state.run_state import EnvState
from rlbuffer.store.server.binary import find_binary
from rlbuffer.testing import make_group

SELDOM = {
    "worker_failed_groups_total": "no group fails here",
    "rollouts_failed_total": "no attempt fails here",
    "server_errors_total": "the server answers",
    "train_experts_unrecorded_ratio": "the model has no experts",
    "train_mfu_ratio": "the peak of a CPU is not known",
    "train_support_ratio": "every token of the vocabulary may be drawn",
    "train_reward_part_mean": "these envs name no parts of a reward",
    "train_correction_weight_mean": "the loss has no correction",
    "problem": "nothing is to be cured",
    "waiting": "the batcher works",
    "processes_waiting": "nobody waits",
    "server_memory_limit_bytes": "the server may have none",
    "worker_weights_bytes": "workers see the trainer's folder",
}
"""Metric -> why a healthy run may have no value of it."""
SCORER = """
[score.ref]
model = "initial"
device = "cpu"
"""
SAMPLE = re.compile(r"^(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rlbuffer.rules.yml"
USERS = ROOT / "deploy" / "users.acl"
ADMIN = "user root on >CHANGE-root ~* &* +@all"


class Live:
    """A tiny run at work, and the address of its metrics."""

    def __init__(self, home: Home, server: OwnServer, engine: str) -> None:
        self.home, self.server, self.engine = home, server, engine
        self.url = ""
        self.opened: list[dict[str, str]] = []
        """What the gateway has answered to whoever began a rollout."""

    def as_user(self, role: str) -> None:
        """What begins now logs in as this role."""
        address = self.server.url.replace("//", f"//{role}:CHANGE-{role}@")
        self.home.environment["RLBUFFER_REDIS_URL"] = self.home.url = address

    def says(self, role: str, *arguments: str) -> str:
        """What a command of this role prints."""
        self.as_user(role)
        ended = self.home.call(*arguments, "--run", "tiny")
        assert ended.returncode == 0, ended.stdout + ended.stderr + self.home.logs()
        return ended.stdout

    def begin(self) -> None:
        self.home.environment["RLBUFFER_METRICS__LISTEN"] = "127.0.0.1:0"
        path = self.home.config(steps=100_000, world_size=1, checkpoint_every=3)
        text = path.read_text().replace("vocab_size = 16", "vocab_size = 13")
        path.write_text(text.replace("[trainer]\n", "[trainer]\nloss = { kl_beta = 0.1 }\n") + SCORER)
        for role, name, *arguments in (
            ("operator", "serve", "serve", "--display", "plain"),
            ("worker", "vcopy", "worker", "vcopy", "--display", "plain"),
            ("worker", "repeat", "worker", "repeat", "--display", "plain"),
            ("scorer", "score", "score", "ref"),
            ("trainer", "train", "train", "--display", "plain"),
        ):
            self.as_user(role)
            self.home.start(*arguments, "--config", path, log=name)
        agents = f"127.0.0.1:{free_port()}"
        self.as_user("gateway")
        self.home.start("gateway", "--engine", self.engine, "--listen", agents, "--config", path, log="gateway")
        self.as_user("root")
        self.home.wait_until(self._find, seconds=180, why="the metrics of serve")
        self.home.wait_until(lambda: self._opens(agents), seconds=180, why="an open rollout")
        with self.home.connect() as buffer:
            buffer.writer("a-test").push(make_group(env="vcopy", seed=10**9, version=10**6))
        self.home.wait_until(self._has_everything, seconds=180, why="a few steps, a drop and a checkpoint")

    def text(self) -> str:
        with urllib.request.urlopen(self.url, timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            return str(answer.read().decode())

    def samples(self) -> dict[str, float]:
        """`name{labels}` -> value."""
        return {
            f"{metric}{{{labels or ''}}}": float(value)
            for metric, labels, value in SAMPLE.findall(self.text())
            if not metric.startswith("#")
        }

    def _opens(self, agents: str) -> bool:
        """Begins a rollout of an agent, which asks nothing."""
        try:
            body = {"env": "vcopy", "key": "one"}
            answer = httpx.post(f"http://{agents}/v1/open_rollouts", json=body, timeout=60)
        except httpx.HTTPError:  # it does not listen yet
            return False
        self.opened = answer.json().get("open_rollouts", [])
        return bool(self.opened)

    def _find(self) -> bool:
        log = self.home.path / "serve.log"
        match = re.search(r"metrics: (http://\S+)", log.read_text() if log.exists() else "")
        self.url = match[1] if match else ""
        return bool(match)

    def _has_everything(self) -> bool:
        said = self.samples()

        def value(metric: str, labels: str = "") -> float:
            return said.get(f'{METRIC_PREFIX}{metric}{{{labels}run="tiny"}}', 0)

        return (
            value("step") >= 5
            and value("rollouts_dropped_total", 'env="vcopy",reason="future",') > 0
            and value("train_checkpoint_step") >= 3
            and sum("rlbuffer_worker_groups_total" in key and number > 0 for key, number in said.items()) == 2
        )


@pytest.fixture(scope="module")
def live(parent: Parent) -> Iterator[Live]:
    with a_home(parent) as home:
        users = home.path / "users.acl"
        users.write_text(f"{USERS.read_text().rstrip()}\n{ADMIN}\n")
        options = {"aclfile": str(users)}
        with OwnServer(home.path / "own", options=options, program=str(find_binary().path)) as server:
            engine = FakeEngine().start()
            run = Live(home, server, engine.url)
            try:
                run.begin()
                yield run
            finally:
                home.stop()
                engine.stop()


def test_every_metric_of_the_page_is_answered_with_its_kind_and_a_sensible_value(live: Live) -> None:
    text = live.text()
    samples = live.samples()
    missing = []
    metrics = [metric for _, _, metric in all_metrics()]
    for metric in metrics:
        values = {key: value for key, value in samples.items() if _is_of(key, metric)}
        if not values and metric.name not in SELDOM:
            missing.append(metric.name)
        if values:
            assert f"# TYPE {METRIC_PREFIX}{metric.name} {metric.kind}\n" in text
        for key, value in values.items():
            assert 'run="tiny"' in key
            assert all(f'{label}="' in key for label in metric.labels)
            if metric.name.endswith("_ratio"):
                assert 0 <= value <= 1, key
            if metric.kind == "counter":
                assert value >= 0, key
    assert missing == [], "no run gives these a value; SELDOM says of which that is right, and why"
    documented = {METRIC_PREFIX + metric.name for metric in metrics}
    assert {re.sub(r"_(bucket|sum|count)$", "", key.partition("{")[0]) for key in samples} <= documented


def test_metrics_jsonl_has_what_the_leader_says_of_each_env(live: Live) -> None:
    """W&B and TensorBoard get the same record."""
    record = live.home.metrics()[-1]
    wanted = {part.name for part in fields(EnvState) if part.metadata.get("is_said")}
    assert wanted - set(record["buffer"]) == set()
    assert 0 < record["buffer"]["step"] <= record["step"] + 2
    for env in ("vcopy", "repeat"):
        for share in ("frac_on_policy", "frac_truncated", "frac_used_in_batch", "frac_used", "frac_flat"):
            assert 0 <= record["buffer"][share].get(env, 0) <= 1
        assert record["buffer"]["age"][env]["count"] > 0
    assert sum(record["buffer"]["new_rollouts"].values()) >= 0


def _is_of(key: str, metric: Metric) -> bool:
    name = key.partition("{")[0]
    endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
    return name in [f"{METRIC_PREFIX}{metric.name}{ending}" for ending in endings]


def test_the_numbers_are_those_of_the_ledger(live: Live) -> None:
    with live.home.connect() as buffer:
        before = buffer.ledger()
        time.sleep(2 * READ_SECONDS)
        said = live.samples()
        after = buffer.ledger()
    for env in ("vcopy", "repeat"):
        for metric, pick in (
            ("rollouts_received_total", lambda account: account.pushed[0]),
            ("tokens_received_total", lambda account: account.pushed[1]),
            ("rollouts_trained_total", lambda account: account.trained[0]),
            ("tokens_trained_total", lambda account: account.trained[1]),
        ):
            value = said[f'{METRIC_PREFIX}{metric}{{env="{env}",run="tiny"}}']
            assert pick(before.envs[env]) <= value <= pick(after.envs[env])
    dropped = f'{METRIC_PREFIX}rollouts_dropped_total{{env="vcopy",reason="future",run="tiny"}}'
    assert said[dropped] == after.envs["vcopy"].dropped["future"][0]
    assert said[f'{METRIC_PREFIX}groups_dropped_total{{env="vcopy",reason="future",run="tiny"}}'] == 1


def test_a_standby_answers_the_same_and_one_that_cannot_listen_works_on(live: Live) -> None:
    live.as_user("operator")
    taken = live.url.partition("//")[2].partition("/")[0]
    live.home.environment["RLBUFFER_METRICS__LISTEN"] = taken
    started = [live.home.start("serve", "--display", "plain", "--config", live.home.path / "tiny.toml", log="deaf")]
    live.home.environment["RLBUFFER_METRICS__LISTEN"] = "127.0.0.1:0"
    started.append(
        live.home.start("serve", "--display", "plain", "--config", live.home.path / "tiny.toml", log="standby")
    )
    deaf, standby = live.home.path / "deaf.log", live.home.path / "standby.log"
    live.home.wait_until(
        lambda: deaf.exists() and f"metrics.listen = '{taken}' cannot be listened on" in deaf.read_text(),
        seconds=180,
        why="the warning",
    )
    live.home.wait_until(
        lambda: standby.exists() and re.search(r"metrics: (http://\S+)", standby.read_text()),
        seconds=180,
        why="its url",
    )
    url = re.search(r"metrics: (http://\S+)", standby.read_text())
    assert url is not None

    def step() -> float:
        with urllib.request.urlopen(url[1], timeout=20) as answer:
            found = re.search(r'^rlbuffer_step\{run="tiny"\} (\S+)$', answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    live.home.wait_until(lambda: step() >= 5, seconds=180, why="the run's step from a standby")
    for process in started:
        process.terminate()
        process.wait(60)
    live.as_user("root")


# -- a real Prometheus -------------------------------------------------------------------------------------------------
def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name} (Debian's package prometheus)")
    return path


def test_promtool_takes_the_rules_and_what_the_endpoints_answer(live: Live) -> None:
    promtool = program("promtool")
    folder = RULES.parent
    for arguments in (
        ("check", "config", str(folder / "prometheus.yml")),
        ("check", "rules", str(RULES)),
    ):
        checked = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=live.text(), capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_server_that_hangs_keeps_nobody_waiting_for_the_metrics(live: Live) -> None:
    with live.home.connect() as buffer:
        buffer.store.connection.client.execute_command("CLIENT", "PAUSE", "15000", "ALL")
    live.home.wait_until(
        lambda: live.samples()['rlbuffer_server_up{run="tiny"}'] == 0, seconds=14, why="the word that it is away"
    )
    assert 'rlbuffer_step{run="tiny"}' not in live.samples()
    live.home.wait_until(
        lambda: live.samples().get('rlbuffer_step{run="tiny"}'), seconds=60, why="the run's numbers again"
    )


def test_every_process_has_done_its_work_with_the_rights_of_its_role_and_each_command_does(live: Live) -> None:
    """The last one: it lets the run come to rest, and takes a step back."""
    home = live.home
    assert [process.poll() for process in home.processes[:6]] == [None] * 6, home.logs()
    assert "tiny" in live.says("viewer", "inspect")
    assert "tiny" in live.says("viewer", "runs", "list")
    assert live.opened[0]["name"] in live.says("viewer", "inspect", "open")
    ended = httpx.post(live.opened[0]["end_url"], json={"failure": "given up"}, timeout=60)
    assert ended.status_code == 200, ended.text  # else its ticket would stay out
    live.says("operator", "env", "pause", "--all")
    with home.connect() as buffer:
        home.wait_until(lambda: waits.kind(buffer.store) is Wait.DRAINING, seconds=60, why="the run has come to rest")
    live.says("operator", "env", "pause", "repeat")
    assert "does not allow" not in home.printed()
    assert "not written to" not in home.printed()
    with home.connect() as buffer:
        step = buffer.store.meta().step
    live.says("operator", "runs", "rewind", str(step - 1), "--keep-pending", "--force", "--yes")
    assert "ok: everything adds up" in live.says("viewer", "verify")
    live.as_user("worker")
    assert home.call("env", "pause", "vcopy", "--run", "tiny").returncode != 0
