"""Reward functions of these tests, each wrong in its way."""

from __future__ import annotations

import math
import time


def words(*, answer: str, expected: str, prompt: str, times: str = "1") -> float:
    """By the answer: its words; or what it asks for."""
    if answer == "hang":
        time.sleep(600)
    if answer == "raise":
        raise ValueError("no such answer")
    if answer == "nan":
        return math.nan
    if answer == "text":
        return "much"  # type: ignore[return-value]
    if answer == "memory":
        return float(len(bytearray(2**40)))
    return int(times) * float(len(answer.split()) + 10 * (answer == expected) + 100 * ("?" in prompt))


NUMBER = 7
