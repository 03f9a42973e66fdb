"""The process groups of an attempt, from the meeting of its ranks to their end.

Nothing happens at import: ranks are forked from a warm parent that has imported this module, and a thread or a group in
the parent would not survive the fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator

import torch.distributed as dist

from polyreme_api.errors import EnvironmentFailedError
from polyreme_planner.layout import Layout
from polyreme_trainer.parallel.causes import causes
from polyreme_trainer.parallel.communicators import bound_device
from polyreme_trainer.parallel.mesh import Meshes, open_meshes

_GLOO = "/gloo/"
"""Part of every error message of gloo: it names the source file that failed, in a plain ``RuntimeError``."""
_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
CONTROL_TIMEOUT_S = 1800.0
"""Longest wait inside a collective of the control group: the slowest rank's load, write or answers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """This rank's place in the attempt and how it finds the others."""

    rank: int
    world: int
    attempt: int
    replacement: int = 0
    """Replacement number of index 0, for the progress record."""
    master_address: str = "127.0.0.1"
    master_port: int = 0
    master_fd: int | None = None
    """Listening socket of the rendezvous store, made by rank 0's launcher; rank 0 only."""
    device_type: str = "cpu"
    rendezvous_timeout_s: float = 300.0
    """Longest wait for the other ranks to appear."""
    collective_timeout_s: float = 120.0
    """Longest wait inside one collective: a rank that hangs ends the others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Open groups."""

    meshes: Meshes


@contextlib.contextmanager
def open_world(settings: RankSettings, layout: Layout) -> Iterator[World]:
    """Meet the other ranks, open meshes and groups, and leave the groups at the end.

    Raises:
        InvalidConfigError: If the layout does not fit the world.
        EnvironmentFailedError: If the ranks do not meet in time, or an exchange fails in the body: a peer ended, hangs
            or cannot be reached.
    """
    if settings.device_type != "cpu":
        # gloo is then for the host's exchanges alone: a rank connects to those that it exchanges with, and not to all.
        os.environ.setdefault(_LAZY_GLOO, "1")
    try:
        dist.init_process_group(
            "gloo",
            store=_open_store(settings),
            rank=settings.rank,
            world_size=settings.world,
            timeout=datetime.timedelta(seconds=CONTROL_TIMEOUT_S),
        )
    except (dist.DistError, TimeoutError) as error:
        raise EnvironmentFailedError(
            f"rendezvous failed: rank {settings.rank} of {settings.world} at "
            f"{settings.master_address}:{settings.master_port}: {error}"
        ) from error
    try:
        device = bound_device(settings.device_type)
        yield World(meshes=open_meshes(layout, timeout_s=settings.collective_timeout_s, device=device))
    except RuntimeError as error:
        if (failed := exchange_error(error)) is None:
            raise
        said = str(failed).partition("\n")[0]
        raise EnvironmentFailedError(
            f"communication with other ranks failed: rank {settings.rank} of {settings.world} lost a peer; see the "
            f"peer's log: {said}"
        ) from error
    finally:
        dist.destroy_process_group()


def exchange_error(error: BaseException) -> BaseException | None:
    """Return what gloo, NCCL or the rendezvous store says of a peer that ended, hangs or cannot be reached, if it did.

    NCCL reports it as ``DistBackendError`` if this thread waits. Otherwise NCCL's watchdog aborts the process
    (SIGABRT), which ends it by a signal and never with code 1.
    """
    return next((each for each in causes(error) if isinstance(each, dist.DistError) or _GLOO in str(each)), None)


def _open_store(settings: RankSettings) -> dist.TCPStore:
    first = settings.rank == 0
    return dist.TCPStore(
        settings.master_address,
        settings.master_port,
        settings.world,
        is_master=first,
        timeout=datetime.timedelta(seconds=settings.rendezvous_timeout_s),
        wait_for_workers=False,
        # The launcher bound the socket before any rank started, so no other process can take the port in between.
        master_listen_fd=settings.master_fd if first else None,
    )
