"""The breaker of a policy: how many nodes may be out of service at once, charged before a node is tainted.

The charges are stored in the policy's status and written by compare-and-swap, so two operators can't both take the last
one. A charge counts until its node is back in service and the window has passed. A demand for more latches the breaker:
then nothing is taken out and nothing is repaired until a person changes ``spec.breaker.reset``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from polyreme_api.errors import InvalidConfigError
from polyreme_api.fault_policy import CHARGES_MAX, NodeFaultPolicyStatus
from polyreme_api.times import parse_rfc3339

LATE_S = 60.0
"""Longest time that a write may be under way: a charge counts for so long at least, since a taint may still land."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """One node that is, is about to be, or lately was out of service."""

    node: str
    at_s: float
    released_s: float = 0.0
    """When it was back in service; 0: it is not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BreakerState:
    """State of a breaker."""

    charges: tuple[Charge, ...] = ()
    latched: bool = False
    since_s: float = 0.0
    message: str = ""
    reset: str = ""
    """Value of ``spec.breaker.reset`` that was last obeyed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The answer to a demand."""

    state: BreakerState
    nodes: frozenset[str] = frozenset()
    """Nodes that may be tainted once the state is stored."""


def breaker_of(status: Mapping[str, Any]) -> BreakerState:
    """Read the breaker from a policy's status.

    A status that can't be read counts as a latched breaker: what it had charged is unknown.
    """
    try:
        found = NodeFaultPolicyStatus.model_validate(status).breaker
        charges = tuple(
            Charge(
                node=each.node,
                at_s=parse_rfc3339(each.at),
                released_s=parse_rfc3339(each.released_at) if each.released_at else 0.0,
            )
            for each in found.charges
        )
        since_s = parse_rfc3339(found.since) if found.since else 0.0
    except (ValidationError, InvalidConfigError) as error:
        said = str(error).splitlines()[0][:256]
        return BreakerState(latched=True, message=f"the breaker's state can't be read: {said}; reset it")
    return BreakerState(
        charges=charges, latched=found.latched, since_s=since_s, message=found.message, reset=found.reset
    )


def limit_of(selected: int, percent: int) -> int:
    """Return how many of the selected nodes may be out of service at once."""
    return min(CHARGES_MAX, max(1, selected * percent // 100))


def settled(
    state: BreakerState,
    *,
    out: Collection[str],
    wanted: Collection[str],
    present: Collection[str],
    reset: str,
    window_s: float,
    now_s: float,
) -> BreakerState:
    """Release the charges of nodes that are back in service, and obey a person's reset.

    Args:
        state: The stored state.
        out: Nodes that have our taint.
        wanted: Nodes that are to be tainted now.
        present: Nodes that exist.
        reset: The policy's ``spec.breaker.reset``.
        window_s: How long a charge counts at least.
        now_s: The time.
    """
    charges = []
    for charge in state.charges:
        if charge.node in out or charge.node in wanted:
            charges.append(dataclasses.replace(charge, released_s=0.0) if charge.released_s else charge)
            continue
        released_s = charge.released_s or now_s
        if charge.node in present and now_s - charge.at_s < max(window_s, LATE_S):
            charges.append(dataclasses.replace(charge, released_s=released_s))
    after = state if tuple(charges) == state.charges else dataclasses.replace(state, charges=tuple(charges))
    if reset != state.reset:
        after = dataclasses.replace(after, latched=False, since_s=0.0, message="", reset=reset)
    return after


def grant(
    state: BreakerState, wanted: Sequence[str], *, out: Mapping[str, str] | Collection[str], limit: int, now_s: float
) -> Granted:
    """Charge the nodes that are to be taken out, or latch if these are too many.

    A demand beyond the limit grants nothing more: what is wrong then is probably the detector.

    Args:
        state: The state, settled.
        wanted: Nodes to take out, by name.
        out: Selected nodes that are out already, whatever tainted them.
        limit: How many may be out.
        now_s: The time.
    """
    charged = {charge.node for charge in state.charges}
    known = frozenset(node for node in wanted if node in charged and node not in out)
    if state.latched:
        return Granted(state=state)
    new = sorted(set(wanted) - charged)
    taken = len(charged | set(out))
    if taken + len(new) > limit:
        message = (
            f"{len(new)} more nodes would be taken out of service, {taken} are out, at most {limit} may be; nothing is "
            "quarantined or repaired until a person has looked and changes spec.breaker.reset"
        )
        return Granted(state=dataclasses.replace(state, latched=True, since_s=now_s, message=message))
    charges = (*state.charges, *(Charge(node=node, at_s=now_s) for node in new))
    after = dataclasses.replace(state, charges=charges) if new else state
    return Granted(state=after, nodes=known | frozenset(new))
