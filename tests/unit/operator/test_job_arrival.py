"""Jobs of one second go in the order in which they came, whatever becomes of them or of the operator."""

from typing import Any

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.queueing.order import first_of
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.writer import status_patch
from tests.unit.operator.operator_scenes import NOW_S, answered, job_manifest
from tests.unit.operator.queue_scenes import waiting

NAMES = ("z", "m", "a")


def seen(*manifests: dict[str, Any]) -> ClusterCache:
    model = ClusterCache()
    for manifest in manifests:
        model.put(manifest, now_s=NOW_S)
    return answered(model)


def order(model: ClusterCache) -> list[str]:
    jobs = first_of(model.jobs.waiting, QueueTree.of(()), "default", NOW_S, limit=10)
    return [job.uid.removeprefix("uid-") for job in jobs]


def test_of_one_second_the_first_to_come_is_the_first_in_the_queue() -> None:
    made = [job_manifest(name, version=at + 5) for at, name in enumerate(NAMES)]
    assert order(seen(*made)) == list(NAMES)
    # As an operator that starts later finds them: sorted by name.
    assert order(seen(*reversed(made))) == list(NAMES)


def test_an_older_second_goes_before_an_earlier_arrival() -> None:
    older = job_manifest("old", version=9, created="2023-11-14T21:59:59Z")
    assert order(seen(job_manifest("new", version=5), older)) == ["old", "new"]


def test_a_change_of_a_job_that_has_no_status_yet_costs_it_nothing() -> None:
    model = seen(job_manifest("z", version=5), job_manifest("a", version=6))
    model.put(job_manifest("z", version=7, generation=2, priority=0), now_s=NOW_S)
    answered(model)
    assert order(model) == ["z", "a"]


def test_what_the_first_write_says_outlives_the_operator() -> None:
    model = seen(job_manifest("z", version=5), job_manifest("a", version=6))
    status = model.jobs.views["uid-z"].status
    patch = status_patch(status, status.model_copy(update={"priority": 3}))
    assert patch["arrival"] == 5
    kept = TrainingJobStatus.model_validate(patch)
    again = seen(job_manifest("a", version=6), job_manifest("z", version=70, status=kept))
    assert order(again) == ["z", "a"]


def test_a_job_recreated_under_the_same_name_arrives_last() -> None:
    model = seen(job_manifest("z", version=5), job_manifest("a", version=6))
    anew = job_manifest("z", version=8)
    anew["metadata"]["uid"] = "uid-z-again"
    model.put(anew, now_s=NOW_S)
    answered(model)
    assert order(model) == ["a", "z-again"]


def test_without_any_arrival_it_is_the_uid_that_decides() -> None:
    tree = QueueTree.of(())
    model = ClusterCache()
    for uid in ("b", "a"):
        model.jobs.waiting.add(waiting(uid, "default"))
    assert [job.uid for job in first_of(model.jobs.waiting, tree, "default", NOW_S, limit=10)] == ["a", "b"]
