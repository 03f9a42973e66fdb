"""The wind tunnel: every millisecond charged once, the operator's verdicts, and the closed forms."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.policy import Backoff, FailurePolicy
from polyreme_operator.types.reasons import Scope
from polyreme_wind_tunnel.causes import DEVICE_MTTF_HOURS, HOUR_MS, LLAMA3, LLAMA3_INTERRUPTIONS, FaultCause, Reach
from polyreme_wind_tunnel.closed_forms import best_interval, effective_share, longest_restart
from polyreme_wind_tunnel.comparison import ROWS_MAX, Axes, compare, formula, frontier
from polyreme_wind_tunnel.run import Outcome, Spent, run
from polyreme_wind_tunnel.scenario import ANY_JOB, Faults, Machines, Recovery, Saves, Scenario, check

DAY_MS = 24 * HOUR_MS
CRASH = FaultCause("crash", 1.0, Reach.NONE)
BROKEN = FaultCause("broken node", 1.0, Reach.NODE, HOUR_MS)
SWITCH = FaultCause("switch", 1.0, Reach.RACK, HOUR_MS)
PATIENT = FailurePolicy(
    max_restarts=1000,
    window_seconds=1,
    no_progress_max=1000,
    in_place_max=50,
    backoff=Backoff(initial_seconds=0, max_seconds=0),
)


def scenario(*causes: FaultCause, **fields: Any) -> Scenario:
    """A job with a fault an hour; what fields name belongs to the part that has it."""

    def of(part: type) -> dict[str, Any]:
        return {field.name: fields[field.name] for field in dataclasses.fields(part) if field.name in fields}

    return Scenario(
        machines=Machines(**{"nodes": 4, "devices": 1, "nodes_per_rack": 2, **of(Machines)}),
        faults=Faults(**{"causes": causes, "device_mttf_hours": 4.0, **of(Faults)}),
        saves=Saves(**{"interval_ms": 600_000, "stall_ms": 1000, **of(Saves)}),
        recovery=Recovery(**of(Recovery)),
        spec=ANY_JOB.model_copy(update={"failure_policy": fields.get("policy", PATIENT)}),
        lowest_rung=fields.get("lowest_rung", Scope.PROCESS),
    )


def at_full_length(of: Scenario, *, days: int = 30, seed: int = 0) -> Outcome:
    return run(of, horizon_ms=days * DAY_MS, seed=seed)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    spares=st.integers(0, 4),
    interval_ms=st.integers(1000, 10**7),
    durable_ms=st.integers(0, 999),
    recall=st.sampled_from([0.0, 0.3, 1.0]),
    rung=st.sampled_from([Scope.PROCESS, Scope.POD, Scope.GANG]),
    budget=st.sampled_from([3, 1000]),
    horizon_ms=st.integers(1, 5 * DAY_MS),
)
def test_each_millisecond_is_charged_once(
    seed: int,
    spares: int,
    interval_ms: int,
    durable_ms: int,
    recall: float,
    rung: Scope,
    budget: int,
    horizon_ms: int,
) -> None:
    given_scenario = scenario(
        CRASH,
        BROKEN,
        SWITCH,
        dataclasses.replace(CRASH, name="silent", silent=True),
        policy=PATIENT.model_copy(update={"max_restarts": budget, "window_seconds": 86_400}),
        spares=spares,
        interval_ms=interval_ms,
        durable_ms=durable_ms,
        recall=recall,
        precision=0.5,
        lowest_rung=rung,
    )
    outcome = run(given_scenario, horizon_ms=horizon_ms, seed=seed)
    assert outcome.total_ms() == horizon_ms
    assert all(taken > 0 for taken in outcome.spent_ms.values())
    assert (outcome.given_up_ms is None) == (outcome.total_ms(Spent.FAILED) == 0) or outcome.given_up_ms == horizon_ms


@pytest.mark.parametrize(
    ("interval_s", "stall_s", "durable_s", "restart_s"), [(600, 1, 300, 60), (300, 30, 0, 120), (1200, 5, 900, 30)]
)
def test_the_simulated_share_is_that_of_the_closed_form(
    interval_s: int, stall_s: int, durable_s: int, restart_s: int
) -> None:
    given_scenario = scenario(
        CRASH,
        interval_ms=interval_s * 1000,
        stall_ms=stall_s * 1000,
        durable_ms=durable_s * 1000,
        in_memory=False,
        exit_seen_ms=0,
        process_ms=restart_s * 1000,
    )
    outcome = at_full_length(given_scenario, days=150)
    assert outcome.effective_share == pytest.approx(formula(given_scenario), abs=0.01)


def daly_interval(*, mttf: float, stall: float) -> float:
    """Return Daly's estimate of the best interval between blocking saves (equation 37)."""
    if stall >= 2.0 * mttf:
        return mttf
    part = stall / (2.0 * mttf)
    return math.sqrt(2.0 * stall * mttf) * (1.0 + math.sqrt(part) / 3.0 + part / 9.0) - stall


