"""Functions that reward an answer; a job names one, or its own, as ``module:function``.

Each takes ``answer``, ``expected`` (the answer of the data) and ``prompt`` as texts, and the job's further arguments by
name, all texts. It returns a number, the larger the better.
"""

from __future__ import annotations

import re

THOUGHT = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<rest>.*)", re.DOTALL)


def exact_match(*, answer: str, expected: str, prompt: str) -> float:  # noqa: ARG001 - the form of all
    """Return 1 for the answer of the data, else 0."""
    return float(answer.strip() == expected.strip())


def pattern(*, answer: str, expected: str, prompt: str, pattern: str) -> float:  # noqa: ARG001 - the form of all
    """Return 1 for an answer that a regular expression matches as a whole, else 0."""
    return float(re.fullmatch(pattern, answer.strip(), re.DOTALL) is not None)


def thoughtful_match(*, answer: str, expected: str, prompt: str, share: str = "0.2") -> float:  # noqa: ARG001
    """Return ``share`` for thinking once between <think> tags, and the rest for the right answer after them."""
    found = THOUGHT.fullmatch(answer)
    if found is None or "think>" in found["rest"]:
        return 0.0
    return float(share) + (1 - float(share)) * (found["rest"].strip() == expected.strip())
