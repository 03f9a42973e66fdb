"""Causes of an error: torch wraps what a pipeline stage raises, and its own message says nothing of the cause."""

from __future__ import annotations

from collections.abc import Iterator

CAUSES_MAX = 16
"""Most errors that are looked at; a chain may lead back to its beginning."""
NOTE_CHARACTERS_MAX = 200


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what it was raised from, and so on."""
    seen: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__


def unwrapped(error: RuntimeError) -> BaseException:
    """Return the error that wrappers were raised from, with a note of the outermost one's first words."""
    found = next((each for each in causes(error) if type(each) is not RuntimeError or each.__cause__ is None), error)
    if found is not error:
        found.add_note("while " + " ".join(str(error).split())[:NOTE_CHARACTERS_MAX])
    return found
