"""The registry of metrics, the text that Prometheus gets, and what keeps foreign names few and harmless."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlbuffer.metrics.exposition import as_text
from rlbuffer.metrics.histogram import Histogram, as_json
from rlbuffer.metrics.labels import LONGEST, OTHER_NAMES, Labels
from rlbuffer.metrics.registry import METRIC_PREFIX, METRICS, SERVE, Metric

ROOT = Path(__file__).parents[2]
DEPLOYED = sorted([*(ROOT / "deploy" / "grafana").iterdir(), *(ROOT / "deploy" / "prometheus").iterdir()])
ALL = [(process, metric) for process, metrics in METRICS.items() for metric in metrics]


@pytest.mark.parametrize(("process", "metric"), ALL, ids=[f"{process}-{metric.name}" for process, metric in ALL])
def test_a_metric_is_named_as_prometheus_names_them(process: str, metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    is_ratio = "ratio" in metric.unit or " per " in metric.unit
    assert not metric.unit or metric.name.endswith(("_ratio", "_tokens_per_second")) == is_ratio
    assert "seconds" not in metric.unit or "seconds" in metric.name
    assert "bytes" not in metric.unit or "bytes" in metric.name
    assert not {"id", "group", "rollout", "prompt", "step"} & set(metric.labels)
    assert metric.meaning[:1].isupper() or metric.meaning[0].isdigit()
    assert metric.meaning.endswith(".")
    assert [m.name for m in METRICS[process]].count(metric.name) == 1


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_dashboard_and_rules_name_only_metrics_that_there_are(path: Path) -> None:
    known = {METRIC_PREFIX + metric.name for _, metric in ALL}
    text = path.read_text(encoding="utf-8")
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(rf"\b{METRIC_PREFIX}\w+", text)}
    assert names - known == set()


def test_most_metrics_stand_on_the_dashboard() -> None:
    text = (ROOT / "deploy" / "grafana" / "rlbuffer.json").read_text(encoding="utf-8")
    shown = {name for name in {METRIC_PREFIX + m.name for _, m in ALL} if name in text}
    assert len(shown) > 50


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_values_become_samples_with_their_labels() -> None:
    ages = Histogram((0.0, 1.0))
    ages.add(0, 2)
    ages.add(7)
    said = {
        "leader": 1,
        "groups_ready": {"math": 3, "code": 0},
        "rollouts_dropped_total": {"math": {"stale": 4}},
        "age_versions": {"math": ages},
        "policy_version": None,
        "no_metric": 1,
    }
    env, run = ("env", "math"), ("run", "r")
    assert values(as_text(SERVE, said, {"run": "r"})) == {
        ("rlbuffer_leader", (run,)): 1,
        ("rlbuffer_groups_ready", (env, run)): 3,
        ("rlbuffer_groups_ready", (("env", "code"), run)): 0,
        ("rlbuffer_rollouts_dropped_total", (env, ("reason", "stale"), run)): 4,
        ("rlbuffer_age_versions_bucket", (env, ("le", "0.0"), run)): 2,
        ("rlbuffer_age_versions_bucket", (env, ("le", "1.0"), run)): 2,
        ("rlbuffer_age_versions_bucket", (env, ("le", "+Inf"), run)): 3,
        ("rlbuffer_age_versions_count", (env, run)): 3,
        ("rlbuffer_age_versions_sum", (env, run)): 7,
    }


@pytest.mark.parametrize("name", ['a"} 1\nrlbuffer_leader 0', "\\", "\x1b[2J", "\u202eenv", "x" * 1000, "", "ä\n"])
def test_a_name_of_anybodys_stays_one_label(name: str) -> None:
    label = Labels(3).of(name)
    assert len(label) <= LONGEST
    assert label.isprintable()
    said = values(as_text(SERVE, {"groups_ready": {label: 1}}, {"run": "r"}))
    assert said == {("rlbuffer_groups_ready", (("env", label), ("run", "r"))): 1}


def test_names_beyond_the_first_ones_share_a_label() -> None:
    labels = Labels(64)
    assert len({labels.of(f"env{number}") for number in range(10_000)}) == 65
    assert labels.of("env9999") == OTHER_NAMES
    assert labels.of("env0") == "env0"


def test_json_holds_no_number_that_json_has_not() -> None:
    value = as_json({"a": {"b": math.nan}, "c": Histogram((1.0,)), "d": 1})
    assert json.loads(json.dumps(value, allow_nan=False)) == {
        "a": {"b": None},
        "c": {"buckets": {"1.0": 0, "+Inf": 0}, "sum": 0.0, "count": 0},
        "d": 1,
    }
