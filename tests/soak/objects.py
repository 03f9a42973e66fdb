"""``make soak-objects``: malformed objects of every watched kind, stored, beside jobs that must be admitted and healed.

``EACH=`` objects of each kind, 10,000 by default, that hypothesis generates from ``SEED=``. They are stored in batches
without any check, as by a CRD with relaxed validation; beside each batch a healthy job must be admitted, be healed
after a rank is killed, and end well. Then the batch is deleted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.property.operator.stored_objects import Flood, generate

EACH = 10_000
BATCH = 250


def main() -> int:
    """Store them; 0 when the operator lived, and every healthy job ended well."""
    began_s = time.perf_counter()
    each, seed = int(os.environ.get("EACH") or EACH), int(os.environ.get("SEED") or 1)
    logging.disable(logging.CRITICAL)
    flood = Flood(generate(each, seed=seed), batch=BATCH)
    why = ""
    try:
        flood.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what this looks for
        why = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"{why}\n")
    wanted = -(-each // BATCH)
    figures = {
        "stored": min(flood.stored.values()),
        "healthy_jobs": flood.healthy,
        "unreadable_objects": flood.stage.metric("polyreme_unreadable_objects_total"),
        "internal_errors": flood.stage.metric("polyreme_internal_errors_total"),
        "wall_s": round(time.perf_counter() - began_s, 1),
    }
    bar = {"stored": each, "healthy_jobs": wanted}
    ok = not why and flood.healthy == wanted and min(flood.stored.values()) >= each
    sys.stdout.write(json.dumps({"name": "objects", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
