"""The process groups of an attempt, from the meeting of its ranks to their end.

Nothing happens at import: ranks are forked from a warm parent that has imported this module, and a thread or a group in
the parent would not survive the fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import socket
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.exit_codes import ExitCode
from polyreme_planner.layout import Layout
from polyreme_trainer.parallel.causes import causes
from polyreme_trainer.parallel.communicators import Communicators, bound_device
from polyreme_trainer.parallel.mesh import Meshes, open_meshes

_log = logging.getLogger(__name__)

_GLOO = "/gloo/"
"""Part of every error message of gloo: it names the source file that failed, in a plain ``RuntimeError``."""
_HERE, _ALL_HERE = "polyreme/here", "polyreme/all-here"
"""Keys of the store: how many ranks have reached it, and whether all have."""
_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
CONNECT_S_MAX = 45.0
"""How long connections to other ranks may take once these are there: with the start of a process less than a minute."""
CONNECT_TRY_S, CONNECT_POLL_S = 10.0, 0.5
"""How long one try to connect may take, and the pause before the next."""
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
    first_step_timeout_s: float = 600.0
    """Longest wait inside one collective until the first step has ended."""
    collective_timeout_s: float = 120.0
    """Longest wait inside one collective of later steps: a rank that hangs ends the others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Open groups."""

    meshes: Meshes


@contextlib.contextmanager
def open_world(settings: RankSettings, layout: Layout) -> Iterator[World]:
    """Meet the other ranks, open meshes and groups, and leave the groups at the end.

    After an error groups are aborted: leaving them would wait for exchanges in flight, and NCCL's watchdog would end
    the process by a signal before its exit code is known.

    Raises:
        InvalidConfigError: If the layout does not fit the world.
        EnvironmentFailedError: If the ranks do not meet in time, or an exchange fails in the body: a peer ended, hangs
            or cannot be reached.
    """
    communicators = Communicators(timeout_s=settings.first_step_timeout_s, device=bound_device(settings.device_type))
    try:
        _meet(settings)
        with _deadline(settings, settings.first_step_timeout_s, "open its process groups"):
            meshes = open_meshes(layout, communicators)
        yield World(meshes=meshes)
    except BaseException as error:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the first error counts
                communicators.abort()
        if isinstance(error, RuntimeError) and (failed := exchange_error(error)) is not None:
            said = str(failed).partition("\n")[0]
            raise EnvironmentFailedError(
                f"communication with other ranks failed: rank {settings.rank} of {settings.world} lost a peer; see the "
                f"peer's log: {said}"
            ) from error
        raise
    dist.destroy_process_group()


def _meet(settings: RankSettings) -> None:
    """Wait for all ranks, and open the control group with them."""
    try:
        store = _open_store(settings)
        if settings.world > 1:
            _wait_for_all(store, settings)
        if settings.device_type != "cpu":
            # gloo is then for the host's exchanges alone: a rank connects to those that it exchanges with.
            os.environ.setdefault(_LAZY_GLOO, "1")
        # gloo waits five times as long for a connection.
        with _deadline(settings, CONNECT_S_MAX + CONNECT_TRY_S, "connect to all others"):
            dist.init_process_group(
                "gloo",
                store=store,
                rank=settings.rank,
                world_size=settings.world,
                timeout=datetime.timedelta(seconds=CONNECT_S_MAX),
            )
            # Where gloo connects at the first exchange, that is now: later ones may take CONTROL_TIMEOUT_S.
            dist.all_reduce(torch.zeros(1))
        # torch has no public name for it.
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=CONTROL_TIMEOUT_S))  # noqa: SLF001
    except (RuntimeError, OSError) as error:
        if not isinstance(error, OSError) and exchange_error(error) is None:
            raise
        said = str(error).partition("\n")[0]
        raise EnvironmentFailedError(
            f"rendezvous failed: rank {settings.rank} of {settings.world} at "
            f"{settings.master_address}:{settings.master_port}: {said}"
        ) from error


def _wait_for_all(store: dist.Store, settings: RankSettings) -> None:
    """Wait until each rank has reached the store: only then does every rank listen for the others."""
    here = store.add(_HERE, 1)
    if here == settings.world:
        store.set(_ALL_HERE, "")
        return
    try:
        store.wait([_ALL_HERE], datetime.timedelta(seconds=settings.rendezvous_timeout_s))
    except dist.DistStoreError as error:
        here = store.add(_HERE, 0)
        raise TimeoutError(
            f"{here} of {settings.world} ranks are here after {settings.rendezvous_timeout_s:g} s"
        ) from error


@contextlib.contextmanager
def _deadline(settings: RankSettings, limit_s: float, what: str) -> Iterator[None]:
    """End the process if the block takes too long: NCCL may wait for a peer forever while it opens a communicator."""

    def end() -> None:
        _log.error(
            "communication with other ranks failed: rank %d of %d could not %s within %g s",
            settings.rank,
            settings.world,
            what,
            limit_s,
        )
        logging.shutdown()  # sends the error to the launcher
        os._exit(ExitCode.ENVIRONMENT)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exchange_error(error: BaseException) -> BaseException | None:
    """Return what gloo, NCCL or the rendezvous store says of a peer that ended, hangs or cannot be reached, if it did.

    NCCL reports it as ``DistBackendError`` if this thread waits. Otherwise NCCL's watchdog aborts the process
    (SIGABRT), which ends it by a signal and never with code 1.
    """
    return next((each for each in causes(error) if isinstance(each, dist.DistError) or _GLOO in str(each)), None)


def _open_store(settings: RankSettings) -> dist.TCPStore:
    first = settings.rank == 0
    if not first:
        _reach(settings)
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


def _reach(settings: RankSettings) -> None:
    """Connect to the first rank's address once: its launcher listens there, however late that rank itself is.

    Raises:
        OSError: If that takes longer than ``CONNECT_S_MAX``.
    """
    waited_s = 0.0
    while True:
        try:
            with socket.create_connection((settings.master_address, settings.master_port), timeout=CONNECT_TRY_S):
                return
        except OSError as error:
            waited_s += CONNECT_TRY_S if isinstance(error, TimeoutError) else CONNECT_POLL_S
            if waited_s >= CONNECT_S_MAX:
                raise
        threading.Event().wait(CONNECT_POLL_S)
