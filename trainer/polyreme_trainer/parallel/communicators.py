"""The process groups of a rank: opened in one order on all ranks, and used once before the model needs the memory.

NCCL makes a communicator at its first use unless the group is bound to a device, and connects ranks at the first
exchange of each kind. Left to the first step, both would happen on a device that is already full, in an order that
follows from the model, and unseen by NCCL's watchdog. So a group is bound to the device when it is opened, and every
kind of exchange that a step makes is made once with a few bytes.

On CUDA all these groups are NCCL's alone: a gloo twin of each would cost every rank a socket for every other member.
What the host exchanges takes the default group, the only one of gloo. On a CPU all groups are gloo's.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import logging
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from polyreme_api.rank_state import ExchangeKind
from polyreme_trainer.parallel import collectives
from polyreme_trainer.rank_page import time_exchanges

_log = logging.getLogger(__name__)


class Operation(enum.Enum):
    """Kinds of exchange, each with connections of its own."""

    SUM = "all-reduce"
    SHARES = "reduce-scatter and all-gather"
    ROWS = "all-to-all"
    NEIGHBOURS = "send and receive, in both directions"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A group that a rank needs."""

    name: str
    ranks: tuple[int, ...]
    operations: frozenset[Operation]
    kind: ExchangeKind = ExchangeKind.STAGE
    """How the time of its exchanges is recorded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A group that is open."""

    names: tuple[str, ...]
    """What it is used as."""
    ranks: tuple[int, ...]
    group: dist.ProcessGroup


class Communicators:
    """Opens the process groups of this rank.

    Args:
        timeout_s: Longest wait inside one exchange.
        device: The rank's CUDA device; None: groups are those of the default group's backend.
    """

    def __init__(self, *, timeout_s: float, device: torch.device | None = None) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._device = device
        self.opened: list[Communicator] = []
        """All groups, in the order in which they were opened and warmed."""

    def open(self, wanted: list[Wanted]) -> dict[str, dist.ProcessGroup]:
        """Open groups by name, in order, and warm them; those of the same ranks are one group.

        Every member of a group must open it after the same number of other groups: torch names it by that number.
        """
        by_ranks: dict[tuple[int, ...], list[Wanted]] = {}
        for each in wanted:
            by_ranks.setdefault(each.ranks, []).append(each)
        groups: dict[str, dist.ProcessGroup] = {}
        for ranks, uses in by_ranks.items():
            opened = Communicator(names=tuple(use.name for use in uses), ranks=ranks, group=self._open(ranks))
            self.opened.append(opened)
            time_exchanges(opened.group, uses[0].kind)
            groups |= dict.fromkeys(opened.names, opened.group)
        for ranks, uses in by_ranks.items():
            if len(ranks) > 1:
                self._warm(groups[uses[0].name], frozenset[Operation]().union(*(use.operations for use in uses)))
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        _log.info("opened process groups: %s", ", ".join(f"{use.name} ({len(use.ranks)} ranks)" for use in wanted))
        return groups

    def limit(self, timeout_s: float) -> None:
        """Set the longest wait inside one exchange from now on."""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        for each in self.opened:
            # torch has no public name for it.
            distributed_c10d._set_pg_timeout(self._timeout, each.group)  # noqa: SLF001

    def abort(self) -> None:
        """End all groups, the default one too, without waiting for exchanges in flight; some may never end."""
        backend: Any = None
        if self._device is not None and self.opened:
            backend = self.opened[0].group._get_backend(self._device)  # noqa: SLF001
            # As one call: aborts of several communicators can wait for each other otherwise (pytorch#119797).
            backend._group_start()  # noqa: SLF001
        distributed_c10d._abort_process_group()  # noqa: SLF001
        if backend is not None:
            backend._group_end()  # noqa: SLF001

    def _open(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Open a group; only its ranks call this, so no rank waits for groups that it is not in."""
        return cast(
            "dist.ProcessGroup",
            dist.new_group(
                list(ranks),
                timeout=self._timeout,
                backend=None if self._device is None else "nccl",
                use_local_synchronization=True,
                # Bound to it, the communicator is made now.
                device_id=self._device,
            ),
        )

    def _warm(self, group: dist.ProcessGroup, operations: frozenset[Operation]) -> None:
        ranks = dist.get_world_size(group)
        one, all_R = torch.ones(1, device=self._device), torch.ones(ranks, device=self._device)
        # In the order of the class, not of the set, which differs between processes.
        for operation in [each for each in Operation if each in operations]:
            match operation:
                case Operation.SUM:
                    collectives.sum_over(one, group)
                case Operation.SHARES:
                    collectives.begin_reduce_scatter(one, all_R, group).wait()
                    collectives.begin_gather(all_R, one, group).wait()
                case Operation.ROWS:
                    collectives.exchange_counts(all_R, group)
                case Operation.NEIGHBOURS:
                    for step in (1, -1):
                        collectives.pass_on(one, torch.empty_like(one), group, tag=0, step=step)()


def bound_device(device_type: str) -> torch.device | None:
    """Return the device to which groups are bound: the current one of CUDA, none on a CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else None
