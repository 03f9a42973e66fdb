"""Jobs that run at another worker count than they wish."""

import dataclasses
from typing import Any

import pytest

from polyreme_api.job.accounting import Accounting, LostTime
from polyreme_api.progress import ProgressRecord
from polyreme_operator.cache.jobs import scaled
from polyreme_operator.cache.plan_book import SIZES_MAX
from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.scheduler import elastic
from polyreme_operator.types.reasons import Scope
from polyreme_operator.types.views import JobView
from polyreme_planner.plan_inputs import setting_of
from polyreme_planner.refusals import memory_of_cut
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, pod, snapshot

TO_FOUR: dict[str, Any] = {"current": 2, "larger": 4, "cooldown_s": 300.0}


def elastic_job(replicas: int = 4, low: int | None = None, high: int | None = None, **spec: Any) -> JobView:
    bounds = {"minReplicas": low, "maxReplicas": high}
    workers = {"replicas": replicas, "devices": spec.pop("devices", 1)}
    return job(workers={**workers, **{name: value for name, value in bounds.items() if value is not None}}, **spec)


def record(**fields: Any) -> ProgressRecord:
    given = {"attempt": 1, "released": True, "phase": "Training", "step": 10, "steps": 1000, "stepSeconds": 2.0}
    return ProgressRecord.model_validate({**given, **fields})


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, (4,)),
        ({"low": 1}, (4, 3, 2, 1)),
        ({"low": 3}, (4, 3)),
        ({"low": 1, "replicas": 6}, (6, 4, 3, 2, 1)),  # 12 packs per step: no dp of 5
        ({"low": 5, "replicas": 5}, ()),
        ({"low": 1, "replicas": 5}, ()),  # a wish that does not fit refuses the job
    ],
)
def test_the_counts_that_a_job_accepts_are_its_wish_and_smaller_ones_that_fit(
    bounds: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert tuple(elastic.sizes(elastic_job(**bounds))) == expected


@pytest.mark.slow
def test_a_wish_of_ranks_that_do_not_divide_the_packs_is_offered_where_the_planner_can_use_them() -> None:
    workers = {"replicas": 3, "devices": 8, "minReplicas": 1, "hardware": "h100-80g"}
    owner = job(
        model={"preset": "kimi-vl-a3b"},
        data={"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 4096},
        training={"steps": 50, "packsPerStep": 64},
        workers=workers,
    )
    assert tuple(elastic.sizes(owner)) == (3, 2, 1)
    plan = owner.plan_at(3)
    assert plan is not None
    assert plan.layout.world == 24


def test_a_running_job_may_grow_to_its_wish_and_beyond_it_to_its_bound() -> None:
    assert tuple(elastic.larger_sizes(elastic_job(4, high=12), 4)) == (12, 6)
    assert tuple(elastic.larger_sizes(elastic_job(4, low=1), 2)) == (4, 3)
    assert tuple(elastic.larger_sizes(elastic_job(4), 4)) == ()


def test_an_explicit_layout_scales_its_dp_only() -> None:
    owner = elastic_job(4, low=1, parallelism={"mode": "Explicit", "dp": 4, "ep": 2})
    assert tuple(elastic.sizes(owner)) == (4, 2)
    plan = owner.plan_at(2)
    assert plan is not None
    assert (plan.layout.dp, plan.layout.ep, plan.replicas) == (2, 2, 2)
    assert owner.plan_at(3) is None


def test_few_counts_are_offered_whatever_the_bounds() -> None:
    owner = elastic_job(10_010, low=1, training={"steps": 50, "packsPerStep": 720_720})
    found = elastic.sizes(owner)
    assert len(found) == SIZES_MAX
    assert list(found) == sorted(found, reverse=True)


def test_a_plan_of_another_job_is_never_taken() -> None:
    first, second = elastic_job(4, low=1), elastic_job(4, low=1, training={"steps": 50, "packsPerStep": 4})
    assert first.uid == second.uid
    assert first.plan_at(3) is not None
    assert second.plan_at(3) is None


@pytest.mark.parametrize(
    ("fields", "later_s", "grows"),
    [
        ({}, 400, True),
        ({}, 200, False),  # begun a moment ago
        ({"step": 990}, 400, False),  # nearly done
        ({"stepSeconds": None}, 400, False),  # its pace is not known
        ({"phase": "Evaluating"}, 400, False),
        ({"released": False}, 400, False),
        ({"outcome": "Failed"}, 400, False),
    ],
)
def test_a_job_grows_only_when_the_rest_gains_more_than_a_restart_costs(
    fields: dict[str, Any], later_s: float, grows: bool
) -> None:
    owner = admitted(elastic_job(2, high=4), at_s=NOW_S)
    assert elastic.worth_growing(record(**fields), owner, **TO_FOUR, now_s=NOW_S + later_s) == grows


def test_what_restarts_have_cost_this_job_counts_as_their_price() -> None:
    owner = admitted(elastic_job(2, high=4), at_s=NOW_S)
    assert owner.attempt is not None
    slow = Accounting(lost=[LostTime(cause="Starting", milliseconds=1_000_000)])
    attempt = owner.attempt.model_copy(update={"number": 2})
    owner = dataclasses.replace(owner, status=owner.status.model_copy(update={"accounting": slow, "attempt": attempt}))
    assert elastic.resize_cost_s(owner.status) == 1000.0
    assert not elastic.worth_growing(record(), owner, **TO_FOUR, now_s=NOW_S + 400)


def test_a_job_is_admitted_smaller_than_it_wishes_and_says_so() -> None:
    owner = elastic_job(4, low=1)
    status = transition.admit(owner, ("n0", "n1"), NOW_S, plan=owner.plan_at(2))
    assert status.attempt is not None
    plan = owner.plan_at(2)
    assert plan is not None
    assert (status.attempt.replicas, status.attempt.plan_hash, status.layout) == (2, plan.hash, str(plan.layout))
    said = status.condition("Admitted")
    assert said is not None
    assert said.message == "2 workers on 2 nodes; 4 workers requested"


def test_a_smaller_gang_with_more_state_recomputes_layers_and_reports_it() -> None:
    training = {"steps": 50, "packsPerStep": 12, "optimizer": {"stateSharding": "Sharded"}}
    data = {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 512}
    parallelism = {"mode": "Explicit", "dp": 4, "microbatches": 1}
    roomy = elastic_job(4, low=1, training=training, data=data, parallelism=parallelism)
    assert roomy.spec is not None
    plan = roomy.plan_at(4)
    assert plan is not None
    setting = setting_of(roomy.spec, plan.shape)
    memory = memory_of_cut(setting, plan.layout, plan.cut, packs_per_step=12).total_bytes
    limit = {"name": "worker", "resources": {"limits": {"memory": str(int(memory / 0.9) + 2**20)}}}
    workers = {"replicas": 4, "minReplicas": 1, "devices": 1, "template": {"spec": {"containers": [limit]}}}
    owner = job(training=training, data=data, parallelism=parallelism, workers=workers)
    whole = transition.admit(owner, ("n0", "n1", "n2", "n3"), NOW_S)
    assert (whole.layout, whole.recompute) == ("dp4", "")
    small = transition.admit(owner, ("n0",), NOW_S, plan=owner.plan_at(1))
    assert (small.layout, small.recompute) == ("dp1", "Selective")


def test_a_resize_begins_with_the_plan_of_its_count_and_replaces_only_what_leaves_or_moves() -> None:
    owner = admitted(elastic_job(4, low=1), ("n0", "n0", "n1", "n1"))
    seen = snapshot(owner, pods=tuple(pod(owner, index) for index in range(4)), lease=lease(owner, outcome="Stopped"))
    plan = owner.plan_at(2)
    assert plan is not None
    status = transition.resize(seen, ["n0", "n1"], NOW_S, plan=plan)
    attempt, said = status.attempt, status.condition("Admitted")
    assert attempt is not None
    assert said is not None
    assert (attempt.number, attempt.replicas, attempt.plan_hash) == (2, 2, plan.hash)
    assert [attempt.replacement(index) for index in range(4)] == [0, 1, 1, 1]
    assert (said.reason, said.message) == ("Shrunk", "2 workers on 2 nodes, shrunk from 4; 4 workers requested")
    smaller = dataclasses.replace(owner, status=status)
    grown = transition.resize(snapshot(smaller), ["n0", "n1", "n1", "n1"], NOW_S).condition("Admitted")
    assert grown is not None
    assert (grown.reason, grown.message) == ("Grown", "4 workers on 2 nodes, grown from 2")


def test_a_restart_of_a_smaller_attempt_keeps_its_size_and_plan() -> None:
    owner = elastic_job(4, low=1)
    status = transition.admit(owner, ("n0", "n1"), NOW_S, plan=owner.plan_at(2))
    owner = dataclasses.replace(owner, status=status.model_copy(update={"replicas": 2}))
    attempt = owner.attempt
    assert attempt is not None
    after = StatusBuilder(owner, NOW_S)
    transition.begin_attempt(after, nodes=["n0", "n1"], replace=(), scope=Scope.PROCESS)
    again = after.build().attempt
    assert again is not None
    assert (again.replicas, again.plan_hash) == (2, attempt.plan_hash)


def test_a_changed_count_scales_an_explicit_layout_that_first_had_to_fit() -> None:
    spec: dict[str, Any] = {
        "workers": {"replicas": 2, "devices": 1},
        "parallelism": {"mode": "Explicit", "dp": 4, "ep": 2},
    }
    refused, scaled = job(**spec), job(generation=2, **spec)
    assert refused.plan is None
    assert "is 4 ranks, not 2" in refused.invalid
    assert scaled.plan is not None
    assert (scaled.plan.layout.dp, scaled.plan.layout.ep, scaled.invalid) == (2, 2, "")
    odd = job(generation=2, workers={"replicas": 3, "devices": 1}, parallelism=spec["parallelism"])
    assert odd.plan is None
    assert "ep 2 does not divide" in odd.invalid


@pytest.mark.parametrize(
    ("bounds", "asked_later", "expected"),
    [
        ({}, False, True),
        ({"low": 2}, False, False),
        ({"high": 6}, False, False),
        ({"low": 2, "high": 6}, True, True),
    ],
    ids=["of one size", "started smaller", "may grow", "scaled since"],
)
def test_an_elastic_job_is_scaled_only_by_a_change_of_its_spec(
    bounds: dict[str, int], asked_later: bool, expected: bool
) -> None:
    owner = admitted(elastic_job(4, **bounds), ("n0", "n0"))
    asked = dataclasses.replace(owner, generation=owner.generation + asked_later)
    assert scaled(asked) is expected
    assert not scaled(admitted(elastic_job(2, **bounds), ("n0", "n0")))
