"""What the statuses of queues and of the topology show, and when it is written."""

import dataclasses

from polyreme_api.times import rfc3339
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.usage import UsageLedger
from polyreme_operator.placement.topology import arrange
from polyreme_operator.publishing.pending_reasons import PendingReasons
from polyreme_operator.publishing.queue_status import queue_statuses, topology_status
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.inventory import HOST_LEVEL, LevelView
from polyreme_operator.types.views import TopologyView
from tests.unit.operator.operator_scenes import NOW_S, admitted, job
from tests.unit.operator.queue_scenes import GPU, queue

RACKS = (LevelView(name="rack", node_label="rack"),)


def test_a_topology_says_since_when_it_is_in_order() -> None:
    nodes = {"a": {"rack": "r", HOST_LEVEL: "a"}}
    view = TopologyView(name="default", levels=RACKS)
    (first,) = topology_status(view, arrange(nodes, RACKS), now_s=NOW_S)
    assert first.status["conditions"][0]["lastTransitionTime"] == rfc3339(NOW_S)
    written = dataclasses.replace(view, status=first.status)
    assert topology_status(written, arrange(nodes, RACKS), now_s=NOW_S + 60) == [], "nothing has changed"
    more = arrange({**nodes, "b": {"rack": "r", HOST_LEVEL: "b"}}, RACKS)
    (second,) = topology_status(dataclasses.replace(written, generation=2), more, now_s=NOW_S + 60)
    assert second.status["conditions"][0]["lastTransitionTime"] == rfc3339(NOW_S)
    (broken,) = topology_status(dataclasses.replace(written, generation=3), arrange({}, RACKS), now_s=NOW_S + 90)
    condition = broken.status["conditions"][0]
    assert (condition["status"], condition["lastTransitionTime"]) == ("False", rfc3339(NOW_S + 90))


def test_a_queue_shows_its_running_jobs_and_what_they_use_of_scarce_or_limited_resources() -> None:
    views = {"default": queue("default", 4), "free": queue("free")}
    tree = QueueTree.of(list(views.values()))
    jobs = JobIndex(UsageLedger(NodeTable()))
    jobs.put(admitted(job()))
    used = {("default", GPU): 2, ("default", "cpu"): 500, ("free", "example.com/fpga"): 1, ("free", "cpu"): 500}
    writes = queue_statuses(views, tree, jobs, used, PendingReasons(jobs), now_s=NOW_S)
    found = {write.ref.name: write.status for write in writes}
    assert found["default"]["admitted"] == 1
    assert [(each["resource"], each["used"]) for each in found["default"]["usage"]] == [(GPU, 2)]
    assert [each["resource"] for each in found["free"]["usage"]] == ["example.com/fpga"], "no queue limits it"
