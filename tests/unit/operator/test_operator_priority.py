"""The status says by which priority a job waits and may be displaced."""

import dataclasses

from polyreme_operator.core import transition
from polyreme_operator.core.manifests import PodDefaults
from polyreme_operator.core.reconcile import reconcile
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.snapshot import JobScene
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, node, pod, scene


def told(seen: JobScene) -> int | None:
    decision = reconcile(seen, NOW_S, defaults=PodDefaults())
    (write,) = (action for action in decision.actions if isinstance(action, WriteStatus))
    return write.after.priority


def test_a_waiting_job_says_its_priority() -> None:
    assert told(scene(dataclasses.replace(job("waits"), priority=1000))) == 1000


def test_an_admitted_job_says_its_priority_at_once_and_when_it_changes() -> None:
    waits = dataclasses.replace(job("runs"), priority=7)
    assert transition.admit(waits, ["n0", "n0"], NOW_S).priority == 7
    runs = dataclasses.replace(admitted(job("runs")), priority=8)
    pods = tuple(pod(runs, index) for index in range(2))
    assert told(scene(runs, pods=pods, nodes={"n0": node()}, lease=lease(runs))) == 8
