"""Watch of the checkpoint root for a newer attempt, by the leader while its own attempt trains."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from polyreme_api.checkpoint_inventory import check_not_fenced
from polyreme_api.clock import Clock
from polyreme_api.errors import FencedError, PolyremeError
from polyreme_datahub.objects import open_store
from polyreme_launcher.protocol.training_lease import LOOK_EVERY_S, TrainingLease
from polyreme_system.clock import boot_s

NS = 1_000_000_000


class FenceWatch:
    """Keeps the lease of the attempt that trains.

    Args:
        checkpoint_url: The checkpoint root.
        clock: Clock, for waits.
        on_fenced: Called with the attempt when a newer one has begun.
        now_s: Time on the clock of leases.
    """

    def __init__(
        self,
        checkpoint_url: str,
        *,
        clock: Clock,
        on_fenced: Callable[[int], None],
        now_s: Callable[[], float] = boot_s,
    ) -> None:
        self._url, self._clock, self._on_fenced, self.now_s = checkpoint_url, clock, on_fenced, now_s
        self._lease: TrainingLease | None = None

    @property
    def until_ns(self) -> int:
        """Until when this pod's ranks may begin steps, on the clock of leases; 0 while no attempt is released."""
        return 0 if self._lease is None else int(self._lease.until_s * NS)

    def begin(self, attempt: int) -> None:
        """Hold the lease of an attempt whose resume point was fixed just now."""
        self._lease = TrainingLease(attempt, self.now_s())

    def end(self) -> None:
        """Drop the lease, before a newer attempt of this leader claims its resume point."""
        self._lease = None

    def confirm(self, attempt: int, began_s: float) -> None:
        """Extend the attempt's lease after a request that succeeded, from when that request began."""
        if self._lease is not None and self._lease.attempt == attempt:
            self._lease = self._lease.confirmed(began_s)

    async def run(self) -> None:
        """Look until cancelled; a look that fails neither extends the lease nor ends it."""
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            if self._lease is not None:
                await self._look(self._lease.attempt)

    async def _look(self, attempt: int) -> None:
        began_s = self.now_s()
        try:
            await asyncio.to_thread(lambda: check_not_fenced(open_store(self._url), attempt))
        except FencedError as error:
            if self._lease is not None and self._lease.attempt == attempt:
                print(f"training ends: {error}", file=sys.stderr)
                self._on_fenced(attempt)
        except (PolyremeError, OSError):
            return
        else:
            self.confirm(attempt, began_s)
