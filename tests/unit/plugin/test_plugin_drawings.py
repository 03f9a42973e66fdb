"""What the plugin draws, to the letter."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from polyreme.plugin import domains, queue_tree, why
from polyreme.plugin.description import render as describe
from polyreme.plugin.printing import bar
from polyreme.plugin.rows import age, get_table, reason_of, top_rows, top_table
from polyreme_api import labels
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.times import rfc3339
from tests.unit.operator.operator_scenes import owner_reference
from tests.unit.plugin.plugin_scenes import (
    GPU,
    NOW_S,
    condition,
    job,
    job_of,
    node,
    pod,
    queue,
    runs,
    snapshot,
    text,
    topology,
    waits,
)

QUEUES = [queue("org", gpus=8), queue("a", parent="org", gpus=16), queue("b", parent="org", gpus=8)]


def same(drawn: str, expected: str) -> None:
    assert drawn == expected.lstrip("\n"), f"\n{drawn}"


def test_get_says_how_jobs_stand() -> None:
    seen = snapshot(
        job("big", queueName="a", status=waits("ExceedsQuota", "needs 8 devices; 4 left")),
        job("small", status=runs("n0", "n1")),
        job("wrong", topology={"required": "rack", "preferred": "block"}),
        job("new", age_s=5),
    )
    same(
        text(get_table(seen.jobs, now_s=NOW_S, wide=False, namespaced=True)),
        """
NAMESPACE   NAME    STATE           QUEUE     READY   ATTEMPT   STEP   AGE   REASON
team        big     Queued          a         0/2     -         0/50   10m   ExceedsQuota
team        new     New             default   0/2     -         0/50   5s    -
team        small   Running         default   2/2     1         7/50   10m   Training
team        wrong   Misconfigured   -         0/0     -         0      10m   Misconfigured
""",
    )
    wide = text(get_table(seen.jobs, now_s=NOW_S, wide=True, namespaced=False)).splitlines()
    assert wide[1].endswith("needs 8 devices; 4 left")


def lease(name: str, **record: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": labels.job_object_name(name, f"uid-{name}"),
            "namespace": "team",
            "uid": f"lease-{name}",
            "resourceVersion": "1",
            "ownerReferences": [owner_reference(name)],
            "annotations": {labels.ANNOTATION_PROGRESS: json.dumps(record)},
        }
    }


def test_top_takes_pace_from_the_newest_record_of_this_attempt_only() -> None:
    cells = [
        ("Productive", "", 9_000),
        ("Hang", "Hung", 1_000),
        ("Queued", "Starting", 2_000),
        ("Queued", "Suspend", 7_000),
    ]
    accounting = {"cells": [{"what": what, "why": why, "deviceMilliseconds": ms} for what, why, ms in cells]}
    seen = snapshot(
        job("big", status=runs("n0", "n1", accounting=accounting)),
        job("old", replicas=1, status=runs("n2")),
        job("idle", status=waits("ExceedsQuota")),
        Lease=[
            lease("big", attempt=1, step=10, stepSeconds=0.5, tokensPerSecond=1234.0, loss=2.25),
            lease("old", attempt=2, step=40, stepSeconds=0.1),
        ],
    )
    same(
        text(top_table(top_rows(seen, seen.jobs), namespaced=False)),
        """
NAME   STATE     STEP    STEP TIME   TOKENS        LOSS   GOODPUT   ETTR   DEVICES   LEFT
big    Running   10/50   0.5 s       1,234 tok/s   2.25   90 %      75 %   8         20 s
old    Running   7/50    -           -             -      -         -      4         -
""",
    )


def test_queue_draws_the_tree_with_what_is_borrowed() -> None:
    seen = snapshot(
        job("runs", queueName="b", replicas=3, status=runs("n0", "n1", "n2")),
        job("waits", queueName="a", status=waits("BehindOthers")),
        job("first", queueName="a", priority=9, status=waits("ExceedsQuota")),
        job("lost", queueName="gone", status=waits("QueueMissing")),
        TrainingQueue=[*QUEUES, queue("held", stopPolicy="Hold"), queue("torn", parent="nowhere")],
    )
    same(
        text(queue_tree.render(queue_tree.queue_rows(seen))),
        """
