"""Every class of anomalies has its share of the seeds, and does what it is for."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.kinds import KINDS
from polyreme_api.load import parse_object
from polyreme_simulator.anomalies import CLASSES, FOREIGN_EVERY, IN_TURN, class_of
from polyreme_simulator.event_loop import SimClock, VirtualLoop
from polyreme_simulator.malformed import QUEUES, draw_malformed
from polyreme_simulator.profiles import PROFILES
from polyreme_simulator.run import simulate

SEEDS = {
    "write refused": 32,
    "child deleted": 4,
    "foreign labels": 7,
    "node flaps": 9,
    "malformed object": 12,
    "clock steps": 29,
    "refused children": 28,
    "forged records": 3,
    "foreign queues": 10,
}


def test_every_class_meets_every_profile() -> None:
    for kinds, seeds in (
        (IN_TURN, 5 * len(IN_TURN) * len(PROFILES)),
        (CLASSES[-1:], 2 * FOREIGN_EVERY * len(PROFILES)),
    ):
        met = Counter((class_of(seed), seed % len(PROFILES)) for seed in range(seeds))
        assert all(met[kind, at] == 2 for kind in kinds for at in range(len(PROFILES)))


def test_seeds_without_an_anomaly_are_most() -> None:
    assert [class_of(seed) for seed in (0, 1, 3, 5, 6, 8)] == [""] * 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_of_anomalies_comes_about_and_breaks_no_rule(kind: str) -> None:
    result = simulate(SEEDS[kind], anomaly=kind)
    assert result.reached[kind, ""]
    assert result.violations == ()


def test_malformed_objects_of_our_kinds_break_their_schemas_or_their_pods() -> None:
    refused = 0
    for number in range(200):
        manifest, _ = draw_malformed(random.Random(number), number=number, nodes=["n0"])
        if manifest["kind"] not in KINDS:
            continue
        try:
            parse_object(manifest, KINDS[manifest["kind"]])
        except InvalidConfigError:
            refused += 1
        else:
            assert manifest["spec"] not in QUEUES
    assert refused >= 20


def test_a_stepped_clock_changes_wall_time_and_no_duration() -> None:
    loop = VirtualLoop()
    try:
        clock, other = SimClock(loop), SimClock(loop)
        clock.step_wall(-3600.0)
        assert other.now_s() - clock.now_s() == pytest.approx(3600.0)
        assert clock.steady_s() == other.steady_s()
    finally:
        loop.close()
