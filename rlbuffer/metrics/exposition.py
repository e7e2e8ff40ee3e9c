"""Values as Prometheus and people with curl read them. Imports prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from rlbuffer.metrics.histogram import Histogram
from rlbuffer.metrics.registry import METRIC_PREFIX, Metric, Values

_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class _Families(Collector):
    """One scrape: the values of one moment, in families."""

    def __init__(self, metrics: Iterable[Metric], values: Values, common: Mapping[str, str]) -> None:
        self._metrics, self._values, self._common = metrics, values, common

    def collect(self) -> Iterator[Any]:
        """The families of the metrics that have a value."""
        for metric in self._metrics:
            family = _FAMILIES[metric.kind](
                METRIC_PREFIX + metric.name,
                f"{metric.meaning} Unit: {metric.unit}." if metric.unit else metric.meaning,
                labels=[*self._common, *metric.labels],
            )
            for labels, value in samples(self._values.get(metric.name), len(metric.labels)):
                where = [*self._common.values(), *labels]
                if isinstance(value, Histogram):
                    family.add_metric(where, list(value.buckets()), value.sum)
                else:
                    family.add_metric(where, float(value))
            if family.samples:
                yield family


def samples(value: Any, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(labels, number or histogram) of a metric with `depth` labels; nothing for None.

    Example:
        >>> list(samples({"math": {"stale": 3}, "code": {}}, 2))
        [(('math', 'stale'), 3)]
    """
    if depth and isinstance(value, Mapping):
        for label, inner in value.items():
            for labels, number in samples(inner, depth - 1):
                yield (str(label), *labels), number
    elif depth == 0 and value is not None:
        yield (), value


def as_text(metrics: Sequence[Metric], values: Values, common: Mapping[str, str]) -> bytes:
    """The Prometheus text format, from a registry of its own: what other libraries of the process register in the
    global one is not touched. `common` are the labels of every sample."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(metrics, values, common))
    return generate_latest(registry)
