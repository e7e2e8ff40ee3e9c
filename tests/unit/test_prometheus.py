"""A run's numbers for Prometheus: every field that is a metric becomes samples that Prometheus can read."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rlbuffer.daemon.env_stats import Histogram
from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting
from rlbuffer.state.heartbeats import Process
from rlbuffer.state.metric import Metric, metrics_of
from rlbuffer.state.prometheus import LONGEST_LABEL, METRIC_PREFIX, MOST_LABELS, RunCollector, all_metrics, answering
from rlbuffer.state.run_state import Amount, EnvState, RunState, ServerState
from rlbuffer.state.step_record import StepRecord

ROOT = Path(__file__).parents[2]
DEPLOYED = sorted([*(ROOT / "deploy" / "grafana").iterdir(), *(ROOT / "deploy" / "prometheus").iterdir()])
METRICS = [metric for _, _, metric in all_metrics()]
EMPTY = RunState(run="r", at=0.0, server=ServerState(address="a"))


def filled(cls: type[Any], **own: Any) -> Any:
    """A record in which every metric has a value."""
    values: dict[str, Any] = {}
    for field, metric in metrics_of(cls):
        values[field] = value_of(metric)
    return cls(**values | own)


def value_of(metric: Metric) -> Any:
    if metric.bounds:
        histogram = Histogram(metric.bounds)
        histogram.add([0.5])
        return histogram.record()
    value: Any = 1
    if metric.item:
        value = Amount(1, 2) if metric.item in Amount._fields and "rank" not in metric.labels else {metric.item: 1}
    for label in reversed(metric.labels):
        if label not in ("worker", "gateway", "scorer", "env") or cls_is_step(metric):
            value = {"0": value} if label != "rank" else value
    return [{"tokens": 1, "wait": 1.0}] if metric.labels == ("rank",) and metric.item else value


def cls_is_step(metric: Metric) -> bool:
    return metric.name.startswith("train_")


def text_of(state: RunState | None, errors: dict[str, int] | None = None) -> str:
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: state, "r", lambda: errors or {}))
    return generate_latest(registry).decode()


def samples_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "run"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def whole() -> RunState:
    waits = Waiting(kind=Wait.FILLING)
    kinds = ("worker", "gateway", "scorer", "rank", "batcher")
    drift = {"0": {metric.item: 1.0 for field, metric in metrics_of(StepRecord) if field == "drift"}}
    return filled(
        RunState,
        run="r",
        at=0.0,
        server=filled(ServerState, address="a"),
        envs=(filled(EnvState, name="math"),),
        trained=filled(StepRecord, drift=drift),
        processes=tuple(filled(Process, kind=k, name="0", seconds_ago=1.0, env="math", waiting=waits) for k in kinds),
        waiting=waits,
        problems=(Problem(kind=Trouble.MEMORY),),
    )


def test_every_metric_of_every_record_has_samples() -> None:
    text = text_of(whole(), {"push": 3})
    names = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name, _ in samples_of(text)}
    wanted = {METRIC_PREFIX + re.sub(r"_total$", "", metric.name) for metric in METRICS}
    assert names == wanted
    assert len([part for record in (EnvState, StepRecord) for part in fields(record) if part.metadata]) > 50


def test_values_become_samples_with_their_labels() -> None:
    env = EnvState(
        name="math", pushed=Amount(3, 50), dropped={"stale": Amount(1, 9)}, reward_mean={"reward": 0.5}, groups_ready=0
    )
    worker = Process(kind="worker", name="w", seconds_ago=1.0, env="math", groups=7, failures={"ValueError": 2})
    said = samples_of(
        text_of(replace(EMPTY, envs=(env,), processes=(worker, replace(worker, name="v", seconds_ago=60.0))))
    )
    math = ("env", "math")
    for key, value in {
        ("rlbuffer_server_up", ()): 1,
        ("rlbuffer_leader", ()): 0,
        ("rlbuffer_rollouts_received_total", (math,)): 3,
        ("rlbuffer_tokens_received_total", (math,)): 50,
        ("rlbuffer_tokens_dropped_total", (math, ("reason", "stale"))): 9,
        ("rlbuffer_reward_mean", (math, ("name", "reward"))): 0.5,
        ("rlbuffer_groups_ready", (math,)): 0,
        ("rlbuffer_worker_groups_total", (math, ("worker", "w"))): 7,
        ("rlbuffer_worker_failed_groups_total", (math, ("kind", "ValueError"), ("worker", "w"))): 2,
        ("rlbuffer_workers_alive", (math,)): 1,
        ("rlbuffer_processes", (("alive", "false"), math, ("kind", "worker"))): 1,
    }.items():
        assert said[key] == value, key
    assert ("rlbuffer_worker_groups_total", (math, ("worker", "v"))) not in said, "it is silent"
    assert ("rlbuffer_groups_forming", (math,)) not in said, "nobody has said it"


def test_without_the_server_only_that_is_said() -> None:
    assert samples_of(text_of(None, {"push": 3})) == {
        ("rlbuffer_server_up", ()): 0,
        ("rlbuffer_server_errors_total", (("op", "push"),)): 3,
    }


@pytest.mark.parametrize("name", ['a"} 1\nrlbuffer_leader 0', "\\", "\x1b[2J", "\u202eenv", "x" * 1000, "", "ä\n"])
def test_a_name_of_anybodys_stays_one_label(name: str) -> None:
    said = samples_of(text_of(replace(EMPTY, envs=(EnvState(name=name, groups_ready=1),))))
    [(labels, value)] = [
        (labels, value) for (metric, labels), value in said.items() if metric == "rlbuffer_groups_ready"
    ]
    assert (len(labels), value) == (1, 1)
    assert labels[0][1].isprintable()
    assert len(labels[0][1]) <= LONGEST_LABEL


def test_envs_beyond_the_first_ones_are_left_out_and_those_that_train_are_not() -> None:
    envs = tuple(EnvState(name=f"env{n:03}", trained=Amount(int(n == 99), int(n == 99))) for n in range(100))
    said = samples_of(text_of(replace(EMPTY, envs=envs)))
    shown = {dict(labels)["env"] for name, labels in said if name == "rlbuffer_tokens_trained_total"}
    assert len(shown) == MOST_LABELS
    assert "env099" in shown


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_dashboard_and_rules_name_only_metrics_that_there_are(path: Path) -> None:
    known = {METRIC_PREFIX + metric.name for metric in METRICS}
    names = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in re.findall(rf"\b{METRIC_PREFIX}\w+", path.read_text(encoding="utf-8"))
    }
    assert names - known == set()


def test_the_endpoint_answers_until_it_is_closed() -> None:
    with answering(("127.0.0.1", 0), RunCollector(lambda: EMPTY, "r")) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert 'rlbuffer_server_up{run="r"} 1.0' in answer.read().decode()
        with pytest.raises(OSError, match="in use"), answering(("127.0.0.1", port), RunCollector(lambda: None, "r")):
            pass
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=20)