def test_the_closed_form_of_a_blocking_save_is_dalys() -> None:
    mttf, interval, stall, restart = 3600.0, 600.0, 20.0, 60.0
    # The paper's equation 20, solved for the share.

    daly = interval / (mttf * math.exp(restart / mttf) * math.expm1((interval + stall) / mttf))
    found = effective_share(mttf=mttf, interval=interval, stall=stall, durable=0, restart=restart)
    assert found == pytest.approx(daly, rel=1e-12)
    best = best_interval(mttf=mttf, stall=stall, durable=0.0, restart=restart)
    assert best == pytest.approx(daly_interval(mttf=mttf, stall=stall), rel=0.001)


@pytest.mark.parametrize("durable", [0.0, 100.0, 700.0])
def test_no_other_interval_is_better_than_the_best(durable: float) -> None:
    fixed = {"mttf": 3600.0, "stall": 5.0, "durable": durable, "restart": 60.0}
    best = best_interval(**fixed)
    share = effective_share(interval=best, **fixed)
    others = [durable - 5.0 + more for more in (1.0, 10.0, 100.0, 1000.0, 3000.0)]
    assert best >= durable - 5.0
    assert all(effective_share(interval=other, **fixed) <= share + 1e-9 for other in others if other > 0)


def test_the_frontier_is_where_the_closed_form_meets_the_target() -> None:
    base = scenario(CRASH, durable_ms=10_000)
    (interval_ms, most_ms), (_, none) = frontier(base, [600_000, 20 * HOUR_MS], target=0.8)
    assert most_ms is not None
    share = effective_share(mttf=base.mttf_ms, interval=interval_ms, stall=1000, durable=10_000, restart=most_ms)
    assert share == pytest.approx(0.8, rel=1e-9)
    assert none is None, "a save each twenty hours keeps no 80 % with a fault an hour"
    assert longest_restart(share=0.999, mttf=1.0, interval=1.0, stall=0.0, durable=0.0) is None


def test_the_failure_policy_of_the_job_decides_when_it_gives_up() -> None:
    strict = PATIENT.model_copy(update={"max_restarts": 3, "window_seconds": 86_400})
    outcome = at_full_length(scenario(CRASH, policy=strict))
    assert outcome.given_up_ms is not None
    assert "at most 3 are allowed" in outcome.reason
    assert sum(outcome.faults.values()) == 4
    assert at_full_length(scenario(CRASH)).given_up_ms is None


@pytest.mark.parametrize(("max_restarts", "lasts"), [(None, True), (10, False)])
def test_the_default_budget_suffices_for_llama3s_training(max_restarts: int | None, lasts: bool) -> None:
    """54 days on 16,384 devices, which meet eight faults a day."""
    policy = FailurePolicy(max_restarts=max_restarts)
    large = scenario(*LLAMA3, nodes=2048, devices=8, spares=64, device_mttf_hours=DEVICE_MTTF_HOURS, policy=policy)
    outcomes = [at_full_length(large, days=54, seed=seed) for seed in range(5)]
    assert [outcome.given_up_ms is None for outcome in outcomes] == [lasts] * 5, outcomes[0].reason
    assert min(sum(outcome.faults.values()) for outcome in outcomes) > (300 if lasts else 0)


def test_the_default_budget_grows_with_the_devices_of_the_job() -> None:
    allowed = FailurePolicy().restarts_allowed
    assert [allowed(devices) for devices in (1, 511, 512, 16_384, 10**6)] == [10, 10, 11, 42, 1000]
    assert FailurePolicy(max_restarts=3).restarts_allowed(16_384) == 3


def test_a_restart_in_place_resumes_from_memory_and_a_new_pod_from_storage() -> None:
    slow_storage = {"interval_ms": 900_000, "durable_ms": 800_000}
    in_place = at_full_length(scenario(CRASH, **slow_storage))
    from_storage = at_full_length(scenario(CRASH, lowest_rung=Scope.POD, **slow_storage))
    without_copy = at_full_length(scenario(CRASH, in_memory=False, **slow_storage))
    assert in_place.total_ms(Spent.RECOMPUTED) < 0.7 * from_storage.total_ms(Spent.RECOMPUTED)
    assert in_place.total_ms(Spent.RECOMPUTED) < 0.7 * without_copy.total_ms(Spent.RECOMPUTED)


RARE = {"device_mttf_hours": 200.0}
"""A fault of four nodes each 50 hours, so that two repairs seldom overlap."""


