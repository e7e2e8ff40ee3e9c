"""The run of :mod:`benchmarks.bench_scale` on a cluster of three shards."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shards import Cluster

from benchmarks.bench_scale import Place, measure
from benchmarks.report import Report

SHARDS = 3
NODE_TIMEOUT_MS = 30_000
"""These cores are busy with everybody: a node that is slow is not down."""


def run(report: Report) -> None:
    """Starts the shards, then everybody else."""
    with tempfile.TemporaryDirectory(prefix="rlb-bench-") as folder:
        options = {"appendfsync": "everysec"}
        with Cluster(Path(folder) / "c", shards=SHARDS, options=options, node_timeout_ms=NODE_TIMEOUT_MS) as cluster:
            place = Place(Path(folder), cluster.url)
            measure(report, "sharded_run", place, [node.ask for node in cluster.nodes])
