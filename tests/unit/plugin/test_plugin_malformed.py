"""`kubectl polyreme` beside malformed objects of every kind that it reads: every verb draws what can be read."""

import copy
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest

from polyreme.plugin import domains, queue_tree, why
from polyreme.plugin.description import render as describe
from polyreme.plugin.printing import show
from polyreme.plugin.rows import get_table, top_rows, top_table
from polyreme_api import labels
from polyreme_cluster.port import Manifest
from tests.property.operator.stored_objects import Generated, generate, mutated
from tests.unit.operator.operator_scenes import owner_reference
from tests.unit.plugin.plugin_scenes import NOW_S, job, node, pod, queue, runs, snapshot, topology, waits

EACH = 60
RECORD = {"attempt": 1, "phase": "Training", "step": 5, "released": True, "joined": 2}
SOUND: Mapping[str, list[Manifest]] = {
    "TrainingQueue": [queue("default", gpus=8)],
    "Node": [node("n0"), node("n1")],
    "Pod": [pod("sound", 0, "n0"), pod("sound", 1, "n1")],
}


def lease() -> Manifest:
    return {
        "metadata": {
            "name": labels.job_object_name("bad", "uid-bad"),
            "namespace": "team",
            "uid": "lease-bad",
            "resourceVersion": "1",
            "ownerReferences": [owner_reference("bad")],
        },
        "record": RECORD,
    }


BASES: Mapping[str, Manifest] = {
    labels.KIND_JOB: job("bad", status=runs("n0", "n1"), priorityClassName="p", queueName="q"),
    "TrainingQueue": queue("q", parent="default", gpus=4),
    "ClusterTopology": topology(),
    "PriorityClass": {"metadata": {"name": "p", "uid": "uid-p", "resourceVersion": "1"}, "value": 5},
    "Node": node("bad", block="b0", rack="r0"),
    "Pod": pod("bad", 0, "n0"),
    "Lease": lease(),
}


def malformed(kind: str, mutations: Generated) -> Manifest:
    """An object whose name and owner are right, as the API server sees to; anything else of it may be anything."""
    base = copy.deepcopy(BASES[kind])
    metadata = base.pop("metadata")
    found = mutated(base, mutations) | {"metadata": metadata}
    if kind == "Lease":
        metadata["annotations"] = {labels.ANNOTATION_PROGRESS: json.dumps(found.pop("record", None))}
    return found


def drawn(seen: Any) -> str:
    """What every verb that looks at a cluster draws."""
    stream = io.StringIO()
    show(get_table(seen.jobs, now_s=NOW_S, wide=True, namespaced=True), stream=stream)
    show(top_table(top_rows(seen, seen.jobs), namespaced=True), stream=stream)
    show(queue_tree.render(queue_tree.queue_rows(seen)), stream=stream)
    show(domains.render(domains.picture(seen)), stream=stream)
    for each in seen.jobs:
        show(why.render(why.why(seen, each)), stream=stream)
        show(describe(seen, each, []), stream=stream)
    return stream.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_a_malformed_object_is_left_out_and_every_verb_shows_the_others(kind: str) -> None:
    for mutations in generate(EACH, seed=None):
        found = {**SOUND, labels.KIND_JOB: [job("sound", status=runs("n0", "n1")), job("late", status=waits("x"))]}
        found[kind] = [*found.get(kind, ()), malformed(kind, mutations)]
        text = drawn(snapshot(*found.pop(labels.KIND_JOB), **found))
        assert "sound" in text
        assert "late" in text


def test_what_is_left_out_is_named(caplog: pytest.LogCaptureFixture) -> None:
    bad = node("bad") | {"spec": ["no object"]}
    seen = snapshot(job("sound"), Node=[node("n0"), bad])
    assert [each.name for each in seen.nodes] == ["n0"]
    assert "Node bad can't be read and is left out" in caplog.text
