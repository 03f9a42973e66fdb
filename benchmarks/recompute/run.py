"""Cost of a changed operation: a recipe of six runs whole, and once more for each change, over the same images.

Usage: run.py [--images 1000] [--rounds 3] [--folder DIRECTORY]
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.pipeline import photo_operations, photos

from polyreme_datahub import hub
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.named_versions import resolve
from polyreme_datahub.objects import open_store
from polyreme_datahub.recipes.recipe import Recipe, parse_recipe
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.registry.rows import OperationCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_run import run_flow

RATIO_BAR = 5.0
IMAGES = 1000
WORKERS = 2
CHANGES: dict[str, tuple[int, dict[str, Any]]] = {
    "change_3": (2, {"side_px": 384}),
    "identical_output_3": (2, {"sharpness_min": 0.5}),
    "change_1": (0, {"scale_deep": True}),
    "change_2": (1, {"quality": 80}),
    "change_5": (4, {"step": 20.0}),
    "change_6": (5, {"title": "image"}),
}
"""Position from 0 and parameters of each change. Operation 4, image-hash, has none: it changes by its version only."""
MEASURED = {"change_3": CHANGES["change_3"]}


def main() -> int:
    """Run and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--folder", type=Path, help="Where the store is made; a disk, not memory.")
    parser.add_argument("--rounds", type=int, default=3, help="Whole runs, each followed by the change of operation 3.")
    options = parser.parse_args()
    listing = photos.write_photos(photos.FOLDER, options.images)
    rounds = [one_round(listing, options, CHANGES if at == 0 else MEASURED) for at in range(options.rounds)]
    figures: dict[str, Any] = {"images": options.images, "rounds": options.rounds, **rounds[0]}
    for kind in ("ratio", "cpu_ratio"):
        figures[f"change_3_{kind}s"] = sorted(one["change_3"][kind] for one in rounds)
    figures |= verdicts(figures)
    bar = {
        "upstream_executions": 0,
        "downstream_executions_of_identical_output": 0,
        "full_over_second_ratio": RATIO_BAR,
    }
    ok = figures["full_over_second_ratio"] >= RATIO_BAR and not any(
        figures[name]
        for name in ("upstream_executions", "downstream_executions_of_identical_output", "unchanged_executions")
    )
    print(json.dumps({"name": "bench-recompute", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def one_round(
    listing: Path, options: argparse.Namespace, changes: dict[str, tuple[int, dict[str, Any]]]
) -> dict[str, Any]:
    """Run the recipe whole over a new store, unchanged, and once for each change."""
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-", dir=options.folder) as place:
        registry, objects = f"sqlite:///{place}/registry.sqlite", f"file://{place}/objects"
        hub.register(registry, objects, "photos", listing)
        database = open_database(registry)
        full = run(database, objects, recipe())
        assert full["executions"] == dict.fromkeys(["ingest", *names()], options.images), full
        again = run(database, objects, recipe())
        figures = {"full": full, "unchanged_executions": sum(again["executions"].values())}
        for name, (at, parameters) in changes.items():
            found = run(database, objects, recipe({at: parameters}))
            ratios = {kind: round(full[kind] / found[kind], 2) for kind in ("wall_s", "cpu_s")}
            figures[name] = {"ratio": ratios["wall_s"], "cpu_ratio": ratios["cpu_s"], **found}
        database.close()
    return figures


def verdicts(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that have bars."""
    upstream = sum(
        figures[name]["executions"].get(step, 0)
        for name, (at, _) in CHANGES.items()
        for step in ("ingest", *names()[:at])
    )
    identical = figures["identical_output_3"]["executions"]
    assert identical[names()[2]] == figures["change_3"]["executions"][names()[2]] == figures["images"], figures
    return {
        "upstream_executions": upstream,
        "downstream_executions_of_identical_output": sum(identical.get(step, 0) for step in names()[3:]),
        "full_over_second_ratio": statistics.median(figures["change_3_ratios"]),
        "full_over_second_cpu_ratio": statistics.median(figures["change_3_cpu_ratios"]),
    }


def recipe(changes: dict[int, dict[str, Any]] | None = None) -> Recipe:
    """Return the recipe, with some parameters changed."""
    return parse_recipe(photo_operations.recipe_content(changes))


def names() -> list[str]:
    """Return the names of the steps."""
    return [step.name for step in recipe().steps]


def run(database: Database, objects: str, wanted: Recipe) -> dict[str, Any]:
    """Run a recipe over the images; return its wall time, its processor time and what each step executed."""
    executions: dict[str, int] = {}
    lock = threading.Lock()

    def counted(_: WorkItem, counts: Sequence[OperationCount]) -> None:
        with lock:
            for count in counts:
                if done := count.misses + count.dead + count.dropped:
                    executions[count.operation] = executions.get(count.operation, 0) + done

    version = resolve(database, "photos", now_s=time.time())
    context = RunContext(
        database=database,
        lakehouse=Lakehouse(open_store(objects)),
        owner=f"bench-{time.monotonic_ns()}",
        now_s=time.time,
        steady_s=time.monotonic,
        workers=WORKERS,
    )
    started_s, cpu_s = time.monotonic(), processor_s()
    flow = Flow(recipe=wanted, versions={version.id: version})
    run_flow(context, flow, on_counts=counted)
    return {
        "wall_s": round(time.monotonic() - started_s, 2),
        "cpu_s": round(processor_s() - cpu_s, 2),
        "executions": executions,
    }


def processor_s() -> float:
    """Return the processor time so far of this process and of the children that ended [s]."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    sys.exit(main())