def test_a_job_waits_for_repairs_without_a_node_in_reserve() -> None:
    alone = at_full_length(scenario(BROKEN, **RARE), days=500)
    helped = at_full_length(scenario(BROKEN, spares=4, **RARE), days=500)
    assert alone.total_ms(Spent.WAITING) == pytest.approx(alone.faults["broken node"] * HOUR_MS, rel=0.2)
    assert helped.total_ms(Spent.WAITING) < 0.01 * alone.total_ms(Spent.WAITING)


def test_a_switch_takes_its_whole_rack() -> None:
    """One node in reserve replaces one, but not the two of a rack."""
    of_node = at_full_length(scenario(BROKEN, spares=1, **RARE), days=500)
    of_rack = at_full_length(scenario(SWITCH, spares=1, **RARE), days=500)
    assert of_node.total_ms(Spent.WAITING) < 0.1 * of_node.faults["broken node"] * HOUR_MS
    assert of_rack.total_ms(Spent.WAITING) > 0.7 * of_rack.faults["switch"] * HOUR_MS


def test_a_predicted_fault_costs_no_training_twice() -> None:
    all_seen = at_full_length(scenario(BROKEN, spares=4, recall=1.0))
    assert all_seen.total_ms(Spent.RECOMPUTED, Spent.DETECTING) == 0
    assert not all_seen.faults
    assert all_seen.moves > 100
    doubtful = at_full_length(scenario(BROKEN, spares=4, recall=1.0, precision=0.5))
    assert doubtful.moves == pytest.approx(2 * all_seen.moves, rel=0.15)


def test_faults_of_different_workers_are_no_repetition_on_one_worker() -> None:
    """The failure policy replaces the pod of a worker that fails again after a restart in place."""
    starting_ms = []
    for nodes in (1, 200):
        once = scenario(
            CRASH,
            nodes=nodes,
            device_mttf_hours=float(nodes),
            policy=PATIENT.model_copy(update={"in_place_max": 1}),
            process_ms=1_000,
            pod_ms=100_000,
        )
        outcome = at_full_length(once)
        starting_ms.append(outcome.total_ms(Spent.STARTING) / sum(outcome.faults.values()))
    assert starting_ms[0] > 40_000, "every second restart brings a new pod"
    assert starting_ms[1] < 2_000


def test_policies_of_one_seed_meet_the_same_faults() -> None:
    often, seldom = (scenario(BROKEN, spares=8, interval_ms=ms) for ms in (60_000, 3_000_000))
    assert at_full_length(often).faults == at_full_length(seldom).faults


def test_llama3s_training_meets_as_many_faults_as_it_did() -> None:
    assert sum(cause.weight for cause in LLAMA3) == LLAMA3_INTERRUPTIONS
    llama = Scenario(
        machines=Machines(nodes=2048, spares=64),
        saves=Saves(interval_ms=600_000),
        spec=ANY_JOB.model_copy(update={"failure_policy": PATIENT}),
    )
    assert llama.mttf_ms == pytest.approx(DEVICE_MTTF_HOURS / 16_384 * HOUR_MS)
    counts = [sum(run(llama, horizon_ms=54 * DAY_MS, seed=seed).faults.values()) for seed in range(5)]
    assert sum(counts) / 5 == pytest.approx(LLAMA3_INTERRUPTIONS, abs=2 * (LLAMA3_INTERRUPTIONS / 5) ** 0.5)


def test_policies_are_combined_and_rows_summed() -> None:
    axes = Axes(spares=[0, 4], intervals_ms=[600_000], rungs=[Scope.PROCESS, Scope.GANG], recalls=[0.0])
    rows = list(compare(axes.scenarios(scenario(BROKEN, CRASH)), horizon_ms=10 * DAY_MS, runs=3, seed=1))
    assert [(row.scenario.machines.spares, row.scenario.lowest_rung) for row in rows] == list(
        itertools.product([0, 4], [Scope.PROCESS, Scope.GANG])
    )
    for row in rows:
        assert sum(row.shares.values()) == pytest.approx(1.0)
        assert row.shares[Spent.PRODUCTIVE] == pytest.approx(row.effective_share)
        assert 0 < row.error < 0.1
    assert rows[2].effective_share > rows[0].effective_share, "four spares against none"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"recall": 1.5}, "--recall"),
        ({"recall": 0.5, "precision": 0.0}, "--precision"),
        ({"interval_ms": 0, "stall_ms": 5}, "--interval"),
        ({"interval_ms": 1000, "stall_ms": 0, "durable_ms": 1000}, "--durable"),
    ],
)
def test_a_scenario_that_cant_be_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        check(scenario(CRASH, **fields))
    assert refused.value.field == field


def test_too_many_policies_are_refused() -> None:
    axes = Axes(spares=range(ROWS_MAX + 1), intervals_ms=[600_000], rungs=[Scope.PROCESS], recalls=[0.0])
    with pytest.raises(InvalidConfigError, match=f"at most {ROWS_MAX}"):
        axes.scenarios(scenario(CRASH))
