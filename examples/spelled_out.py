"""Reward of answers in words: ``seven``, where the data expect ``7``; of ``manifests/samples/reward-words.yaml``."""

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def spelled_out(*, answer: str, expected: str, prompt: str) -> float:  # noqa: ARG001 - given to all
    """Return 1 for the expected digit in words, else 0."""
    return float(answer.strip() == WORDS[int(expected)])
