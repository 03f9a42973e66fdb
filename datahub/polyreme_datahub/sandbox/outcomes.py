"""Reads a child's answer, which is checked in full: a damaged child must not be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sandbox.frames import Frame
from polyreme_datahub.sandbox.process import ChildEnded, Death
from polyreme_datahub.sandbox.tasks import CRASH, SampleOutcome, StepDropped, StepEnd, StepMade, StepVerdict

TEXT_CHARACTERS_MAX = 4096


def read_outcomes(
    frame: Frame, keys: Sequence[str], known: Sequence[Mapping[str, Value]], steps: Sequence[Sequence[str]]
) -> tuple[list[SampleOutcome], dict[str, str], bool]:
    """Read the outcomes of a group.

    Args:
        frame: What the child sent.
        keys: Keys of the group's samples, in order.
        known: The values that each sample was sent with.
        steps: Names of the steps that each sample was sent for, in order.

    Returns:
        The outcomes; the rule of each that failed unforeseen, by key; and whether one failed under a limit that was
        lowered from outside.

    Raises:
        ChildEnded: If the answer breaks the form: the child is as good as crashed.
    """
    header, data = frame
    try:
        blobs = {digest: Blob(raw) for digest, raw in data.items()}
        _check(all(blob.digest == digest for digest, blob in blobs.items()), "a blob that does not fit its digest")
        listed = header["outcomes"]
        _check([outcome["key"] for outcome in listed] == list(keys), "outcomes of other samples")
        outcomes, unforeseen, outside = [], {}, False
        for outcome, values, asked in zip(listed, known, steps, strict=True):
            ends = _read_ends(outcome["steps"], values, blobs, asked)
            outcomes.append(SampleOutcome(key=outcome["key"], steps=tuple(ends)))
            if outcome["steps"] and (last := outcome["steps"][-1]).get("unforeseen") is True:
                unforeseen[outcome["key"]] = str(last["rule"])
                outside = outside or last.get("outside") is True
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ChildEnded(Death(CRASH, f"answered out of form: {type(error).__name__}: {error}")) from error
    return outcomes, unforeseen, outside


def _read_ends(
    listed: Sequence[Mapping[str, Any]], known: Mapping[str, Value], new: Mapping[str, Blob], steps: Sequence[str]
) -> list[StepEnd]:
    names = [str(end["step"]) for end in listed]
    _check(names == list(steps[: len(names)]), f"steps {names}, expected the first of {steps}")
    ended = bool(listed) and "data" not in listed[-1]
    _check(ended or len(names) == len(steps), f"only the steps {names} of {steps}")
    blobs = {digest: blob for value in known.values() for digest, blob in value.blobs.items()}
    ends: list[StepEnd] = []
    for at, end in enumerate(listed):
        if "data" in end:
            made = {digest: new[digest] for digest in end["new"]}
            _check(isinstance(end["data"], dict), "data that is no object")
            kept = {digest: blobs[digest] for digest in end["kept"]}
            blobs |= made
            ends.append(
                StepMade(step=names[at], value=Value(data=end["data"], blobs={**kept, **made}, new=frozenset(made)))
            )
            continue
        _check(at == len(listed) - 1, "a step after the last one")
        if "dropped" in end:
            ends.append(StepDropped(step=names[at], reason=_text(end["dropped"])))
        else:
            ends.append(StepVerdict(step=names[at], rule=_text(end["rule"]), message=_text(end["message"])))
    return ends


def _text(value: object) -> str:
    _check(isinstance(value, str), "text that is none")
    return str(value)[:TEXT_CHARACTERS_MAX]


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)
