"""Which nodes a pod template accepts, by Kubernetes' rules, and how many workers each holds."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from polyreme_operator.placement.eligible import matches, slots_N, tolerated, tolerates
from polyreme_operator.types.inventory import Constraints, Taint
from tests.unit.operator.placement_scenes import cluster, gang, grid

TAINT = Taint(key="k", value="v")


@pytest.mark.parametrize(
    ("toleration", "taint", "tolerated"),
    [
        ({"key": "k", "value": "v"}, TAINT, True),
        ({"key": "k", "operator": "Equal", "value": "w"}, TAINT, False),
        ({"key": "k", "operator": "Exists"}, TAINT, True),
        ({"operator": "Exists"}, TAINT, True),
        ({"operator": "Equal", "value": "v"}, TAINT, False),
        ({"key": "k", "value": "v", "effect": "NoExecute"}, TAINT, False),
        ({"key": "k", "value": "v", "effect": "NoSchedule"}, TAINT, True),
        ({"key": "k", "operator": "Exists"}, Taint(key="k", effect="NoExecute"), True),
        ({"key": "other", "operator": "Exists"}, TAINT, False),
        ({"key": "k", "value": None}, Taint(key="k"), True),
        ({"key": "other", "operator": "Exists"}, Taint(key="k", effect="PreferNoSchedule"), True),
    ],
)
def test_tolerations(toleration: dict[str, Any], taint: Taint, tolerated: bool) -> None:
    assert tolerates([toleration], taint) is tolerated


@pytest.mark.parametrize(
    ("operator", "values", "value", "holds"),
    [
        ("In", ["a", "b"], "b", True),
        ("In", ["a"], None, False),
        ("NotIn", ["a"], "a", False),
        ("NotIn", ["a"], None, True),
        ("Exists", [], "", True),
        ("Exists", [], None, False),
        ("DoesNotExist", [], None, True),
        ("DoesNotExist", [], "x", False),
        ("Gt", ["5"], "6", True),
        ("Gt", ["5"], "5", False),
        ("Lt", ["5"], "-4", True),
        ("Lt", ["5"], "x", False),
        ("Gt", ["5"], None, False),
        ("Gt", ["1_0"], "20", False),
        ("Within", ["a"], "a", False),
    ],
)
def test_operators(operator: str, values: list[str], value: str | None, holds: bool) -> None:
    assert matches(value, {"key": "k", "operator": operator, "values": values}) is holds


def affinity(*terms: dict[str, Any]) -> Constraints:
    return Constraints(required_affinity=json.dumps({"nodeSelectorTerms": list(terms)}))


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


NAMES = ("b0/r0/h00", "b0/r0/h01", "b0/r0/h02")
GENERATION = {NAMES[0]: {"gen": "1"}, NAMES[1]: {"gen": "2"}}


@pytest.mark.parametrize(
    ("constraints", "open_rows"),
    [
        (Constraints(), [0, 1, 2]),
        (Constraints(node_selector=(("gen", "1"),)), [0]),
        (Constraints(node_selector=(("kubernetes.io/hostname", NAMES[2]),)), [2]),
        (affinity({"matchExpressions": [expression("gen", "Exists")]}), [0, 1]),
        (affinity({"matchExpressions": [expression("gen", "Gt", "1")]}), [1]),
        (affinity({"matchExpressions": [expression("gen", "NotIn", "1")]}), [1, 2]),
        (affinity({"matchFields": [expression("metadata.name", "In", NAMES[1], "gone")]}), [1]),
        (affinity({"matchFields": [expression("metadata.name", "NotIn", NAMES[1])]}), [0, 2]),
        (affinity({"matchFields": [expression("metadata.uid", "In", NAMES[1])]}), []),
        (affinity({"matchExpressions": [expression("kubernetes.io/hostname", "Exists")]}), [0, 1, 2]),
        (
            affinity(
                {"matchExpressions": [expression("gen", "In", "1")]},
                {"matchFields": [expression("metadata.name", "In", NAMES[2])]},
            ),
            [0, 2],
        ),
        (affinity({"matchExpressions": [expression("gen", "In", "1"), expression("gen", "In", "2")]}), []),
        (affinity({}), []),
        (affinity(), []),
    ],
)
def test_selectors_and_affinity(constraints: Constraints, open_rows: list[int]) -> None:
    inventory = cluster(dict.fromkeys(NAMES, 8), labels=GENERATION)
    assert np.flatnonzero(slots_N(inventory, gang(1, constraints=constraints))).tolist() == open_rows


def test_taints_repel_unless_tolerated() -> None:
    inventory = cluster(
        dict.fromkeys(NAMES, 8), taints={NAMES[0]: (TAINT,), NAMES[1]: (Taint(key="p", effect="PreferNoSchedule"),)}
    )
    assert slots_N(inventory, gang(1)).tolist() == [0, 1, 1]
    tolerant = Constraints(tolerations=json.dumps([{"key": "k", "operator": "Exists"}]))
    assert slots_N(inventory, gang(1, constraints=tolerant)).tolist() == [1, 1, 1]


def test_the_scarcest_resource_counts() -> None:
    inventory = cluster({NAMES[0]: 8, NAMES[1]: 5, NAMES[2]: 8})
    assert slots_N(inventory, gang(1, devices=2)).tolist() == [4, 2, 4]
    assert slots_N(inventory, gang(1, devices=2, cpu=20_000)).tolist() == [3, 2, 3]
    inventory.used_NR[2, 2] = 109  # pods of a daemon set
    assert slots_N(inventory, gang(1, devices=2)).tolist() == [4, 2, 1]
    inventory.used_NR[0, 0] = 9  # more taken than there is: a device that died
    assert slots_N(inventory, gang(1, devices=2)).tolist() == [0, 2, 1]


def test_what_no_node_has_fits_nowhere() -> None:
    request = dataclasses.replace(gang(1), requests=(("example.com/other", 1),))
    assert slots_N(cluster(grid(1, 1, 2)), request).tolist() == [0, 0]


def test_unusable_and_blocked_nodes_hold_nothing() -> None:
    inventory = cluster(dict.fromkeys(NAMES, 8), out=[NAMES[0]])
    assert slots_N(inventory, gang(1), blocked_N=np.array([False, True, False])).tolist() == [0, 0, 1]


def test_what_is_kept_for_one_version_is_bounded() -> None:
    inventory = cluster(grid(1, 1, 1))
    for at in range(2000):
        slots_N(inventory, gang(1, constraints=Constraints(node_selector=(("gen", str(at)),))))
    assert len(inventory.memo["eligible"]) <= 512


@pytest.mark.parametrize("toleration", [{"operator": "Exists"}, {"key": "polyreme.dev/health", "operator": "Exists"}])
def test_no_job_tolerates_that_its_node_is_faulty(toleration: dict[str, str]) -> None:
    faulty, other = Taint(key="polyreme.dev/health", value="gpu-lost"), Taint(key="team.example/health")
    assert not tolerated(json.dumps([toleration]), [faulty])
    assert tolerated(json.dumps([toleration]), [other]) == ("key" not in toleration)


def test_a_toleration_without_a_key_does_not_cover_taints_of_polyreme() -> None:
    """Tolerations with such a key are left out where a job is read, but for those that the operator adds."""
    owned = Taint(key="polyreme.dev/owned")
    assert not tolerated(json.dumps([{"operator": "Exists"}]), [owned])
    assert tolerated(json.dumps([{"key": "polyreme.dev/owned", "operator": "Exists"}]), [owned])
