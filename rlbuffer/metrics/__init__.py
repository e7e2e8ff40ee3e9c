"""The numbers of a run for machines: every metric that there is, and the small web server that answers them.

`registry` names every metric, with kind, unit, labels and meaning: what a process answers at ``/metrics``
(Prometheus) and ``/status`` (JSON), and what `docs/reference/prometheus.md` says. A process keeps its figures as a
mapping of values, `exposition` turns them into text, `endpoint` serves them. Figures are kept where they come up:
`rlbuffer/daemon/figures`, `rlbuffer/worker/figures`, `rlbuffer/trainer/reports/figures`.
Open first: `registry`, then `endpoint`.
"""
