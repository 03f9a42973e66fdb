"""How short a placement is, and how it reads."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from polyreme_api.job.placement import NodeNames, Placement, runs_of, values_of

KIB = 1024
GANG = 15_000
RACKS = [f"gpu-rack{rack:02d}-node{node:02d}.cluster.local" for rack in range(GANG // 8) for node in range(8)]
ADDRESSES = [
    f"ip-10-{at // 65_536}-{at // 256 % 256}-{at % 256}.ec2.internal"
    for at in sorted(random.Random(1).sample(range(4 * 65_536), GANG))
]


def shuffled(names: Sequence[str]) -> list[str]:
    return random.Random(2).sample(names, len(names))


@pytest.mark.parametrize(
    ("names", "most_kib"),
    [(RACKS, 10), (ADDRESSES, 80), (shuffled(RACKS), 120), (shuffled(ADDRESSES), 160)],
    ids=["racks", "addresses", "racks in any order", "addresses in any order"],
)
def test_a_gang_on_15000_nodes_stays_far_under_200_kib(names: list[str], most_kib: int) -> None:
    assert len(set(names)) == GANG
    placement = Placement.of(names)
    assert len(placement.model_dump_json(by_alias=True)) < most_kib * KIB
    assert placement.node_by_index() == names


def test_eight_workers_a_node_cost_no_more() -> None:
    nodes = [name for name in RACKS[: GANG // 8] for _ in range(8)]
    assert len(Placement.of(nodes).model_dump_json()) < 3 * KIB


def test_names_without_rule_share_what_they_begin_and_end_with() -> None:
    letters = random.Random(3)
    names = [f"pool-{''.join(letters.choices('bcdfghjkmn', k=6))}.internal" for _ in range(200)]
    placement = Placement.of(names)
    assert [entry.parts for entry in placement.nodes] == [["pool-", ".internal"]]
    assert placement.node_by_index() == names


def test_a_small_placement_reads_well() -> None:
    placement = Placement.of(["node-01", "node-02", "node-03", "node-01"])
    assert placement == Placement(nodes=[NodeNames(parts=["node-", ""], numbers=["1-3"], digits=[2])], order="0-2,0")


def test_numbers_with_leading_zeros_are_other_names() -> None:
    names = ["n7", "n07", "n8", "n08", "n10", "n010", "n0", "n00"]
    assert Placement.of(names).node_by_index() == names


def test_signs_that_formats_read_are_text_like_any_other() -> None:
    names = [f"100%-{{{at}}}%s-%d" for at in range(8)]
    placement = Placement.of(names)
    assert len(placement.nodes) == 1
    assert placement.nodes[0].numbers
    assert placement.node_by_index() == names


def test_an_empty_placement_has_no_nodes() -> None:
    assert Placement.of([]) == Placement()
    assert Placement().node_by_index() == []


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2], "0-2"),
        ([7, 7, 7], "7x3"),
        ([4, 4, 5, 5], "4-5x2"),
        ([0, 1, 2, 7, 7, 7, 4, 4, 5, 5], "0-2,7x3,4-5x2"),
        ([2, 1, 0], "2,1,0"),
    ],
)
def test_runs_are_what_the_reference_says(values: list[int], runs: str) -> None:
    assert runs_of(values) == runs
    assert values_of(runs) == values
