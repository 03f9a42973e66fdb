"""Our runner: two threads with a sandboxed child each. Usage: ours.py LISTING OBJECTS_URL REGISTRY_URL [TOPICS_URL]."""

import os
import sys
import time
from pathlib import Path

from benchmarks.pipeline import photo_operations, usage

from polyreme_datahub import hub
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.named_versions import resolve
from polyreme_datahub.objects import open_store
from polyreme_datahub.recipes.recipe import parse_recipe
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_run import run_flow
from polyreme_datahub.runner.walk import Walk
from polyreme_datahub.topics.open import open_topics

WORKERS = 2


def main(listing: Path, objects: str, registry: str, topics_url: str) -> None:
    """Register the images, run the flow over them, and report."""
    hub.register(registry, objects, "photos", listing)
    database = open_database(registry)
    lakehouse = Lakehouse(open_store(objects))
    topics = open_topics(topics_url) if topics_url else None
    version = resolve(database, "photos", now_s=time.time())
    recipe = parse_recipe(photo_operations.recipe_content())
    context = RunContext(
        database=database,
        lakehouse=lakehouse,
        owner=f"bench-{os.getpid()}-{time.monotonic_ns()}",
        now_s=time.time,
        steady_s=time.monotonic,
        workers=WORKERS,
        topics=topics,
    )
    flow = Flow(recipe=recipe, versions={version.id: version})
    started_s, own_s = time.monotonic(), usage.processor_s(os.getpid())
    run_flow(context, flow)
    took_s = time.monotonic() - started_s
    walk = Walk(database, lakehouse, constants={})
    spent_s = usage.processor_s(os.getpid())
    cards = [walked.values["card"].data for walked in walk.samples(version, recipe.steps, values_of=("card",))]
    read_s = usage.processor_s(os.getpid()) - spent_s
    usage.report(time.monotonic() - took_s, cards, own_s=own_s + read_s)
    if topics is not None:
        topics.close()
    database.close()


if __name__ == "__main__":
    _, listing, objects, registry, *topics = sys.argv
    main(Path(listing), objects, registry, topics_url=topics[0] if topics else "")
