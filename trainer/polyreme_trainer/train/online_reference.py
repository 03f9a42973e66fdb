"""Reference of a stage that scores its pairs in every step: the weights with which the stage began.

Nothing is scored before. Each rank keeps a copy of the weights that it trains, and each step's microbatches run forward
once more under it: the same packs, layout and kernels, so in the first step both scores are the same bits.

The copy is saved once, before the stage's first step, as a checkpoint of weights alone: the newest one of
``reference-weights/<stage>`` beside the run's checkpoints, where their retention does not look. A resumed attempt, in
any layout, reads it from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from polyreme_api.checkpoint_inventory import check_not_fenced, survey
from polyreme_api.errors import InvalidConfigError
from polyreme_api.history import checkpoint_name
from polyreme_api.store import ObjectStore
from polyreme_planner.curriculum import CurriculumStage
from polyreme_trainer.checkpoint.block_io import DamagedError
from polyreme_trainer.checkpoint.content import Content
from polyreme_trainer.checkpoint.load import load_checkpoint, open_checkpoint
from polyreme_trainer.checkpoint.save import CheckpointWriter
from polyreme_trainer.checkpoint.staging import Staging
from polyreme_trainer.checkpoint.subroot import SubRoot
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.checkpoint_content import content, restored
from polyreme_trainer.train.forward import answering, token_log_probs
from polyreme_trainer.train.inputs import Inputs
from polyreme_trainer.train.reference_weights import ReferenceWeights
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, settle

PREFIX = "reference-weights"


def hold(
    stage: CurriculumStage, state: TrainState, settings: TrainSettings, meshes: Meshes, writer: CheckpointWriter
) -> ReferenceWeights:
    """Return the copy of the weights with which a stage began, which is saved; every rank calls it.

    Raises:
        InvalidConfigError: If the stage has begun and its reference is lost.
        FencedError: If a newer attempt has begun.
        EnvironmentFailedError: If the copy can't be saved.
    """
    if state.reference is not None:  # the stage's end moved
        return state.reference
    own = SubRoot(settings.checkpoint.store, f"{PREFIX}/{stage.name or stage.first_step}")
    weights = content(state, meshes, with_rng=False, with_optimizer=False)
    if state.step >= stage.first_step:
        return _read(stage, state, settings, meshes, writer, own=own, weights=weights)
    check_not_fenced(settings.checkpoint.store, settings.rank.attempt)
    writer.save_apart(own, weights, step=state.step)
    return ReferenceWeights(state.flat, first_step=stage.first_step)


def compared(state: TrainState, microbatches: Sequence[Inputs], meshes: Meshes) -> list[Inputs]:
    """Score a step's answers under the reference; every rank calls it with its microbatches."""
    if state.reference is None:
        return list(microbatches)
    with reference_in_place(state), answering(state.models.values()):
        return [_compared(state, microbatch, meshes) for microbatch in microbatches]


@contextlib.contextmanager
def reference_in_place(state: TrainState) -> Iterator[None]:
    """Compute with the reference's weights, if the stage holds some."""
    settle(state)
    with contextlib.nullcontext() if state.reference is None else state.reference.in_place():
        yield


def _compared(state: TrainState, microbatch: Inputs, meshes: Meshes) -> Inputs:
    # The reference is another model: its routers choose for themselves.
    logp_N = token_log_probs(state, dataclasses.replace(microbatch, chosen_LSX=None), meshes)
    branches = microbatch.branches
    if logp_N is None or branches is None:
        return microbatch
    if branches.drawn is None:
        branches = dataclasses.replace(branches, reference_B=branches.scores(logp_N))
    else:
        drawn = dataclasses.replace(branches.drawn, reference_N=logp_N.double())
        branches = dataclasses.replace(branches, drawn=drawn)
    return dataclasses.replace(microbatch, branches=branches)


def _read(
    stage: CurriculumStage,
    state: TrainState,
    settings: TrainSettings,
    meshes: Meshes,
    writer: CheckpointWriter,
    *,
    own: SubRoot,
    weights: Content,
) -> ReferenceWeights:
    """Read the copy in the place of the present weights, which come back from host memory."""
    present = Staging().stage(weights).wait()
    start = settings.checkpoint.start_from
    others = [] if start is None else [SubRoot(start.store, f"{PREFIX}/{stage.name or stage.first_step}")]
    group = meshes.control_group
    for root in (own, *others):
        name = collectives.from_first(_newest(root, stage) if meshes.rank == 0 else None, group)
        if name is None:
            continue
        marker = open_checkpoint(root, name, settings.shape, settings.adapters)
        try:
            load_checkpoint(weights, marker, root, name, group=group)
        except DamagedError as error:
            raise _lost(stage, state.step, f"the weights of its reference are damaged: {error.message}") from error
        restored(state)
        reference = ReferenceWeights(state.flat, first_step=stage.first_step)
        if root is not own:
            writer.save_apart(own, weights, step=marker.step)
        for live, kept in zip(weights.buffers(), present.buffers(), strict=True):
            live.copy_(kept)
        restored(state)
        return reference
    raise _lost(stage, state.step, "the weights of its reference are not beside the checkpoints")


def _newest(store: ObjectStore, stage: CurriculumStage) -> str | None:
    """Name the copy that the last attempt saved which began the stage: history before it is cut."""
    found = [each for each in survey(store).committed if each.step == stage.first_step - 1]
    return checkpoint_name(max(found, key=lambda each: each.attempt)) if found else None


def _lost(stage: CurriculumStage, step: int, what: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"stage {stage.name!r} can't continue after step {step}: {what}, and its reference is the model before step "
        f"{stage.first_step}; begin a new job with the stage",
        field="spec.training.stages[].objective.reference.scores",
    )
