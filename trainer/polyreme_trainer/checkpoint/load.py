"""Loading a named checkpoint into any layout, after checking that it is committed, whole, and of this model."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_api.history import COMMIT_MARKER, checkpoint_name
from polyreme_api.marker import CommitMarker, check_model, parse_marker
from polyreme_api.plan.shapes import ModelShape
from polyreme_trainer.checkpoint.content import Content
from polyreme_trainer.checkpoint.directory import damaged_files, list_checkpoints
from polyreme_trainer.parallel import collectives

_log = logging.getLogger(__name__)


def name_torn(root: Path) -> list[str]:
    """Log and return the names of directories that were begun and never committed; they are never loaded."""
    names = [checkpoint_name(reference) for reference in list_checkpoints(root)[1]]
    for name in names:
        _log.warning("torn checkpoint ignored: %s has no %s", name, COMMIT_MARKER)
    return names


def read_marker(root: Path, name: str) -> CommitMarker:
    """Read the marker of a checkpoint.

    Raises:
        NotFoundError: If there is no such directory.
        RefusedError: If the checkpoint is torn, damaged, or of another format.
    """
    if not (root / name).is_dir():
        raise NotFoundError(f"no checkpoint {name}: {root} holds no such directory", field="POLYREME_RESUME_FROM")
    try:
        text = (root / name / COMMIT_MARKER).read_bytes()
    except FileNotFoundError as error:
        raise RefusedError(
            f"checkpoint is torn: {name} has no {COMMIT_MARKER}", field="POLYREME_RESUME_FROM"
        ) from error
    return parse_marker(text, name=name)


def load_checkpoint(content: Content, marker: CommitMarker, root: Path, name: str, *, group: dist.ProcessGroup) -> None:
    """Fill the content's tensors in place; every rank calls it.

    Raises:
        RefusedError: If a file is missing or damaged (found by one rank, raised by all), or a tensor does not fit.
    """
    directory = root / name
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = sorted(marker.files.items())[rank::ranks]
    reasons = [why for whys in collectives.gather_to_all(damaged_files(directory, mine), group) for why in whys]
    if reasons:
        raise RefusedError(f"checkpoint is damaged: {name}: {'; '.join(reasons)}", field="POLYREME_RESUME_FROM")
    try:
        dcp.load(content.state_dict(), storage_reader=dcp.FileSystemReader(directory), process_group=group)
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
        raise RefusedError(f"checkpoint does not fit: {name}: {causes}", field="POLYREME_RESUME_FROM") from error


def open_checkpoint(root: Path, name: str, shape: ModelShape) -> CommitMarker:
    """Read a checkpoint's marker and refuse one of another model.

    Raises:
        NotFoundError: If there is no such checkpoint.
        RefusedError: If it is torn, damaged, of another format or model.
    """
    marker = read_marker(root, name)
    check_model(marker, shape, name=name)
    return marker
