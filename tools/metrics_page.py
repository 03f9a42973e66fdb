"""Write docs/reference/metrics.md from the registry that the operator serves."""

import sys
from pathlib import Path

from polyreme_operator.publishing.metrics import Metrics

HEAD = """# Metrics

Served at `/metrics`. Generated from `operator/polyreme_operator/publishing/metrics.py` by `make docs`.

Who reads them needs a bearer token of an account that may `get` the non-resource URL `/metrics`; the operator asks the
API server (TokenReview, SubjectAccessReview) and keeps a yes for 60 seconds and a no for 10. `/healthz` and `/readyz`
need none. A replica that does not lead has `polyreme_leader` 0 and says nothing of the queue, so sums are right.

Counters count since the process started. What a status says is counted once the API server has accepted it.

| name | type | labels | meaning |
|---|---|---|---|
"""


def render() -> str:
    """Render the page."""
    rows = [
        f"| `{metric.name}` | {metric.type} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
        for metric in sorted(Metrics().described, key=lambda metric: metric.name)
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
