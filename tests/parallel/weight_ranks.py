"""Ranks that export a checkpoint, and ranks that say where they would start from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme_planner.layout import Layout
from polyreme_trainer.parallel.world import open_world
from polyreme_trainer.train import initial_weights
from polyreme_trainer.train.export import export
from polyreme_trainer.train.offline_export import export_checkpoints
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import open_state
from tests.parallel.pages import MEDIA, Pages


def offline(request: Mapping[str, Any], _rank: int, settings: TrainSettings) -> int:
    """Export a checkpoint in this one process."""
    alone = dataclasses.replace(settings, layout=Layout(dp=4, ep=2))  # as the job has it; not read
    names = [settings.checkpoint.resume_from or ""]
    export_checkpoints(alone, names, tokens=Pages.token_ids, directory=Path(request["output"]))
    return 0


def start_from(_request: Mapping[str, Any], _rank: int, settings: TrainSettings) -> int:
    """Begin with weights, and export them before any step."""
    assert isinstance(settings.export_to, Path)
    with open_world(settings.rank, settings.layout) as world:
        state = open_state(settings, world.meshes, media_token=MEDIA)
        initial_weights.begin(state, settings, world.meshes, group=world.meshes.control_group)
        export(state, settings, world.meshes, settings.export_to, tokens=Pages.token_ids)
    return 0
