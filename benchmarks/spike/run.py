"""Spikes of the loss: false alarms beside OLMo-core's rule, on the same curves.

Usage: run.py [--curves 10] [--steps 20000]
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.plan import OrderPlan
from polyreme_planner.mixture import first_mixture, segments_of
from polyreme_planner.rollback import rejection_of, with_rejection
from polyreme_trainer.train.loss_health import LossHistory
from polyreme_trainer.train.settings import SpikeRule

RATIO_MAX = 0.2
SPIKES = 6
"""Planted in each curve."""
AFTER_STEPS = 3
"""Steps after the beginning of a spike in which an alarm still counts as its own."""
DEGREES = 6
"""Of the Student distribution of a step's noise: its tails are heavier than a normal one's."""
NOISE, SIGMAS, WINDOW = 0.02, 6.0, 128
PACKS, PACK_TOKENS, REPLAYED_STEPS = 64, 32, 20
WEIGHTS = [{"source": "one", "weight": 1}]

Curve = tuple[list[tuple[float, float]], list[int], int]
"""Loss and gradient norm of each step, where spikes begin, and the step of a declared change."""


def main() -> int:
    """Run and print one line of JSON; 0 when every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curves", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    ours, theirs = collections.Counter[str](), collections.Counter[str]()
    for seed in range(options.curves):
        points, spikes, change = curve(seed, options.steps)
        ours += verdicts(list(own_alarms(points, change)), spikes)
        theirs += verdicts(list(olmo_alarms(points)), spikes)
    ratio = ours["false"] / max(1, theirs["false"])
    figures = {
        "steps": options.curves * options.steps,
        "spikes": options.curves * SPIKES,
        "false_alarms": ours["false"],
        "misses": ours["missed"],
        "olmo_false_alarms": theirs["false"],
        "olmo_misses": theirs["missed"],
        "false_alarm_ratio": round(ratio, 4),
    }
    equal = all(replay_is_equal(seed) for seed in range(options.curves))
    figures["replay_equal"] = equal
    good = ratio <= RATIO_MAX and ours["missed"] <= theirs["missed"] and equal
    bar = {"false_alarm_ratio": f"<= {RATIO_MAX}", "misses": "<= olmo_misses", "replay_equal": "true"}
    sys.stdout.write(json.dumps({"name": "bench-spike", "figures": figures, "bar": bar, "ok": good}) + "\n")
    return 0 if good else 1


def replay_is_equal(seed: int) -> bool:
    """Tell whether a rollback replays the packs of a run that was given its entry, and no suspected sample."""
    draw = np.random.default_rng(seed)
    spec = job()
    known, spike = first_mixture(spec), int(draw.integers(5, REPLAYED_STEPS))
    rejection = rejection_of(spec, known, attempt=1, step=spike, why="")
    assert rejection is not None, "every window but the first can be skipped"
    lengths = draw.integers(3, PACK_TOKENS, 4096)

    def order(spec: TrainingJobSpec, record: MixtureRecord) -> Order:
        plan = OrderPlan(
            seed=seed,
            names=("one",),
            lengths=(lengths,),
            segments=segments_of(spec, record),
            packs_per_step=PACKS,
            pack_tokens=PACK_TOKENS,
        )
        return Order(plan)

    entry = {"fromStep": rejection.from_step, "skipSteps": rejection.skip_steps, "weights": WEIGHTS}
    before, replayed = order(spec, known), order(spec, with_rejection(spec, known, rejection))
    given = order(job(entry), first_mixture(job(entry)))
    steps = range(1, REPLAYED_STEPS + 1)
    suspected = {slot for pack in before.packs(spike) for slot in pack}
    seen = {slot for step in steps for pack in replayed.packs(step) for slot in pack}
    return all(replayed.packs(step) == given.packs(step) for step in steps) and not suspected & seen


def job(*schedule: dict[str, Any]) -> TrainingJobSpec:
    """Return a job of one source, with windows of four steps."""
    return TrainingJobSpec.model_validate(
        {
            "model": {"preset": "kimi-vl-nano"},
            "data": {
                "sequenceTokens": PACK_TOKENS,
                "sources": [{"name": "one", "dataset": "made/up"}],
                "schedule": list(schedule),
            },
            "training": {"steps": 1000, "packsPerStep": PACKS},
            "health": {"loss": {"action": "Rollback"}},
        }
    )


def curve(seed: int, steps: int) -> Curve:
    """Draw a falling loss with heavy-tailed noise, spikes that decay, and one lasting rise at a declared change."""
    draw = np.random.default_rng(seed)
    step = np.arange(1, steps + 1)
    loss = 2.0 + 6.0 * step**-0.3 + NOISE * draw.standard_t(DEGREES, steps)
    norm = 0.5 * np.exp(0.15 * draw.standard_t(DEGREES, steps))
    change = int(draw.integers(steps // 3, 2 * steps // 3))
    loss[change:] += 0.3
    places = np.linspace(steps // 10, steps - 200, SPIKES).astype(int) + draw.integers(-50, 50, SPIKES)
    for place in places:
        height, length = draw.uniform(0.5, 3.0), int(draw.integers(1, 20))
        fall = np.exp(-np.arange(length) / 5.0)
        loss[place : place + length] += height * fall
        norm[place : place + length] *= 1.0 + 5.0 * fall
    return list(zip(loss.tolist(), norm.tolist(), strict=True)), sorted(places.tolist()), change


def own_alarms(points: Sequence[tuple[float, float]], change: int) -> Iterator[int]:
    """Judge each step as the trainer does; a declared change begins a new window."""
    history, rule = LossHistory(), SpikeRule(window_steps=WINDOW)
    for number, (loss, norm) in enumerate(points):
        if number == change:
            history.forget()
        if history.judge(number, loss, norm, rule) is not None:
            yield number


def olmo_alarms(points: Sequence[tuple[float, float]]) -> Iterator[int]:
    """OLMo-core's SkipStepOptimizer: six standard deviations above the mean of the last 128 losses, or norms."""
    known: collections.deque[tuple[float, float]] = collections.deque(maxlen=WINDOW)
    for number, point in enumerate(points):
        if len(known) >= max(2, WINDOW // 2):
            for place in (0, 1):
                values = [earlier[place] for earlier in known]
                middle = math.fsum(values) / len(values)
                spread = math.sqrt(statistics.fmean((value - middle) ** 2 for value in values) * _unbiased(len(values)))
                if point[place] - middle > SIGMAS * spread:
                    yield number
                    break
        known.append(point)


def _unbiased(count: int) -> float:
    return count / (count - 1)


def verdicts(alarms: Sequence[int], spikes: Sequence[int]) -> collections.Counter[str]:
    """Count spikes that raised no alarm at their beginning, and alarms outside any spike."""
    found = {spike for spike in spikes if any(spike <= alarm < spike + AFTER_STEPS for alarm in alarms)}
    false = [alarm for alarm in alarms if not any(spike <= alarm < spike + 20 for spike in spikes)]
    return collections.Counter({"missed": len(spikes) - len(found), "false": len(false)})


if __name__ == "__main__":
    sys.exit(main())
