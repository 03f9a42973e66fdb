"""Entry of a rank: meet the others, load or initialise, train, evaluate, export; every end is an ``ExitCode``."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from pathlib import Path

import torch

from polyreme_api.batch import BatchSource, EvaluationSource
from polyreme_api.checkpoint_inventory import check_not_fenced
from polyreme_api.clock import Clock
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import parse_checkpoint_name
from polyreme_api.progress import CheckpointRef, ProgressRecord, ProgressSink, RankPhase
from polyreme_api.rewards import Rewards
from polyreme_planner.checkpoint_model import saved_adapters
from polyreme_trainer.checkpoint.retention import Rule
from polyreme_trainer.checkpoint.save import CheckpointWriter, Identity
from polyreme_trainer.export.stored import StoredExport
from polyreme_trainer.parallel.world import World, open_world
from polyreme_trainer.train.checkpoint_content import content
from polyreme_trainer.train.evaluation import evaluate, write_evaluation
from polyreme_trainer.train.export import export
from polyreme_trainer.train.loop import Amend, Loop, LoopEnd, Renew, no_changes, unchanged
from polyreme_trainer.train.microbatches import PackReader
from polyreme_trainer.train.records import Reporter, open_step_log
from polyreme_trainer.train.resumption import copies_of, resume
from polyreme_trainer.train.rollback import RollBack, no_rollback
from polyreme_trainer.train.rollouts.generation_model import GenerationModel, open_generation_groups
from polyreme_trainer.train.rollouts.rollouts import Rollouts
from polyreme_trainer.train.routing_tables import RoutingTable
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.signals import Requests, listen
from polyreme_trainer.train.state import TrainState, enter, open_state
from polyreme_trainer.train.step_judge import StepJudge

_log = logging.getLogger(__name__)


def train_rank(
    settings: TrainSettings,
    *,
    source: BatchSource,
    evaluation: EvaluationSource | None,
    sink: ProgressSink,
    clock: Clock,
    rewards: Rewards | None = None,
    amend: Amend = no_changes,
    renew: Renew = unchanged,
    roll_back: RollBack = no_rollback,
) -> int:
    """Train one rank of an attempt from its resume point to the end.

    Args:
        settings: The run, and this rank's place in it.
        source: Training data.
        evaluation: Held-out questions, or None.
        sink: Takes progress, from rank 0 only.
        clock: Wall and steady time.
        rewards: Rewards the model's own answers; None: no stage needs it.
        amend: See ``loop.Loop``.
        renew: See ``loop.Loop``.
        roll_back: See ``step_judge.StepJudge``.

    Returns:
        The exit code of the rank's process.
    """
    torch.set_num_threads(1)
    try:
        with listen() as requests:
            reporter = _reporter(settings, sink, clock)
            check_not_fenced(settings.checkpoint.store, settings.rank.attempt)
            reporter.phase(RankPhase.STARTING, message="opening process groups")
            return _train(
                settings,
                source,
                evaluation,
                requests=requests,
                reporter=reporter,
                rewards=rewards,
                amend=amend,
                renew=renew,
                roll_back=roll_back,
            )
    except PolyremeError as error:
        _log.error("rank %d ends: %s", settings.rank.rank, error)
        return int(error.exit_code)
    except OSError as error:
        _log.error("rank %d ends, the environment failed: %s", settings.rank.rank, error)
        return int(ExitCode.ENVIRONMENT)


def _train(
    settings: TrainSettings,
    source: BatchSource,
    evaluation: EvaluationSource | None,
    *,
    requests: Requests,
    reporter: Reporter,
    rewards: Rewards | None,
    amend: Amend,
    renew: Renew,
    roll_back: RollBack,
) -> int:
    rank, saved = settings.rank, settings.checkpoint
    with open_world(rank, settings.layout) as world:
        reporter.phase(RankPhase.LOADING)
        groups = open_generation_groups(settings, world.meshes)  # before the model takes the memory
        state = open_state(settings, world.meshes, media_token=source.token_ids.media)
        generation = None if groups is None else GenerationModel(settings, state, world.meshes, groups)
        beginning = resume(settings, state, source, world)
        enter(state, settings.stage_at(state.step + 1))
        reporter.resumed(state.step)
        reporter.note(beginning.words)
        with (
            _writer(settings, state, world, reporter, base=beginning.base) as writer,
            open_step_log(saved.store, saved.folder, rank.attempt, rank=rank.rank) as log,
            PackReader(
                source,
                settings,
                world.meshes,
                image_balancer=state.image_balancer,
                on_wait=lambda words: reporter.phase(RankPhase.WAITING_FOR_DATA, message=words),
            ) as reader,
        ):
            loop = Loop(
                settings=settings,
                state=state,
                source=source,
                reader=reader,
                meshes=world.meshes,
                writer=writer,
                requests=requests,
                reporter=reporter,
                log=log,
                evaluation=evaluation,
                routing=RoutingTable(saved.store, settings.shape.decoder, attempt=rank.attempt),
                clock=reporter.clock,
                rollouts=Rollouts(
                    settings=settings,
                    state=state,
                    source=source,
                    reader=reader,
                    meshes=world.meshes,
                    writer=writer,
                    rewards=rewards,
                    generation=generation,
                ),
                judge=StepJudge(state, world.meshes, writer, reporter, roll_back),
                amend=amend,
                renew=renew,
            )
            if loop.run() is LoopEnd.STOPPED:
                return ExitCode.STOPPED
        with reporter.evaluating():
            if evaluation is not None:
                _evaluate(settings, state, source, evaluation, world, reporter=reporter)
            if settings.export_to is not None:
                reporter.phase(RankPhase.EXPORTING)
                _export(settings, state, source, world, settings.export_to)
        reporter.phase(RankPhase.DONE)
        return int(ExitCode.OK)


def _evaluate(
    settings: TrainSettings,
    state: TrainState,
    source: BatchSource,
    evaluation: EvaluationSource,
    world: World,
    *,
    reporter: Reporter,
) -> None:
    """Answer the held-out questions; an attempt that resumes at the last step does this and the export."""
    reporter.phase(RankPhase.EVALUATING)
    result = evaluate(
        state,
        evaluation,
        settings.evaluation,
        world.meshes,
        stop_token=source.token_ids.end,
        attempt=settings.rank.attempt,
    )
    if result is not None:
        write_evaluation(settings.checkpoint.store, settings.rank.attempt, result)


def _export(
    settings: TrainSettings, state: TrainState, source: BatchSource, world: World, place: Path | StoredExport
) -> None:
    """Write the trained model, unless a newer attempt has begun; for a bucket it is written to this disk first."""
    if settings.rank.rank == 0:
        check_not_fenced(settings.checkpoint.store, settings.rank.attempt)
    as_trained = dataclasses.replace(settings, shape=settings.shape_at(state.step))
    with contextlib.ExitStack() as stack:
        if isinstance(place, Path):
            directory = place
        else:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polyreme-export-")), "model")
        export(state, as_trained, world.meshes, directory, tokens=source.token_ids)
        if isinstance(place, StoredExport) and settings.rank.rank == 0:
            check_not_fenced(settings.checkpoint.store, settings.rank.attempt)
            place.upload(directory)


def _writer(
    settings: TrainSettings, state: TrainState, world: World, reporter: Reporter, *, base: str
) -> CheckpointWriter:
    writer = CheckpointWriter(
        Identity(
            store=settings.checkpoint.store,
            attempt=settings.rank.attempt,
            shape=settings.shape,
            plan_hash=settings.checkpoint.plan_hash,
            plan=settings.checkpoint.plan,
            adapters=None if settings.adapters is None else saved_adapters(settings.adapters, base=base),
            steps_before=state.optimizer.steps_before,
            rule=Rule(
                kept=settings.checkpoint.kept,
                best=settings.checkpoint.best,
                age_s_max=settings.checkpoint.age_s_max,
                window_steps=settings.checkpoint.window_steps,
            ),
        ),
        group=world.meshes.control_group,
        now_s=reporter.clock.now_s,
        committed=reporter.checkpoint,
        copies=copies_of(settings),
    )
    writer.prepare(content(state, world.meshes))
    return writer


def _reporter(settings: TrainSettings, sink: ProgressSink, clock: Clock) -> Reporter:
    resumed = settings.checkpoint.resume_from
    reference: CheckpointRef | None = parse_checkpoint_name(resumed) if resumed else None
    first = ProgressRecord(
        attempt=settings.rank.attempt,
        replacement=settings.rank.replacement,
        phase=RankPhase.STARTING,
        released=True,
        steps=settings.steps,
        step=reference.step if reference else 0,
        checkpoint=reference,
    )
    return Reporter(sink if settings.rank.rank == 0 else None, clock, first)
