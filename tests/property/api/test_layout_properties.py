"""Layouts, volumes and plans, for any world, model and batch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.layout import (
    NEAREST_MAX,
    Layout,
    fitting_layouts,
    fitting_worlds,
    misfits,
    plain_layouts,
)
from polyreme_planner.model_parts import expert_parameters, parameter_count
from polyreme_planner.plan import Plan
from polyreme_planner.shapes import KIMI_VL_NANO, ModelShape
from polyreme_planner.traffic_volume import group_volumes, shared_parameters

shapes = st.builds(
    lambda experts, layers: dataclasses.replace(
        KIMI_VL_NANO, decoder=dataclasses.replace(KIMI_VL_NANO.decoder, experts=experts, layers=layers)
    ),
    experts=st.sampled_from([2, 4, 6, 8, 16, 64]),
    layers=st.integers(1, 6),
)
degrees = st.integers(1, 16)


def each_has_a_pack(packs: int, dp: int) -> bool:
    """Whether no rank has null packs alone, when each has equally many places and packs fill the first ones."""
    share = math.ceil(packs / dp)
    return all(any(place < packs for place in range(rank * share, (rank + 1) * share)) for rank in range(dp))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    shape = draw(shapes)
    replicas, devices = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    packs = replicas * devices * draw(st.integers(1, 4))
    layout = draw(st.sampled_from(fitting_layouts(world=replicas * devices, shape=shape, packs_per_step=packs)))
    tokens = draw(st.integers(16, 4096))
    volumes = group_volumes(layout, shape=shape, tokens_per_rank=packs // layout.dp * tokens)
    return Plan(
        shape=shape,
        replicas=replicas,
        devices=devices,
        layout=layout,
        packs_per_step=packs,
        pack_tokens=tokens,
        volumes=volumes,
    )


@given(world=st.integers(1, 64), shape=shapes, packs=st.integers(1, 256))
def test_every_fitting_layout_obeys_the_rules(world: int, shape: ModelShape, packs: int) -> None:
    tokens = 192
    for layout in fitting_layouts(world=world, shape=shape, packs_per_step=packs, pack_tokens=tokens):
        assert layout.world == world
        assert each_has_a_pack(packs, layout.dp)
        assert shape.decoder.experts % layout.ep == 0
        assert layout.edp * layout.ep == layout.dp * layout.cp * layout.tp
        assert layout.ring * layout.ulysses == layout.cp
        assert shape.decoder.heads % (layout.tp * layout.ulysses) == 0
        assert shape.vision.heads % layout.tp == 0
        assert tokens % (layout.cp * layout.tp) == 0


@given(world=st.integers(1, 64), shape=shapes, packs=st.integers(1, 256))
def test_no_fitting_layout_is_left_out(world: int, shape: ModelShape, packs: int) -> None:
    """Against every combination of degrees, by the rules as the papers state them; 192 tokens a pack, 4 heads."""
    found = fitting_layouts(world=world, shape=shape, packs_per_step=packs, pack_tokens=192)
    expected = {
        (dp, cp, tp, ep)
        for dp, cp, tp, ep in itertools.product(range(1, world + 1), range(1, world + 1), (1, 2, 4), range(1, 65))
        if dp * cp * tp == world
        and each_has_a_pack(packs, dp)
        and world % ep == 0
        and shape.decoder.experts % ep == 0
        and 192 % math.lcm(cp * tp, 2 * cp // math.gcd(cp, 4 // tp) if cp > math.gcd(cp, 4 // tp) else 1) == 0
    }
    assert {(layout.dp, layout.cp, layout.tp, layout.ep) for layout in found} == expected
    assert len(found) == len(expected)
    plain = plain_layouts(world=world, shape=shape, packs_per_step=packs)
    assert plain == [layout for layout in found if layout.cp == layout.tp == 1]


@given(
    layout=st.builds(Layout, dp=degrees, ep=degrees, cp=degrees, tp=degrees, ulysses=degrees),
    world=st.integers(1, 64),
    shape=shapes,
)
def test_a_layout_fits_or_says_why_not(layout: Layout, world: int, shape: ModelShape) -> None:
    words = misfits(layout, world=world, shape=shape, packs_per_step=layout.dp)
    fits = (
        layout.world == world
        and (layout.dp * layout.cp * layout.tp) % layout.ep == 0
        and shape.decoder.experts % layout.ep == 0
        and layout.tp in {1, 2, 4}
        and layout.cp % layout.ulysses == 0
        and 4 // layout.tp % layout.ulysses == 0
    )
    assert (words == []) == fits
    assert all(words)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=3), "tp 3 does not divide the decoder's heads 4"),
        (Layout(cp=4, ulysses=3), "ulysses 3 does not divide cp 4, or tp x ulysses does not divide the 4 heads"),
        (Layout(cp=4), "sequenceTokens 100 is not a multiple of 8, which cp and tp require"),
        (Layout(cp=4, tp=2, ulysses=2), "sequenceTokens 100 is not a multiple of 8, which cp and tp require"),
    ],
    ids=str,
)
def test_a_misfit_names_the_degree_and_the_number(layout: Layout, words: str) -> None:
    found = misfits(layout, world=layout.world, shape=KIMI_VL_NANO, packs_per_step=4, pack_tokens=100)
    assert words in found


@pytest.mark.slow
@given(near=st.integers(1, 64), step=st.integers(1, 8), shape=shapes, packs=st.integers(1, 512))
def test_suggested_worlds_fit_and_are_the_nearest(near: int, step: int, shape: ModelShape, packs: int) -> None:
    worlds = fitting_worlds(near=near, step=step, shape=shape, packs_per_step=packs)
    fitting = [
        world for world in range(step, packs + 1, step) if plain_layouts(world=world, shape=shape, packs_per_step=packs)
    ]
    assert sorted(worlds) == sorted(sorted(fitting, key=lambda world: (abs(world - near), world))[:NEAREST_MAX])


@given(plans())
def test_a_plan_goes_round_through_json_with_its_hash(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    assert 0 <= plan.packs_per_rank * plan.layout.dp - plan.packs_per_step < plan.layout.dp


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    match value:
        case dict():
            return [found for name, inner in value.items() for found in leaves(inner, (*path, name))]
        case list():
            return [found for at, inner in enumerate(value) for found in leaves(inner, (*path, at))]
        case _:
            return [path]


@given(plans(), st.data())
def test_any_changed_field_changes_the_hash(plan: Plan, data: st.DataObject) -> None:
    document = json.loads(plan.to_json())
    path = data.draw(st.sampled_from([path for path in leaves(document) if path != ("hash",)]))
    place = document
    for name in path[:-1]:
        place = place[name]
    old = place[path[-1]]
    place[path[-1]] = 7 if old is None else f"{old}x" if isinstance(old, str) else old + 1
    document["hash"] = None
    with pytest.raises(InvalidConfigError, match="plan is damaged") as refused:
        Plan.from_json(json.dumps(document))
    assert plan.hash not in str(refused.value)


@given(plans())
def test_volumes_are_of_groups_with_several_ranks_and_never_negative(plan: Plan) -> None:
    ranks = {axis: getattr(plan.layout, axis) for axis in ("dp", "edp", "ep", "cp", "tp")}
    for volume in plan.volumes:
        assert volume.ranks == ranks[volume.axis] > 1
        assert volume.bytes_per_rank >= 0
        assert volume.messages >= 0
    assert {volume.axis for volume in plan.volumes} == {axis for axis, count in ranks.items() if count > 1}


@given(plans())
def test_a_ring_moves_less_than_two_buffers(plan: Plan) -> None:
    routed = expert_parameters(plan.shape)
    shared = shared_parameters(plan.shape)
    dense = parameter_count(plan.shape) - routed - shared + shared // plan.layout.tp
    buffers = {"dp": dense * 4, "edp": math.ceil(routed * 4 / plan.layout.ep)}
    for volume in plan.volumes:
        if volume.axis in buffers:
            buffer = buffers[volume.axis]
            assert buffer * 0.99 <= volume.bytes_per_rank <= max(2 * buffer - 1, 0)
