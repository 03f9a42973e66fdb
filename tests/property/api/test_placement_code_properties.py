"""A placement goes through its short form and comes back, whatever the nodes are called."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.job.placement import Placement, runs_of, values_of

odd = st.text('abx019.-%{}[],"\\\x00é٣ ', min_size=1, max_size=30)
ruled = st.from_regex(re.compile(r"gpu-[ab][0-9]{1,3}(-[0-9]{1,2})?(\.(local|internal))?"), fullmatch=True)
cloudy = st.from_regex(re.compile(r"pool-[a-f0-9]{2,4}-[a-z0-9]{2}"), fullmatch=True)


@given(st.lists(odd | ruled | cloudy, max_size=60))
def test_a_placement_goes_round(nodes: list[str]) -> None:
    placement = Placement.of(nodes)
    assert placement.node_by_index() == nodes
    again = Placement.model_validate_json(placement.model_dump_json(by_alias=True))
    assert again == placement
    assert again.node_by_index() == nodes


@given(st.lists(ruled, min_size=1, max_size=40), st.data())
def test_several_workers_of_one_node_go_round(names: list[str], data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.sampled_from(names), max_size=100))
    placement = Placement.of(nodes)
    assert placement.node_by_index() == nodes
    assert len({name for entry in placement.nodes for name in entry.names()}) == len(set(nodes))


@given(st.lists(st.integers(0, 4), max_size=200) | st.lists(st.integers(0, 10**30), max_size=50))
def test_runs_go_round(values: list[int]) -> None:
    runs = runs_of(values)
    assert values_of(runs) == values
    assert re.fullmatch(r"([0-9]+(-[0-9]+)?(x[0-9]+)?(,|$))*", runs)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=100))
def test_what_is_handed_out_is_the_callers_own(values: list[int]) -> None:
    placement = Placement.of([f"n{value}" for value in values])
    placement.node_by_index().clear()
    assert placement.node_by_index() == [f"n{value}" for value in values]
