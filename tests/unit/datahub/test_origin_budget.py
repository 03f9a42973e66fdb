"""A job's budget at its bucket: processes share it by leases in the store, and wait for their turn."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import StoreFailedError
from polyreme_datahub.loader.read.budget_rules import (
    GROWN_AFTER_S,
    HEADER_BYTES,
    RENEWAL,
    RENEWALS,
    RENEWED_EVERY_S,
    SKEW_S,
    Rate,
    Table,
    renewed,
    usable,
)
from polyreme_datahub.loader.read.origin_budget import (
    KEPT,
    WAIT_MAX_S,
    Clocks,
    LeaseTable,
    OriginBudget,
    Reader,
    origin_budget,
    wanted_by,
)
from polyreme_datahub.objects import open_store
from tests.unit.datahub.jobs import make_spec
from tests.unit.datahub.stores import PassingStore, StepClock

BUDGET = Rate(60.0, 60e6)
SIZE = 100_000
LEASE_TTL_S = SKEW_S + RENEWALS * RENEWED_EVERY_S


def process(store: PassingStore, clock: StepClock, *, share: float = 1.0, holder: str | None = None) -> OriginBudget:
    return OriginBudget(
        LeaseTable(store, "job"),
        BUDGET,
        wanted=BUDGET * share,
        holder=holder,
        clocks=Clocks(now_s=lambda: 1e6 + clock(), steady_s=clock, sleep=clock.sleep),
    )


@pytest.fixture
def store(tmp_path: Path) -> PassingStore:
    return PassingStore(open_store(f"file://{tmp_path}/objects"))


def requests_in(budget: OriginBudget, clock: StepClock, seconds: float) -> int:
    """Send requests one after another for a while; return how many."""
    end_s, count = clock() + seconds, 0
    while clock() < end_s:
        with budget.admitted(SIZE) as may:
            assert may == SIZE
            count += 1
    return count


def test_processes_at_once_stay_within_the_budget_and_use_most_of_it(store: PassingStore) -> None:
    clock = StepClock()
    processes = [process(store, clock, share=1 / 3) for _ in range(3)]
    sent = list[float]()
    while clock() < 60.0:
        for each in processes:
            with each.admitted(SIZE):
                sent.append(clock())
    windows = [sum(start_s <= at_s < start_s + 1.0 for at_s in sent) for start_s in sent]
    assert max(windows) <= BUDGET.requests - 3 * RENEWAL.requests
    assert len(sent) / 60.0 > 0.7 * BUDGET.requests


def test_the_share_of_a_dead_process_is_used_by_the_other_when_its_lease_has_ended(store: PassingStore) -> None:
    clock = StepClock()
    one, two = process(store, clock), process(store, clock)
    for _ in range(3):
        requests_in(one, clock, 6.0)
        requests_in(two, clock, 6.0)
    half = requests_in(one, clock, 10.0)
    requests_in(one, clock, LEASE_TTL_S + SKEW_S)
    assert requests_in(one, clock, 10.0) > 1.8 * half


def test_a_successor_takes_over_the_share_and_the_old_process_ends(store: PassingStore) -> None:
    clock = StepClock()
    old = process(store, clock, share=0.5, holder="engine of pod 0")
    full = requests_in(old, clock, 20.0)
    new = process(store, clock, share=0.5, holder="engine of pod 0")
    requests_in(new, clock, 5.0)
    assert requests_in(new, clock, 20.0) == pytest.approx(full, rel=0.1)
    with pytest.raises(EnvironmentFailedError, match="another process reads the job's data as engine of pod 0"):
        requests_in(old, clock, 1.0)


def test_a_request_that_gets_no_share_ends_with_the_field_to_change(
    store: PassingStore, caplog: pytest.LogCaptureFixture
) -> None:
    clock = StepClock()
    table = renewed(Table(), "other", process="other", budget=BUDGET, wanted=BUDGET, now_s=1e6 + 10 * WAIT_MAX_S)
    assert table is not None
    assert LeaseTable(store, "job").replace(table)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(EnvironmentFailedError, match=r"waited 300 s for its share of the job's budget") as raised,
        process(store, clock).admitted(SIZE),
    ):
        pass
    assert raised.value.field == "spec.data.originBudget"
    assert len(caplog.records) == 1


def test_what_is_asked_for_at_once_fits_the_share(store: PassingStore) -> None:
    one = process(store, StepClock(), share=1 / 6)
    with one.admitted(1 << 30) as may:
        assert 0 < may <= BUDGET.bytes / 6 - RENEWAL.bytes - HEADER_BYTES


def test_a_process_that_slept_does_not_bring_back_an_old_generation(store: PassingStore) -> None:
    table = LeaseTable(store, "job")
    slept = renewed(table.newest(), "slept", process="slept", budget=BUDGET, wanted=BUDGET, now_s=0.0)
    assert slept is not None
    for at in range(KEPT + 3):
        after = renewed(table.newest(), "awake", process="awake", budget=BUDGET, wanted=BUDGET, now_s=float(at))
        assert after is not None
        assert table.replace(after)
    assert not table.replace(slept)
    assert [lease.holder for lease in table.newest().leases] == ["awake"]
    assert len(list(store.list("budgets/"))) == KEPT + 1


class AwayStore(PassingStore):
    """Fails while it is away."""

    away = False

    def get(self, key: str) -> bytes:
        if self.away:
            raise StoreFailedError("the store is away")
        return super().get(key)


def test_a_store_that_is_away_while_a_lease_is_renewed_costs_nothing_until_the_lease_ends(store: PassingStore) -> None:
    clock, behind = StepClock(), AwayStore(store)
    one = process(behind, clock)
    requests_in(one, clock, 1.0)
    behind.away = True
    assert requests_in(one, clock, LEASE_TTL_S - SKEW_S - 3.0) > 0
    with pytest.raises(StoreFailedError, match="the store is away"):
        requests_in(one, clock, 5.0)
    behind.away = False
    assert requests_in(one, clock, 5.0) > 0


def test_an_idle_engine_gives_up_what_another_process_waits_for(store: PassingStore) -> None:
    clock = StepClock()
    engine, rank = process(store, clock), process(store, clock)
    requests_in(engine, clock, 1.0)
    begun_s, told = clock(), list[float]()

    def tended(now_s: float) -> None:
        engine.tend()
        while engine._tending._value == 0:
            pass
        told.append(now_s)

    clock.at_wait = tended
    with rank.admitted(SIZE):
        assert clock() - begun_s < RENEWED_EVERY_S + GROWN_AFTER_S + 2.0
    assert told


def budgeted(**workers: int) -> TrainingJobSpec:
    given = make_spec(["one"]).model_dump(mode="json", by_alias=True, exclude_none=True)
    given["data"]["originBudget"] = {"requestsPerSecond": 100, "bytesPerSecond": 1 << 30}
    return TrainingJobSpec.model_validate({**given, "workers": workers})


def test_data_in_a_directory_have_no_budget(tmp_path: Path) -> None:
    assert origin_budget(f"file://{tmp_path}", budgeted(), job="uid") is None
    assert origin_budget("s3://bucket", make_spec(["one"]), job="uid") is None


@pytest.mark.parametrize(("pods", "devices", "budget"), [(1, 1, Rate(20, 2 << 20)), (8, 8, Rate(5_000, 1e10))])
def test_what_all_processes_of_a_job_want_fits_its_budget(pods: int, devices: int, budget: Rate) -> None:
    engine, beside, rank = (wanted_by(each, budget, pods=pods, devices=devices) for each in Reader)
    assert not (rank * (pods * devices)).exceeds(budget)
    assert not (engine * pods + beside * (pods * devices)).exceeds(budget * 1.0000001)
    for wanted in (engine, beside, rank):
        assert usable_requests(wanted) >= 1.0


def usable_requests(wanted: Rate) -> float:
    table = renewed(Table(), "one", process="one", budget=wanted, wanted=wanted, now_s=0.0)
    assert table is not None
    return usable(table.of("one"), now_s=0.0).requests
