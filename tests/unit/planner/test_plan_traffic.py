"""The traffic model: bytes as the trainer sends them, one model for prices and volumes, links of a node and between."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_planner.adapters import Adapters, Target, adapter_counts
from polyreme_planner.automatic import quick_search
from polyreme_planner.costs import Recompute, attention_core_s, part_exchanges, part_times
from polyreme_planner.hardware import FLOAT32, HARDWARE, MIXED, Group, Pattern
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part, parameter_count
from polyreme_planner.schedules import Schedule
from polyreme_planner.search import Candidate, Pricer
from polyreme_planner.shapes import KIMI_VL_A3B
from polyreme_planner.traffic import Framework, Moment, exchanges, step_exchanges
from polyreme_planner.traffic_volume import group_volumes
from tests.unit.planner.plan_settings import setting_of

TOKENS = 4096
DECODER = KIMI_VL_A3B.decoder


def sent_bytes(layout: Layout, axis: str, part: Part = Part.MOE) -> tuple[float, float]:
    """Bytes of forward and backward on an axis, including those that overlap with products."""
    found = [one for one in exchanges(KIMI_VL_A3B, layout, MIXED, tokens=TOKENS)[part] if one.axis == axis]
    ways = [(one.forward, one.backward) for one in found]
    both = [[sent.sent_bytes + sent.overlapped_bytes for sent in sides] for sides in zip(*ways, strict=True)]
    return sum(both[0]), sum(both[1])


def test_a_ring_sends_keys_and_values_round_and_their_gradients_in_float32() -> None:
    ring, ulysses = Layout(cp=8), Layout(cp=8, ulysses=8)
    turn = 7 * TOKENS / 8 * DECODER.heads * 2 * DECODER.query_dim * 2
    gradients = 8 * TOKENS / 8 * DECODER.heads * 2 * DECODER.query_dim * 4
    assert sent_bytes(ring, "cp") == pytest.approx((turn, turn + gradients))
    heads = 2 * TOKENS / 8 * DECODER.heads * (DECODER.query_dim + DECODER.value_dim) * 7 / 8 * 2
    assert sent_bytes(ulysses, "cp") == pytest.approx((heads, heads))
    assert sum(sent_bytes(ring, "cp")) > 9 * sum(sent_bytes(ulysses, "cp"))


def test_rows_go_to_the_experts_and_back_in_the_type_of_the_computation() -> None:
    rows = 2 * TOKENS / 8 * DECODER.experts_per_token * DECODER.width * 7 / 8
    assert sent_bytes(Layout(dp=1, cp=8, ep=8), "ep") == pytest.approx((2 * rows, 2 * rows))
    wide = exchanges(KIMI_VL_A3B, Layout(cp=8, ep=8), FLOAT32, tokens=TOKENS)[Part.MOE]
    assert [one.forward.sent_bytes for one in wide if one.axis == "ep"] == pytest.approx([4 * rows])


@pytest.mark.parametrize("layout", [Layout(cp=8), Layout(cp=8, ulysses=4), Layout(dp=4, ep=4), Layout(tp=4)])
def test_volumes_are_the_sums_of_what_is_priced(layout: Layout) -> None:
    """One model: what the placer weighs is what the planner prices, gradients aside."""
    setting = setting_of(numerics=MIXED)
    volumes = {
        of.axis: of
        for of in group_volumes(layout, shape=KIMI_VL_A3B, tokens_per_rank=2 * TOKENS, numerics=setting.numerics)
    }
    without = {
        of.axis: of for of in group_volumes(layout, shape=KIMI_VL_A3B, tokens_per_rank=0, numerics=setting.numerics)
    }
    priced = part_exchanges(setting, layout, packs=2)
    counts = {Part.DENSE: 1, Part.MOE: 26, Part.EMBEDDING: 1, Part.HEAD: 1}
    for axis, volume in volumes.items():
        expected = sum(
            count * (way.sent_bytes + way.overlapped_bytes)
            for part, count in counts.items()
            for one in priced[part]
            if one.axis == axis
            for way in (one.forward, one.backward)
        )
        assert volume.bytes_per_rank - without[axis].bytes_per_rank == pytest.approx(expected, abs=2)


def test_of_a_frozen_model_only_the_gradients_of_adapters_are_summed() -> None:
    adapters = Adapters(rank=16, alpha=32.0, targets=frozenset(Target))
    sent = [
        group_volumes(Layout(dp=4), shape=KIMI_VL_A3B, tokens_per_rank=TOKENS, numerics=MIXED, adapters=given)
        for given in (None, adapters)
    ]
    whole, adapted = (sum(volume.bytes_per_rank for volume in volumes) for volumes in sent)
    share = sum(adapter_counts(KIMI_VL_A3B, adapters)) / parameter_count(KIMI_VL_A3B)
    assert adapted / whole == pytest.approx(share, rel=1e-3)
    assert share < 0.02


def test_a_ring_is_waited_for_only_where_attention_does_not_cover_it() -> None:
    long, short = setting_of(tokens=131_072, numerics=MIXED), setting_of(tokens=4_096, numerics=MIXED)
    layout = Layout(cp=8)

    def waited_s(setting: type(long)) -> tuple[float, float]:  # type: ignore[valid-type]
        times = part_times(setting, layout, packs=1, recompute=Recompute.NONE)
        ring = part_exchanges(setting, layout, packs=1)[Part.MOE][0]
        last_s = ring.backward.sent_bytes / setting.hardware.near_bytes_per_s
        return times.exchanged_s[Part.MOE]["cp"], last_s + setting.hardware.near_latency_s

    of_long_s, last_s = waited_s(long)
    assert attention_core_s(long, layout, packs=1) > 0.01
    assert of_long_s == pytest.approx(last_s), "only the last gradients have nothing to overlap with"
    of_short_s, last_s = waited_s(short)
    assert of_short_s > 1.2 * last_s


def test_a_long_context_job_on_a_thousand_devices_does_not_wait_for_its_exchanges() -> None:
    """The case that was found: a ring priced as Ulysses was chosen, and took most of the step."""
    setting = setting_of(tokens=131_072, numerics=MIXED)
    best = quick_search(setting, world=1024, packs_per_step=256, recomputes=tuple(Recompute)).best
    assert best is not None
    assert best.candidate.layout.ring == 1
    assert best.shares_s.get("cp", 0.0) < 0.15 * best.step_s
    was = Candidate(
        layout=Layout(dp=16, ep=8, pp=2, cp=16, tp=2, ulysses=8),
        schedule=Schedule.ZBV,
        recompute=Recompute.NONE,
        microbatch_packs=1,
        microbatches=16,
    )
    assert Pricer(setting).simulated(was, 20).step_s > 1.05 * best.step_s, "what was chosen"


@given(ranks=st.sampled_from([2, 4, 8, 16, 64]), stride=st.sampled_from([1, 2, 8]))
def test_an_exchange_is_never_faster_between_nodes_than_within(ranks: int, stride: int) -> None:
    hardware = HARDWARE["h100-80g"]
    group = Group(ranks=ranks, stride=stride)
    times = {pattern: hardware.exchange_s(1e9, group=group, pattern=pattern) for pattern in Pattern}
    near_s = 1e9 / hardware.near_bytes_per_s + hardware.near_latency_s
    if ranks * stride <= 8:
        assert list(times.values()) == pytest.approx([near_s] * len(Pattern))
        return
    assert min(times.values()) >= near_s
    # A ring's slowest link sets its pace; the others share the network of a node's ranks or keep some bytes inside.
    assert times[Pattern.RING] == max(times.values())


def test_a_dispatcher_that_sends_a_token_once_to_a_node_sends_less_between_nodes() -> None:
    """Node-limited routing: eight experts on at most four nodes (arXiv:2412.19437, section 3.2.2)."""
    deep = dataclasses.replace(KIMI_VL_A3B, decoder=dataclasses.replace(DECODER, experts=256, experts_per_token=8))

    def ep_s(framework: Framework) -> float:
        setting = dataclasses.replace(setting_of(shape=deep, numerics=MIXED), framework=framework)
        layout = Layout(dp=64, ep=64)
        return part_times(setting, layout, packs=1, recompute=Recompute.NONE).exchanged_s[Part.MOE]["ep"]

    assert ep_s(Framework(token_nodes=4)) < 0.6 * ep_s(Framework())
    assert ep_s(Framework(overlapped=frozenset({"ep"}))) == 0


@pytest.mark.parametrize(
    ("changes", "moments", "number_bytes"),
    [
        ({"sharded_optimizer": False}, [Moment.AFTER], 8),
        ({}, [Moment.DURING_BACKWARD, Moment.DURING_UPDATE], 6),
        ({"sharded_parameters": True}, [Moment.DURING_PASSES, Moment.DURING_PASSES], 4 * (2 * 2 + 4)),
    ],
)
def test_gradients_have_the_bytes_and_the_moment_that_the_trainer_gives_them(
    changes: dict[str, bool], moments: list[Moment], number_bytes: float
) -> None:
    numerics = dataclasses.replace(MIXED, **changes)
    found = step_exchanges(Layout(dp=8), numerics, common=1000, routed=0, microbatches=4)
    assert [one.moment for one in found] == moments
    assert sum(one.sent_bytes for one in found) == pytest.approx(1000 * 7 / 8 * number_bytes)
    silent = step_exchanges(Layout(dp=8), MIXED, common=1000, routed=0, microbatches=4, signalled=False)
    assert silent[0].moment is Moment.AFTER, "an order that makes gradients of weights apart tells nobody"


def test_an_update_that_ranks_divide_touches_a_share_and_hides_its_exchanges() -> None:
    whole, divided = (
        Pricer(setting_of(numerics=dataclasses.replace(MIXED, sharded_optimizer=sharded))) for sharded in (False, True)
    )
    of = Candidate(
        layout=Layout(dp=8, ep=8), schedule=None, recompute=Recompute.NONE, microbatch_packs=8, microbatches=1
    )
    assert divided.simulated(of, 1).shares_s["gradients"] < 0.5 * whole.simulated(of, 1).shares_s["gradients"]
