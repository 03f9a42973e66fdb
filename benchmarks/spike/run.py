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

import numpy as np

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
    good = ratio <= RATIO_MAX and ours["missed"] <= theirs["missed"]
    bar = {"false_alarm_ratio": f"<= {RATIO_MAX}", "misses": "<= olmo_misses"}
    sys.stdout.write(json.dumps({"name": "bench-spike", "figures": figures, "bar": bar, "ok": good}) + "\n")
    return 0 if good else 1


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
