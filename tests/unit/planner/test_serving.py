"""Plans of serving: exact on small cases, monotone, and refusals that say what is missing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_planner import serving_prices as prices
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import HARDWARE, IN_MEMORY, hardware_named
from polyreme_planner.model_parts import Part
from polyreme_planner.serving import (
    ORDERS_MAX,
    SERVING_DEVICES,
    Pipeline,
    ServingPlan,
    even_plan,
    order_count,
    plan_serving,
)
from polyreme_planner.serving_prices import BITS, GROUP, Phases, ServingSetting
from polyreme_planner.serving_segments import Segments
from polyreme_planner.shapes import KIMI_VL_A3B, MOONLIGHT_16B_A3B
from tests.unit.planner.serving_oracle import best_total_s, case

QUICK = (2, 7, 8)
MORE = (4, 5, 13)


def total_s(setting: ServingSetting) -> float:
    """Time of the plan; infinite if nothing fits."""
    try:
        return plan_serving(setting).total_s
    except InvalidConfigError:
        return math.inf


def setting_of(*names: str, budget: float = 0.5, batch: int = 8, prompt: int = 512, answer: int = 64) -> ServingSetting:
    shape = MOONLIGHT_16B_A3B
    return ServingSetting(
        shape=shape,
        devices=tuple(SERVING_DEVICES[name] for name in names),
        phases=Phases(mix=Mix(sequence_tokens=prompt, visual_share=0), answer_tokens=answer, batch=batch),
        indicator=prices.indicator_without_data(shape),
        budget=budget,
    )


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)])
def test_the_plan_is_the_best_of_all(seed: int) -> None:
    setting = case(seed)
    assert total_s(setting) == pytest.approx(best_total_s(setting), rel=1e-9)


def wrong_budget(before: Callable[..., bool]) -> Callable[..., bool]:
    def meets(self: Pipeline, limits: tuple[float, float]) -> bool:
        return self.least_error(limits)[0] <= 0.8 * self.segments.setting.budget * self.segments.setting.worst_error

    return meets


def wrong_kinds(before: Callable[..., None]) -> Callable[..., None]:
    """Take segments of one length for one another."""

    def init(self: Segments, setting: ServingSetting) -> None:
        before(self, setting)
        ends = range(len(self.parts) + 1)
        self.kinds[:] = [[max(0, end - begin) for end in ends] for begin in ends]
        self._least = {0: self._least.popitem()[1]}

    return init


def wrong_spans(before: Callable[..., range]) -> Callable[..., range]:
    """Never give a device a single layer."""

    def spans(self: Pipeline, at: int, begin: int) -> range:
        found = before(self, at, begin)
        return found[1:] or found

    return spans


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(Pipeline, "meets", wrong_budget), (Segments, "__init__", wrong_kinds), (Pipeline, "spans", wrong_spans)],
)
def test_a_wrong_search_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., Callable[..., object]]
) -> None:
    right = {seed: total_s(case(seed)) for seed in (*QUICK, *MORE)}
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    assert any(total_s(case(seed)) != pytest.approx(best_s, rel=1e-9) for seed, best_s in right.items())


@pytest.mark.parametrize("seed", range(20, 23))
def test_more_budget_and_more_memory_are_never_slower(seed: int) -> None:
    setting = case(seed)
    by_budget = [total_s(dataclasses.replace(setting, budget=budget)) for budget in (0.0, 0.2, 0.5, 1.0)]
    assert by_budget == sorted(by_budget, reverse=True)
    found = []
    for factor in (0.6, 1.0, 1.5, 4.0):
        devices = tuple(
            dataclasses.replace(device, memory_bytes=int(device.memory_bytes * factor)) for device in setting.devices
        )
        found.append(total_s(dataclasses.replace(setting, devices=devices)))
    assert found == sorted(found, reverse=True)
    assert found[-1] < math.inf


def within(setting: ServingSetting, plan: ServingPlan) -> bool:
    return (
        sum(len(stage.bits) for stage in plan.stages) == setting.shape.decoder.layers
        and plan.error <= setting.budget + 1e-9
        and all(stage.memory_bytes <= stage.hardware.usable_bytes for stage in plan.stages)
    )


def test_a_plan_is_never_slower_than_an_even_split_with_as_much_error() -> None:
    devices = ("l40s-48g", "l4-24g")
    for bits in BITS:
        asked = setting_of(*devices, batch=1)
        even = even_plan(asked, bits)
        assert even is not None
        setting = dataclasses.replace(asked, budget=min(1.0, even.error))
        plan = plan_serving(setting)
        assert within(setting, plan)
        assert plan.total_s <= even.total_s * (1 + 1e-9)


def test_short_memory_is_stated_in_one_sentence() -> None:
    with pytest.raises(InvalidConfigError, match=r"does not fit l4-24g: .* memory is [0-9.]+ GiB short") as refused:
        plan_serving(setting_of("l4-24g", budget=1, batch=512, prompt=4096))
    short = float(refused.value.message.rpartition(" is ")[2].partition(" ")[0])
    roomy = dataclasses.replace(
        SERVING_DEVICES["l4-24g"], usable_share=1, memory_bytes=SERVING_DEVICES["l4-24g"].usable_bytes
    )
    setting = setting_of("l4-24g", budget=1, batch=512, prompt=4096)
    for more, fits in ((short - 0.1, False), (short + 0.1, True)):
        device = dataclasses.replace(roomy, memory_bytes=roomy.memory_bytes + int(more * 2**30))
        assert (total_s(dataclasses.replace(setting, devices=(device,))) < math.inf) is fits


def test_a_budget_that_is_too_small_names_the_one_that_is_enough() -> None:
    with pytest.raises(InvalidConfigError, match="within a quality budget of 0: bits that fit") as refused:
        plan_serving(setting_of("l4-24g", budget=0))
    enough = float(refused.value.message.rpartition("need ")[2])
    assert plan_serving(setting_of("l4-24g", budget=enough)).error <= enough
    assert total_s(setting_of("l4-24g", budget=enough - 0.001)) == math.inf


def test_bytes_of_a_model_by_bits_are_those_of_its_parts() -> None:
    d = KIMI_VL_A3B.decoder
    full = prices.weight_bytes(KIMI_VL_A3B, Part.MOE, 16)
    assert prices.weight_bytes(KIMI_VL_A3B, Part.MOE, 4) == pytest.approx(full * (4 + 20 / GROUP) / 16, rel=0.002)
    phases = Phases(mix=Mix(sequence_tokens=1000), answer_tokens=24, batch=3)
    assert prices.cache_bytes(KIMI_VL_A3B, phases) == 3 * 1024 * 1152, "1,152 B a token and layer"
    assert (d.kv_rank + d.rope_dim) * 2 == 1152


def test_a_step_of_decode_takes_the_reading_of_what_it_needs() -> None:
    hardware = dataclasses.replace(HARDWARE["h100-80g"], launch_s=0.0)
    phases = Phases(mix=Mix(sequence_tokens=16, visual_share=0), answer_tokens=2, batch=1)

    def read_bytes(bits: int, sequences: int) -> float:
        taken_s = prices.decode_s(MOONLIGHT_16B_A3B, Part.MOE, hardware, phases, bits=bits, sequences=sequences)
        return taken_s * hardware.bytes_per_s

    d = MOONLIGHT_16B_A3B.decoder
    experts = 3 * d.width * d.expert_ffn_width
    one, many = read_bytes(16, 1), read_bytes(16, 64)
    distinct = d.experts * (1 - (1 - 6 / 64) ** 64)
    assert (many - one) / (2 * experts) == pytest.approx(distinct - 6, rel=0.03)
    assert read_bytes(4, 1) / one == pytest.approx(4.31 / 16, rel=0.02)


def test_errors_fall_with_bits_as_the_steps_do() -> None:
    assert prices.relative_error(4) == 0.090
    assert prices.relative_error(8) == pytest.approx(0.090 * 15 / 255)
    assert prices.relative_error(16) == 0


def test_orders_are_counted_and_those_left_out_are_reported() -> None:
    assert order_count(setting_of("l4-24g", "l4-24g")) == 2
    assert order_count(setting_of("l4-24g", "l40s-48g", "h100-80g", "a100-80g")) == 24 + 24 + 12 + 4 == ORDERS_MAX
    five = setting_of("l4-24g", "l40s-48g", "h100-80g", "a100-80g", "h20-96g")
    assert order_count(five) == 325


def test_memory_that_computes_reads_its_weights_for_every_token() -> None:
    pim = IN_MEMORY["pim-gpt-4g"]
    assert pim.bytes_per_s == pytest.approx(8 * 16 * 2048 / 108e-9), "channels x banks x row bytes / row cycle"
    assert 1 < pim.peak_flops_per_s / pim.flops_per_s < 2, "opening rows costs less than the published products"
    phases = Phases(mix=Mix(sequence_tokens=64, visual_share=0), answer_tokens=2, batch=4)
    one, four = (
        prices.decode_s(MOONLIGHT_16B_A3B, Part.DENSE, pim, phases, sequences=sequences) for sequences in (1, 4)
    )
    assert four == pytest.approx(4 * one), "no reuse over a batch"
    assert one == pytest.approx(prices.weight_bytes(MOONLIGHT_16B_A3B, Part.DENSE, 16) / pim.bytes_per_s, rel=0.05)
    with pytest.raises(InvalidConfigError, match="unknown hardware: 'pim-gpt-4g'"):
        hardware_named("pim-gpt-4g")


def test_memory_that_computes_has_layers_of_16_bits_only() -> None:
    setting = setting_of("pim-gpt-4g", "l4-24g", budget=1, batch=1, prompt=32)
    # No other device has room for all of it.
    small = dataclasses.replace(setting.devices[1], memory_bytes=int(10e9))
    plan = plan_serving(dataclasses.replace(setting, devices=(setting.devices[0], small)))
    bits = {stage.hardware.name: set(stage.bits) for stage in plan.stages}
    assert bits["pim-gpt-4g"] == {16}
    assert bits["l4-24g"] == {4}
