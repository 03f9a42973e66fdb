"""Ray Data: the same functions in its own environment, batches written into the same kind of store.

Usage: ray_peer.py LISTING OBJECTS_URL. Its start (``ray.init``) is not counted.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from benchmarks.pipeline import plain, usage

CPUS = 2
BATCH = 50
OBJECT_STORE_BYTES = 256 * 2**20


def main(listing: Path, objects: str) -> None:
    """Process all images with ``map_batches``."""
    ray.init(
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False

    def work(batch: dict[str, Any]) -> dict[str, Any]:
        cards = plain.work(objects, [Path(str(path)) for path in batch["path"]])
        return {"card": cards}

    started_s, own_s = time.monotonic(), usage.processor_s(os.getpid())
    paths = [{"path": str(path)} for path in plain.paths_of(listing)]
    made = ray.data.from_items(paths, override_num_blocks=max(CPUS, len(paths) // BATCH)).map_batches(
        work, batch_size=BATCH, zero_copy_batch=True
    )
    cards = [row["card"] for row in made.take_all()]
    usage.report(started_s, cards, own_s=own_s)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
