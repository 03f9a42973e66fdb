"""Changes of the mixture that are fixed while an attempt runs: read again, and made into the order from a step on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.loader.order.identity import Identity
from polyreme_datahub.loader.order.plan import OrderPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Amended:
    """An order with changes that were appended."""

    plan: OrderPlan
    identity: Identity
    from_step: int
    """First step that may differ."""


@dataclasses.dataclass(slots=True)
class Amendments:
    """Follows the mixture of an attempt.

    Args:
        known: The mixture by which the order was made.
        read: Returns the newest one that is fixed.
        remake: Makes the order of a mixture, and its identity.
    """

    known: MixtureRecord | None
    read: Callable[[], MixtureRecord | None]
    remake: Callable[[OrderPlan, MixtureRecord], tuple[OrderPlan, Identity]]

    def next(self, plan: OrderPlan, newest: MixtureRecord | None) -> Amended | None:
        """Return the order by the newest mixture; None where nothing was appended.

        Mixtures only grow, so one that is read late, behind a newer one, changes nothing.

        Args:
            plan: The order so far.
            newest: What ``read`` returned.
        """
        if newest is None or self.known is None or newest.read <= self.known.read:
            return None
        steps = [change.step for change in newest.changes[len(self.known.changes) :]]
        self.known = newest
        if not steps:
            return None
        amended, identity = self.remake(plan, newest)
        return Amended(amended, identity, min(steps))
