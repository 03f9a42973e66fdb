"""Export a committed checkpoint in one process, whatever layout saved it."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

from polyreme_api.batch import TokenIds
from polyreme_planner.layout import Layout
from polyreme_trainer.checkpoint.load import load_checkpoint, open_checkpoint
from polyreme_trainer.parallel.pipeline import NO_STAGES
from polyreme_trainer.parallel.world import RankSettings, open_world
from polyreme_trainer.train.checkpoint_content import content, restored
from polyreme_trainer.train.export import export
from polyreme_trainer.train.settings import CheckpointSettings, TrainSettings
from polyreme_trainer.train.state import open_state

LOOPBACK = "127.0.0.1"


def export_checkpoint(settings: TrainSettings, *, tokens: TokenIds, directory: Path) -> int:
    """Write the model of ``settings.checkpoint.resume_from`` to a folder; return the checkpoint's step.

    Args:
        settings: Shape, checkpoint root and name; rank and layout are not read: this process is the only rank.
        tokens: Special tokens for the configuration.
        directory: Where the export shall be.

    Raises:
        NotFoundError: If there is no such checkpoint.
        RefusedError: If it is torn, damaged, of another format or model.
        OSError: If the disk refuses.
    """
    checkpoint: CheckpointSettings = settings.checkpoint
    name = checkpoint.resume_from or ""
    marker = open_checkpoint(checkpoint.store, name, settings.shape)
    with socket.create_server((LOOPBACK, 0)) as server:
        port, descriptor = server.getsockname()[1], server.detach()
    alone = dataclasses.replace(
        settings,
        layout=Layout(),
        pipeline=NO_STAGES,
        rank=RankSettings(rank=0, world=1, attempt=1, master_port=port, master_fd=descriptor),
    )
    with open_world(alone.rank, alone.layout) as world:
        state = open_state(alone, world.meshes, media_token=tokens.media)
        held = content(state, world.meshes, with_rng=False, with_optimizer=False)
        load_checkpoint(held, marker, checkpoint.store, name, group=world.meshes.control_group)
        restored(state)
        as_trained = dataclasses.replace(alone, shape=settings.shape_at(marker.step))
        export(state, as_trained, world.meshes, directory, tokens=tokens)
    return marker.step
