"""Write docs/reference/metrics.md from the registries that the operator and the datahub serve."""

import sys
from pathlib import Path

from polyreme.data.metrics import DataMetrics
from polyreme_cluster.metric_registry import MetricRegistry
from polyreme_operator.publishing.metrics import Metrics

HEAD = """# Metrics

Served at `/metrics`: by the operator, and by `polyreme-datahub` and `polyreme data worker` with `--metrics-address`.
Generated from `operator/polyreme_operator/publishing/metrics.py` and `cli/polyreme/data/metrics.py` by `make docs`.

Who reads them needs a bearer token of an account that may `get` the non-resource URL `/metrics`; the process asks the
API server (TokenReview, SubjectAccessReview) and keeps a yes for 60 seconds and a no for 10. `/healthz` and `/readyz`
need none. A worker without an account of its own can't ask: beyond loopback it refuses everybody, and its work shows in
the controller's metrics.

Counters count since the process started. What a status says is counted once the API server has accepted it.

## Operator

A replica that does not lead has `polyreme_leader` 0 and says nothing of the queue, so sums are right.

"""
DATAHUB = """
## Datahub

`/readyz` and `polyreme_datahub_ready` say whether registry, object store and topics answered when they were asked last.
A replica of the controller that does not lead has `polyreme_datahub_leader` 0 and shows no jobs and no backlog.

"""
TABLE = """| name | type | labels | meaning |
|---|---|---|---|
"""


def render() -> str:
    """Render the page."""
    return HEAD + _table(Metrics()) + DATAHUB + _table(DataMetrics())


def _table(metrics: MetricRegistry) -> str:
    rows = [
        f"| `{metric.name}` | {metric.type} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
        for metric in sorted(metrics.described, key=lambda metric: metric.name)
    ]
    return TABLE + "\n".join(rows) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
