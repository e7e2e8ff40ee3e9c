"""A run's numbers for Prometheus: families made of a :class:`RunState` at each scrape, and the endpoint.

A number is declared where it is a field: in `run_state`, `heartbeats` and `step_record`. One process answers for the
whole run. Imports prometheus_client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from rlbuffer.state.heartbeats import Process
from rlbuffer.state.metric import Metric, metrics_of
from rlbuffer.state.run_state import EnvState, RunState, ServerState
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import printable

METRIC_PREFIX = "rlbuffer_"
MOST_LABELS, MOST_PROCESSES, LONGEST_LABEL = 64, 1000, 64
"""Envs and other names that have samples of their own, processes likewise, characters of a name: anybody may send any.
Of envs, those that have trained most; what comes after is left out."""
RUN_METRICS = (
    Metric("server_up", "gauge", "1 when the server has answered; else nothing else is there."),
    Metric("workers_alive", "gauge", "Workers that were seen in the last 8 seconds.", ("env",)),
    Metric("processes", "gauge", "Processes by their heartbeats.", ("kind", "env", "alive")),
    Metric("processes_waiting", "gauge", "Processes that wait, by what they wait for.", ("kind", "env", "wait")),
    Metric("waiting", "gauge", "1 for what the run waits for.", ("kind",)),
    Metric("problem", "gauge", "1 for each thing that somebody must cure.", ("kind", "env")),
    Metric("server_errors_total", "counter", "Calls of the answering process that the server did not answer.", ("op",)),
)
"""Metrics that are no field."""
RECORDS: Mapping[str, Any] = {
    "run": RunState,
    "server": ServerState,
    "env": EnvState,
    "process": Process,
    "trained step": StepRecord,
}
"""What a record is of -> its class, whose fields are metrics."""
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class RunCollector(Collector):
    """Families of the state as it is read at a scrape.

    Args:
        read: the state; None while the server does not answer.
        run: its name.
        errors: op -> calls of this process that the server did not answer.
    """

    def __init__(
        self, read: Callable[[], RunState | None], run: str, errors: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self._read, self._run, self._errors = read, run, errors

    def describe(self) -> list[Any]:
        """Nothing, so that registering it reads nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """The families that have a sample."""
        families: dict[str, Any] = {}

        def add(metric: Metric, value: Any, *labels: str) -> None:
            depth = len(metric.labels) - len(labels)
            for further, number in samples(value, depth, metric.item):
                names = [printable(name)[:LONGEST_LABEL] for name in (self._run, *labels, *further)]
                if metric.name not in families:
                    name = METRIC_PREFIX + metric.name
                    families[metric.name] = _FAMILIES[metric.kind](name, metric.meaning, labels=["run", *metric.labels])
                if metric.kind == "histogram":
                    if number:
                        families[metric.name].add_metric(names, list(number["buckets"].items()), number["sum"])
                else:
                    families[metric.name].add_metric(names, float(number))

        state = self._read()
        for metric, value in zip(RUN_METRICS, _of_run(state), strict=False):
            add(metric, value)
        add(RUN_METRICS[-1], self._errors())
        if state is not None:
            _add_records(state, add)
        return iter([family for family in families.values() if family.samples])


def _of_run(state: RunState | None) -> Iterator[Any]:
    """Values of :data:`RUN_METRICS` but the last."""
    yield int(state is not None)
    if state is None:
        return
    workers = {p.env: 0 for p in state.of_kind("worker")}
    yield workers | Counter(p.env for p in state.of_kind("worker") if p.is_fresh)
    yield _counted((p.kind, p.env, str(p.is_alive).lower()) for p in state.processes)
    yield _counted((p.kind, p.env, str(p.waiting.kind)) for p in state.processes if p.is_alive and p.waiting)
    yield {} if state.waiting is None else {str(state.waiting.kind): 1}
    yield _counted({(str(problem.kind), problem.env) for problem in state.problems})


def _add_records(state: RunState, add: Callable[..., None]) -> None:
    for record in (state, state.server, *([] if state.trained is None else [state.trained])):
        for field, metric in metrics_of(record):
            add(metric, getattr(record, field))
    for env in sorted(state.envs, key=lambda env: (env.budget is None, -env.trained.tokens, env.name))[:MOST_LABELS]:
        for field, metric in metrics_of(EnvState):
            add(_of_env(metric), getattr(env, field), env.name)
    processes = [process for process in state.processes if process.is_fresh][:MOST_PROCESSES]
    for field, metric in metrics_of(Process):
        for process in processes:
            if process.kind == metric.labels[0]:
                labels = (process.name, process.env) if "env" in metric.labels else (process.name,)
                add(metric, getattr(process, field), *labels)


def _of_env(metric: Metric) -> Metric:
    return Metric(metric.name, metric.kind, metric.meaning, ("env", *metric.labels), metric.item, metric.bounds)


def all_metrics() -> Iterator[tuple[str, str, Metric]]:
    """(what a record is of, its field, the metric), of all that is answered."""
    yield from (("run", "", metric) for metric in RUN_METRICS)
    for title, record in RECORDS.items():
        for field, metric in metrics_of(record):
            yield title, field, _of_env(metric) if record is EnvState else metric


def samples(value: Any, depth: int, item: str = "") -> Iterator[tuple[tuple[str, ...], Any]]:
    """(labels, number or histogram) of a metric with `depth` labels; nothing for None.

    Example:
        >>> list(samples({"math": {"stale": 3}, "code": {}}, 2))
        [(('math', 'stale'), 3)]
    """
    if value is None:
        return
    if depth == 0:
        if item:
            value = value.get(item) if isinstance(value, Mapping) else getattr(value, item)
        if value is not None:
            yield (), value
    elif isinstance(value, Mapping | list | tuple):
        inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        for label, each in islice(inner, MOST_LABELS if isinstance(value, Mapping) else None):
            for labels, number in samples(each, depth - 1, item):
                yield (str(label), *labels), number


def _counted(rows: Iterable[tuple[str, ...]]) -> dict[str, Any]:
    """The number of each row, nested in the order of its names."""
    out: dict[str, Any] = {}
    for row, count in Counter(rows).items():
        inner = out
        for name in row[:-1]:
            inner = inner.setdefault(name, {})
        inner[row[-1]] = count
    return out


@contextmanager
def answering(place: tuple[str, int], collector: Collector) -> Iterator[int]:
    """Answers `/metrics` from threads while the block runs. -> the port. Raises OSError where it cannot listen."""
    registry = CollectorRegistry()
    registry.register(collector)
    server, thread = start_http_server(place[1], place[0], registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
