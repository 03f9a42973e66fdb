"""Export a committed checkpoint, or the mean of several, in one process, whatever layout saved them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyreme_api.batch import TokenIds
from polyreme_trainer.train.export import export
from polyreme_trainer.train.saved_model import open_saved
from polyreme_trainer.train.settings import TrainSettings


def export_checkpoints(settings: TrainSettings, names: Sequence[str], *, tokens: TokenIds, directory: Path) -> int:
    """Write the model of a checkpoint, or the mean of those of several, to a folder; return the last one's step.

    Args:
        settings: As of ``open_saved``.
        names: Of the checkpoints, the newest last.
        tokens: Special tokens for the configuration.
        directory: Where the export shall be.

    Raises:
        NotFoundError: As ``open_saved``, and so for the others.
        InvalidConfigError: See there.
        RefusedError: See there.
        OSError: If the disk refuses.
    """
    with open_saved(settings, names, media_token=tokens.media) as saved:
        export(saved.state, saved.settings, saved.meshes, directory, tokens=tokens)
        return saved.step