QUEUE     RESOURCE         USED   QUOTA                                BORROWED   PENDING   RUNNING   NOTE
held      -                -      unlimited                            -          0         0         stopPolicy Hold
org       nvidia.com/gpu   12     32          [########............]   -          0         0         -
  a       nvidia.com/gpu   0      16          [....................]   -          2         0         -
  b       nvidia.com/gpu   12     8           [#############+++++++]   4          0         1         -
default   -                -      unlimited                            -          0         0         -
gone      -                -      -                                    -          1         0         QueueMissing
torn      -                -      -                                    -          0         0         ParentMissing
gone: jobs wait here, but there is no such queue; create it, or set another spec.queueName in them
torn: spec.parent of torn is nowhere, and there is no such queue; create it or change spec.parent
""",
    )
    one = text(queue_tree.render(queue_tree.queue_rows(seen, only="a")))
    assert one.splitlines()[-2:] == [
        "1       team/first   9          ExceedsQuota",
        "2       team/waits   0          BehindOthers",
    ]


def test_why_names_reason_remedy_place_and_those_before() -> None:
    asked = {
        "by": "uid-big",
        "byName": "team/big",
        "requestedAt": rfc3339(NOW_S - 10),
        "deadline": rfc3339(NOW_S + 50),
    }
    seen = snapshot(
        job(
            "big",
            queueName="a",
            age_s=100,
            status=waits(
                "WaitingForPreemption", "preempting team/victim: 50 device-seconds since the last checkpoints"
            ),
        ),
        job("older", queueName="a", age_s=900, status=waits("ExceedsQuota", "needs 8")),
        job("victim", queueName="b", priority=-5, status=runs("n0", "n1", preemption=asked)),
        TrainingQueue=QUEUES,
    )
    same(
        text(why.render(why.why(seen, job_of(seen, "big")))),
        """
team/big is Queued (WaitingForPreemption): preempting team/victim: 50 device-seconds since the last checkpoints
then   it runs when the preempted jobs have saved their checkpoints and stopped
place  2 of 2 in queue a

AHEAD        QUEUE   PRIORITY   REASON
team/older   a       0          ExceedsQuota

PREEMPTED     WITHIN
team/victim   50 s
""",
    )
    same(
        text(why.render(why.why(seen, job_of(seen, "victim")))),
        """
team/victim is Preempting
preempted by  team/big, within 50 s
""",
    )


def test_why_names_what_pods_lack_while_a_job_starts() -> None:
    lacks = "0 of 2 pods run; worker 0 (and 1 more) can't start: Secret s3 does not exist in namespace team; create it"
    status = runs("n0", "n1", readyReplicas=0)
    status["conditions"] = [
        condition("Admitted", "Admitted", "2 workers on 2 nodes"),
        {**condition("PodsReady", "WaitingForPods", lacks), "status": "False"},
        {**condition("Running", "Starting"), "status": "False"},
    ]
    seen = snapshot(job("big", status=status))
    same(
        text(why.render(why.why(seen, seen.jobs[0]))),
        f"""
team/big is Starting: {lacks}
then  it trains when its pods run and their launchers have joined: see `kubectl polyreme describe big`
""",
    )


def test_why_names_a_refused_size_and_how_to_withdraw_it() -> None:
    words = "spec.workers.replicas 99 is refused, 2 workers stay in force: no layout"
    status = runs("n0", "n1")
    status["conditions"].append({**condition("ResizeRefused", "NoFit", words), "observedGeneration": 1})
    seen = snapshot(job("big", replicas=99, status=status))
    same(
        text(why.render(why.why(seen, seen.jobs[0]))),
        f"""
team/big is Running (Training)
size  {words}; `kubectl polyreme scale big --replicas 2` withdraws the request
""",
    )
    assert "Workers   2/2 ready, 99 asked for and refused" in text(describe(seen, seen.jobs[0], [])).splitlines()


def test_every_reason_to_wait_has_a_remedy() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/reasons.md").read_text().splitlines()
    start = page.index("| reason to wait | meaning | what to do |")
    rows = itertools.takewhile(lambda line: line.startswith("|"), page[start + 2 :])
    reasons = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert len(reasons) > 15
    assert reasons - {"Starting"} <= set(why.REMEDIES)


@pytest.mark.parametrize("kind", ["Failed", "Succeeded"])
def test_why_gives_a_finished_job_no_advice_that_it_can_not_take(kind: str) -> None:
    seen = snapshot(job("big", suspend=True, status={"conditions": [condition(kind, "Misconfigured", "no layout")]}))
    answer = why.why(seen, seen.jobs[0])
    expected = "it is not retried: delete it, repair what the message names, and apply it again; its checkpoints stay"
    assert answer.remedy == (expected if kind == "Failed" else "")


def test_the_place_is_the_one_in_the_queues_status_where_others_jobs_are_hidden() -> None:
    head = [
        {"position": 1, "namespace": "other", "name": "first", "priority": 7, "reason": "ExceedsQuota"},
        {"position": 2, "namespace": "team", "name": "big", "priority": 0, "reason": "ExceedsQuota"},
    ]
    usage = [{"resource": GPU, "used": 12, "borrowed": 4}]
    seen = snapshot(
        job("big", queueName="a", status=waits("ExceedsQuota", "needs 8")),
        TrainingQueue=[queue("a", gpus=8) | {"status": {"head": head, "pending": 5, "admitted": 2, "usage": usage}}],
    )
    answer = why.why(seen, seen.jobs[0], whole=False)
    assert (answer.position, answer.waiting, answer.before) == (2, 5, (("other/first", "a", 7, "ExceedsQuota"),))
    (row, *_) = queue_tree.queue_rows(seen, only="a", whole=False)
    assert (row.pieces[0].used, row.pieces[0].borrowed, row.waiting, row.admitted) == (12, 4, 5, 2)
    assert [entry[1] for entry in row.head] == ["other/first", "team/big"]


FINISHED = {"attempt": runs("n0", "n1")["attempt"], "readyReplicas": 0, "step": 50}


@pytest.mark.parametrize(
    "status",
    [
        {**FINISHED, "conditions": [condition("Succeeded", "Completed")]},
        {**FINISHED, "conditions": [condition("Failed", "RunFailed")]},
        {**FINISHED, "conditions": [condition("Suspended", "Suspended")]},
        {**FINISHED, "conditions": [condition("Queued", "Preempted"), condition("Preempted", "Preempted")]},
        runs("n0", "n1"),
        {**runs("n0", "n1"), "conditions": [condition("Degraded", "Unreadable"), condition("Running", "Training")]},
        waits("ExceedsQuota"),
    ],
    ids=lambda status: status["conditions"][0]["type"],
)
def test_get_and_describe_say_what_kubectl_get_says(status: dict[str, Any]) -> None:
    seen = snapshot(job("big", status=status))
    (view,) = seen.jobs
    assert reason_of(view) == view.status.reason
    ready = view.status.ready if view.attempt is not None else "0/2"
    drawn = text(describe(seen, view, []))
    assert f"Workers   {ready} ready" in drawn.splitlines()
    step = "7" if status.get("step") == 7 else str(status.get("step", 0))
    assert f"Step      {step} of 50" in drawn.splitlines()
    row = text(get_table(seen.jobs, now_s=NOW_S, wide=False, namespaced=False)).splitlines()[1].split()
    assert (row[3], row[5], row[7]) == (ready, f"{step}/50", view.status.reason)


def test_the_order_is_the_operators_shares_between_queues_included() -> None:
    seen = snapshot(
        job("busy", queueName="a", replicas=4, status=runs("n0", "n1", "n2", "n3")),
        job("from-a", queueName="a", age_s=900, status=waits("ExceedsQuota")),
        job("from-b", queueName="b", age_s=100, status=waits("ExceedsQuota")),
        job("urgent", queueName="a", age_s=1, priority=1, status=waits("ExceedsQuota")),
        TrainingQueue=QUEUES,
    )
    answer = why.why(seen, job_of(seen, "from-a"))
    assert [name for name, *_ in answer.before] == ["team/urgent", "team/from-b"]
    assert (answer.position, answer.waiting, answer.ahead) == (2, 2, 2)


HEALTH_TAINT = {"key": "polyreme.dev/health", "value": "gpu-lost", "effect": "NoSchedule"}
NODES = [
    node("n0", block="b0", rack="r0"),
    node("n1", block="b0", rack="r0", unschedulable=True),
    node("n2", block="b0", rack="r1"),
    node("n3", block="b1", rack="r2"),
    node("n4", block="b1", rack="r2", taints=[HEALTH_TAINT]),
    node("bare"),
]


def test_topology_draws_the_tree_with_the_jobs_on_each_node() -> None:
    seen = snapshot(
        job("big", status=runs("n0", "n2")),
        job("tall", replicas=1, status=runs("n0", devices=2), devices=2),
        Node=NODES,
        ClusterTopology=[topology()],
    )
    same(
        text(domains.render(domains.picture(seen, level="rack"))),
        """
cluster  [###.............] 10/48 used, 14 free; 6 nodes, 3 unusable; team/big x2, team/tall x1
├── block b0  [#######.........] 10/24 used, 6 free; 3 nodes, 1 unusable; team/big x2, team/tall x1
│   ├── rack r0  [######..........] 6/16 used, 2 free; 2 nodes, 1 unusable; team/big x1, team/tall x1
│   └── rack r1  [########........] 4/8 used, 4 free; 1 node; team/big x1
└── block b1  [................] 0/16 used, 8 free; 2 nodes, 1 unusable
    └── rack r2  [................] 0/16 used, 8 free; 2 nodes, 1 unusable
NodesWithoutLabels: 1 of 6 nodes lack block, rack and take no gangs: bare; label them
""",
    )
    same(
        text(domains.render(domains.picture(seen, domain="r0"))),
        """
rack r0  [######..........] 6/16 used, 2 free; 2 nodes, 1 unusable; team/big x1, team/tall x1
├── host n0  [############....] 6/8 used, 2 free; team/big x1, team/tall x1
└── host n1  [................] 0/8 used, 0 free; cordoned
NodesWithoutLabels: 1 of 6 nodes lack block, rack and take no gangs: bare; label them
""",
    )
    with pytest.raises(InvalidConfigError, match="expected one of block, rack, host"):
        domains.picture(seen, level="zone")
    with pytest.raises(NotFoundError, match="no domain 'block-b9'"):
        domains.picture(seen, domain="block-b9")


def test_a_place_counts_once_and_pods_that_linger_or_are_others_count_too() -> None:
    seen = snapshot(
        job("big", status=runs("n0", "n0", devices=2), devices=2),
        job("past", status=waits("WaitingForCapacity")),
        Node=[node("n0")],
        Pod=[
            pod("big", 0, "n0", gpus=2),
            pod("past", 0, "n0", gpus=1),
            pod("past", 1, "n0", gpus=1, phase="Succeeded"),
            pod("other", 0, "n0", gpus=2, ours=False),
        ],
    )
    drawn = text(domains.render(domains.picture(seen, domain="n0")))
    assert drawn == "host n0  [##############..] 7/8 used, 1 free; team/big x2, team/past x1\n"


def test_many_nodes_are_summed_up_unless_asked_for() -> None:
    many = [node(f"n{at:03d}", block=f"b{at // 20}", rack=f"r{at // 5}") for at in range(60)]
    seen = snapshot(Node=many, ClusterTopology=[topology()])
    assert len(text(domains.render(domains.picture(seen))).splitlines()) == 1 + 3 + 12
    assert len(text(domains.render(domains.picture(seen, level="host"))).splitlines()) == 1 + 3 + 12 + 60
    assert len(text(domains.render(domains.picture(seen, domain="b1"))).splitlines()) == 1 + 4 + 20


def test_describe_says_all_of_one_job() -> None:
    record = {
        "attempt": 1,
        "at": rfc3339(NOW_S - 300),
        "cause": "PodLost",
        "scope": "RestartPod",
        "step": 5,
        "message": "gone",
    }
    seen = snapshot(
        job("big", status=runs("n0", "n1", restartRecords=[record], restarts=1)),
        Lease=[lease("big", attempt=1, step=9, stage="cool-down", loss=2.25, heldOutLoss=0.5, heldOutStep=8)],
    )
    event = {"lastTimestamp": rfc3339(NOW_S - 30), "type": "Normal", "reason": "Admitted", "message": "2 workers"}
    drawn = text(describe(seen, seen.jobs[0], [{"metadata": {}, **event}]))
    for line in (
        "State     Running (Training)",
        "Workers   2/2 ready",
        "Devices   4 nvidia.com/gpu each",
        "Stage     cool-down",
        "Held out  loss 0.5000 after step 8",
        "n0     1         -",
        "1         PodLost   RestartPod   5      0            5m    gone",
        "30s   Normal   Admitted   2 workers",
    ):
        assert line in drawn.splitlines(), drawn


@pytest.mark.parametrize(
    ("used", "whole", "drawn"),
    [(0, 8, "[....]"), (1, 800, "[#...]"), (799, 800, "[###.]"), (8, 8, "[####]"), (16, 8, "[##++]"), (0, 0, "[....]")],
)
def test_a_bar_is_empty_only_for_nothing_and_full_only_for_all(used: int, whole: int, drawn: str) -> None:
    assert bar(used, whole, width=4).plain == drawn


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0s"), (119, "119s"), (120, "2m"), (7_300, "2h"), (172_800, "2d"), (-5, "0s")]
)
def test_ages_read_as_kubectls(seconds: float, words: str) -> None:
    assert age(seconds) == words
