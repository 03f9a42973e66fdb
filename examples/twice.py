"""Reward of a form that no answer of the data has: the digit of a page, written twice. Of ``make soak-rewards``."""


def twice(*, answer: str, expected: str, prompt: str) -> float:  # noqa: ARG001 - given to all
    """Return 0.2 for two characters, and the rest for the right ones."""
    said = answer.strip()
    return 0.2 * (len(said) == 2) + 0.8 * (said == 2 * expected)
