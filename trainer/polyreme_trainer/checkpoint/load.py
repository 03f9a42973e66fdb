"""Load a named checkpoint into any layout, after checking that it is committed, whole, and of this model.

A rank reads the ranges that hold its own tensors and verifies every block of them; so together the ranks verify every
block that is used. A failure of one rank is raised by all.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

from polyreme_api.checkpoint_inventory import State, survey
from polyreme_api.commit_marker import CommitMarker, parse_marker
from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_api.history import COMMIT_MARKER
from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_planner.adapters import Adapters
from polyreme_planner.checkpoint_model import check_adapters, check_model
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.checkpoint.block_io import DamagedError, read_pieces
from polyreme_trainer.checkpoint.content import Content
from polyreme_trainer.checkpoint.host_copy import HostCopies
from polyreme_trainer.parallel import collectives

_log = logging.getLogger(__name__)


def name_unusable(store: ObjectStore) -> list[str]:
    """Log and return the names of checkpoints that are never loaded: not committed, or damaged since."""
    unusable = survey(store).of(State.TORN, State.DAMAGED)
    for stored in unusable:
        _log.warning("%s checkpoint ignored: %s: %s", stored.state.value, stored.name, stored.why)
    return [stored.name for stored in unusable]


def read_marker(store: ObjectStore, name: str) -> CommitMarker:
    """Read the marker of a checkpoint.

    Raises:
        NotFoundError: If there is nothing of that name.
        RefusedError: If the checkpoint is torn, damaged, or of another format.
    """
    try:
        text = store.get(f"{name}/{COMMIT_MARKER}")
    except ObjectNotFoundError as error:
        if not any(True for _ in store.list(f"{name}/")):
            raise NotFoundError(f"no checkpoint {name} in its root") from error
        raise RefusedError(f"checkpoint is torn: {name} has no {COMMIT_MARKER}") from error
    return parse_marker(text, name=name)


def open_checkpoint(store: ObjectStore, name: str, shape: ModelShape, adapters: Adapters | None = None) -> CommitMarker:
    """Read a checkpoint's marker and refuse one of another model or of other adapters.

    Raises:
        NotFoundError: If there is no such checkpoint.
        RefusedError: If it is torn, damaged, of another format, model or other adapters.
    """
    marker = read_marker(store, name)
    check_model(marker, shape, name=name)
    check_adapters(marker, adapters, name=name)
    return marker


def load_checkpoint(
    content: Content,
    marker: CommitMarker,
    store: ObjectStore,
    name: str,
    *,
    group: dist.ProcessGroup,
    copies: HostCopies | None = None,
) -> None:
    """Fill the content's tensors in place; every rank calls it.

    Args:
        content: This rank's part of the model.
        marker: The checkpoint's marker, just read.
        store: The checkpoint root.
        name: The checkpoint's name.
        group: Process group of checkpoints alone.
        copies: Copy of the same checkpoint in host memory, if this rank may have one.

    Raises:
        DamagedError: If a file is missing or damaged (found by one rank, raised by all).
        RefusedError: If a tensor does not fit.
        StoreFailedError: If the store stays unavailable; on this rank alone.
    """
    damage: tuple[str, ...] = ()
    refusal: RefusedError | None = None
    try:
        if copies is None or not copies.restore(content, marker):
            read_pieces(store, name, marker, content.state_dict())
    except DamagedError as error:
        damage = error.damage
    except RefusedError as error:
        refusal = error
    refused = None if refusal is None else (refusal.message, refusal.field)
    gathered = collectives.gather_to_all((damage, refused), group)
    if all_damage := sorted({line for lines, _ in gathered for line in lines}):
        raise DamagedError(name, all_damage)
    if refusals := [said for _, said in gathered if said is not None]:
        # One sentence: the ranks mostly refuse for the same reason, each with a different tensor.
        raise RefusedError(refusals[0][0], field=refusals[0][1])
