"""Beginning of an attempt: at its resume point, at a checkpoint of another run, or with new weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging

import torch

from polyreme_api.batch import BatchSource
from polyreme_api.commit_marker import CommitMarker
from polyreme_api.errors import (
    EnvironmentFailedError,
    InvalidConfigError,
    NotFoundError,
    NotSealedError,
    RefusedError,
)
from polyreme_api.history import DAMAGE_RECORD, START_KEY
from polyreme_api.store import ObjectExistsError, ObjectStore
from polyreme_planner.checkpoint_model import check_base
from polyreme_trainer.checkpoint.block_io import DamagedError
from polyreme_trainer.checkpoint.commit import condemn
from polyreme_trainer.checkpoint.host_copy import HostCopies
from polyreme_trainer.checkpoint.load import load_checkpoint, name_unusable, open_checkpoint
from polyreme_trainer.parallel.world import World
from polyreme_trainer.train.checkpoint_content import adopted, content, restored
from polyreme_trainer.train.early_stop import HeldOutHistory
from polyreme_trainer.train.fingerprint import frozen_fingerprint
from polyreme_trainer.train.initial_weights import begin
from polyreme_trainer.train.loss_health import LossHistory
from polyreme_trainer.train.settings import StartPoint, TrainSettings
from polyreme_trainer.train.state import TrainState

START_FIELD = "spec.startFrom.checkpoint"
TOKENIZER = "tokenizer"
"""Of a loader's state: the digest of the tokenizer. States of earlier releases have none."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    """How an attempt begins."""

    base: str
    """Digest of the weights that adapters are trained beside; empty without adapters."""
    words: str = ""
    """Sentence on what was taken over from a checkpoint of another run; empty where it begins with none."""


def resume(settings: TrainSettings, state: TrainState, source: BatchSource, world: World) -> Beginning:
    """Load the one checkpoint that the attempt was given, if any, and never look for another; else start a new run.

    Raises:
        PolyremeError: If the checkpoint can't be used.
    """
    saved, start, base, words = settings.checkpoint, settings.checkpoint.start_from, "", ""
    if settings.rank.rank == 0:
        name_unusable(saved.store)
    fresh = saved.resume_from is None and start is None
    if fresh or settings.adapters is not None:
        begin(state, settings, world.meshes, group=world.meshes.control_group)
    if settings.adapters is not None:
        base = frozen_fingerprint(state, world.meshes)
    elif fresh and settings.weights is not None:
        adopted(state)
    if saved.resume_from is not None:
        marker = open_checkpoint(saved.store, saved.resume_from, settings.shape, settings.adapters)
        check_base(marker, base, name=saved.resume_from)
        source.check_state(marker.loader)
        _load(settings, state, marker, world, saved.store, copies=copies_of(settings))
        _continue_at(state, marker, step=marker.step)
    elif start is not None:
        words = _start(settings, state, source, world, start, base=base)
    else:
        torch.manual_seed(settings.seed * 1_000_003 + settings.rank.rank)
    return Beginning(base, words)


def copies_of(settings: TrainSettings) -> HostCopies | None:
    """Return this rank's copy in memory of the newest checkpoint, if it may have one."""
    files = settings.checkpoint.copies
    return None if files is None else HostCopies(*files)


def _start(
    settings: TrainSettings,
    state: TrainState,
    source: BatchSource,
    world: World,
    start: StartPoint,
    *,
    base: str,
) -> str:
    """Begin with a checkpoint of another run: with its place in the data, if these are the same, or from step 1.

    Returns:
        A sentence on what was taken over.
    """
    try:
        if start.store.exists(f"{start.name}/{DAMAGE_RECORD}"):
            raise RefusedError(f"checkpoint is damaged: {start.name}, see its {DAMAGE_RECORD}")
        marker = open_checkpoint(start.store, start.name, settings.shape, settings.adapters)
        check_base(marker, base, name=start.name)
    except (NotFoundError, RefusedError) as error:
        raise InvalidConfigError(f"{error.message}; root {start.root}", field=START_FIELD) from error
    same = _has_same_data(source, marker)
    if same and settings.steps <= marker.step:
        raise InvalidConfigError(
            f"training.steps {settings.steps} is not above step {marker.step} of checkpoint {start.name}, which the "
            "job starts from with the same data; give more steps",
            field="spec.training.steps",
        )
    if not same and start.trains_tokenizer and marker.loader.get(TOKENIZER) != source.state(0).get(TOKENIZER):
        raise InvalidConfigError(
            f"the data are not those of checkpoint {start.name}, and the job trains another tokenizer on them, by "
            "which embeddings would mean other tokens; set data.tokenizer.location to the tokenizer of the checkpoint",
            field="spec.data.tokenizer.location",
        )
    words = start_words(start, marker, same=same)
    if settings.rank.rank == 0:
        _log.warning("%s", words)
        record = {"words": words, "checkpoint": f"{start.root}/{start.name}", "step": marker.step if same else 0}
        with contextlib.suppress(ObjectExistsError):
            settings.checkpoint.store.put_if_absent(START_KEY, json.dumps(record).encode())
    _load(settings, state, marker, world, start.store, copies=None)
    _continue_at(state, marker, step=marker.step if same else 0)
    state.losses.held_out = HeldOutHistory()  # of other held-out sets, and by another rule
    return words


def start_words(start: StartPoint, marker: CommitMarker, *, same: bool) -> str:
    """Say what a job takes over from the checkpoint that it starts from."""
    if same:
        return (
            f"starts from checkpoint {start.name} of {start.root}: weights, the optimizer's state and the place in the "
            f"data are taken over, so the next step is {marker.step + 1}"
        )
    return (
        f"starts from checkpoint {start.name} of {start.root}: weights and the optimizer's state are taken over; the "
        "place in the data is not, since datasets, versions, seed, packs or weights differ, so steps count from 1"
    )


def _has_same_data(source: BatchSource, marker: CommitMarker) -> bool:
    try:
        source.check_state(marker.loader)
    except NotSealedError:
        raise
    except RefusedError:
        return False
    return True


def _load(
    settings: TrainSettings,
    state: TrainState,
    marker: CommitMarker,
    world: World,
    store: ObjectStore,
    *,
    copies: HostCopies | None,
) -> None:
    held = content(state, world.meshes, with_rng=marker.world == settings.rank.world)
    own, name = settings.checkpoint.resume_from is not None, marker.name
    try:
        load_checkpoint(held, marker, store, name, group=world.meshes.control_group, copies=copies)
    except DamagedError as error:
        if not own:
            raise InvalidConfigError(error.message, field=START_FIELD) from error
        # Not in this attempt: its resume point is fixed. The next attempt's leader sees the record and goes back
        # further.
        if settings.rank.rank == 0:
            condemn(store, error)
        raise EnvironmentFailedError(
            f"{error.message}; the next attempt starts from the checkpoint before it"
        ) from error
    restored(state)
    if (generator := held.plain.get(f"rng.{settings.rank.rank}")) is not None:
        torch.set_rng_state(generator)
    else:
        torch.manual_seed((settings.seed * 1_000_003 + marker.step) * 1_000_003 + settings.rank.rank)


def _continue_at(state: TrainState, marker: CommitMarker, *, step: int) -> None:
    """Take the next step after one; moments may have learned in steps of earlier runs."""
    state.step = state.optimizer.steps = step
    losses = LossHistory.of(marker.loss_history)
    learned = marker.step if step else marker.step - len(losses.skipped)
    state.optimizer.steps_before = marker.steps_before + learned - step
    state.losses = losses if step else LossHistory()
