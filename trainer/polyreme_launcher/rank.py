"""The entry point of a rank: the only place where the trainer and the data plane meet.

A rank is forked from a warm parent (``fork_server``) that has imported this module: imports here cost nothing at a
restart. Nothing here may start a thread or open a socket at import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import logging
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from polyreme_api import environment as names
from polyreme_api.batch import BatchSource, EvaluationSource, TokenizerFile
from polyreme_api.checkpoint_inventory import read_mixture
from polyreme_api.environment import RankEnvironment
from polyreme_api.errors import InvalidConfigError, PolyremeError, RunFailedError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import checkpoint_at
from polyreme_api.job import TrainingJob, TrainingJobSpec, parse_job
from polyreme_api.mixture import MixtureRecord
from polyreme_api.progress import ProgressRecord, RankPhase
from polyreme_api.rank_logs import RankAttempt
from polyreme_api.rewards import Rewards
from polyreme_datahub.loader.engine.client import EngineSource, OpenRequest
from polyreme_datahub.loader.epoch_steps import counted_in
from polyreme_datahub.loader.open import open_held_out, open_packs, open_steps, open_tokenizer, sleep_really
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.loader.read.origin_budget import OriginBudget, Reader, origin_budget
from polyreme_datahub.objects import open_store
from polyreme_datahub.rewards.rewarding import SandboxedRewards
from polyreme_launcher import check_process
from polyreme_launcher.mixture_leader import CHANGES_FILE, MixtureLeader
from polyreme_launcher.rollback_leader import RollbackLeader
from polyreme_launcher.urls import checkpoint_folder, export_place, weights_place
from polyreme_planner.adapters import adapters_of
from polyreme_planner.curriculum import curriculum_stages, kinds_of_packs
from polyreme_planner.int4_weights import WeightsKind
from polyreme_planner.latent_cache import CacheKind
from polyreme_planner.mixture import in_force, mixture_changes
from polyreme_planner.optimizer_state import divides_update
from polyreme_planner.plan import Plan
from polyreme_planner.plan_inputs import setting_of
from polyreme_planner.precision import precision_of
from polyreme_planner.refusals import out_of_memory
from polyreme_system.clock import SystemClock
from polyreme_trainer import rank_page
from polyreme_trainer.export.stored import StoredExport
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.parallel.device import check_shared_memory, full_memory, take_device
from polyreme_trainer.parallel.pipeline import PipelineSettings, stage_ranks
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.train.loop import Amend, no_changes
from polyreme_trainer.train.run import train_rank
from polyreme_trainer.train.settings import (
    CheckpointSettings,
    EarlyStopRule,
    EvaluationSettings,
    ImagesOver,
    LearningRateSchedule,
    OptimizerName,
    OptimizerSettings,
    ParameterSharding,
    Precision,
    SharedScores,
    SpikeRule,
    StartPoint,
    TrainSettings,
)

LAST_RECORD_WAIT_S = 10.0
"""Longest wait for the launcher to read the pipe before the last record."""
ERROR_BYTES_MAX = 4096
"""Longest last message: a pipe takes it whole and at once."""
RENDEZVOUS_S = 300.0
"""How long ranks wait for each other beside their wait for data: the slowest one's start."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

_log = logging.getLogger(__name__)


def main() -> int:
    """Train this rank, or check its node; return its exit code."""
    if names.CHECK in os.environ:
        return check_process.main(os.environ)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)
    last_error = LastError(os.environ.get(names.ERROR_FD))
    logging.getLogger().addHandler(last_error)
    try:
        code = _train(os.environ)
    except PolyremeError as error:
        _log.error("rank ends: %s", error)
        code = int(error.exit_code)
    except OSError as error:
        _log.error("rank ends, the environment failed: %s", error)
        code = int(ExitCode.ENVIRONMENT)
    if code != ExitCode.OK:
        last_error.close()
    _log.info("rank ends with exit code %d", code)
    return code


class LastError(logging.Handler):
    """Keeps the newest logged error, and sends it when it is closed: the launcher reports why this rank ended.

    Args:
        descriptor: Pipe to the rank's parent, which made it.
    """

    def __init__(self, descriptor: str | None) -> None:
        super().__init__(logging.ERROR)
        self._descriptor = descriptor
        self.sentence = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Take an error: the exception's own message if there is one."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        errors = [str(argument) for argument in arguments if isinstance(argument, BaseException)]
        self.sentence = errors[0] if errors and errors[0] else record.getMessage()

    def close(self) -> None:
        """Send it, once."""
        super().close()
        if self._descriptor and self.sentence:
            with contextlib.suppress(OSError):
                os.write(int(self._descriptor), self.sentence.encode(errors="replace")[:ERROR_BYTES_MAX])
        self._descriptor = None


class PipeSink:
    """Writes progress records to the launcher's pipe; one that the pipe can't take at once is dropped."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_blocking(descriptor, False)

    def report(self, record: ProgressRecord) -> None:
        """Write one line, or drop it: progress must never hold up a step. Only the last record is waited for."""
        if self._descriptor is None:
            return
        line = record.model_dump_json(by_alias=True).encode() + b"\n"
        if record.phase is RankPhase.DONE:
            # Success depends on this record, and no step waits for it.
            select.select([], [self._descriptor], [], LAST_RECORD_WAIT_S)
        # A line of at most PIPE_BUF bytes is written whole or not at all.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, line)


def _watch(environment: Mapping[str, str], rank: RankEnvironment) -> None:
    """Record what this rank does on the page that its launcher reads, and write stacks on SIGUSR2, also if it hangs."""
    if (page := environment.get(names.PAGE_FD)) is not None:
        rank_page.attach(int(page))
    stacks = Path(rank.job_file).with_name(RankAttempt(rank.attempt, rank.rank).stacks_name)
    # Open for as long as this process lives: the handler of the signal only has the descriptor.
    faulthandler.register(signal.SIGUSR2, file=os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


def _train(environment: Mapping[str, str]) -> int:
    rank = RankEnvironment.parse(environment)
    _watch(environment, rank)
    job = parse_job_file(rank.job_file)
    plan = Plan.from_json(Path(rank.plan_file).read_text(encoding="utf-8"))
    device = take_device(plan.hardware, local_rank=rank.local_rank, tf32=job.spec.training.tf32)
    if device != "cpu":
        check_shared_memory(job.spec.workers.devices)
    begin = rank.resume_from or "the beginning"
    _log.info("rank %d of %d begins attempt %d at %s on %s", rank.rank, rank.world_size, rank.attempt, begin, device)
    sink, clock = PipeSink(rank.progress_fd), SystemClock()
    sink.report(_phase(rank, job, RankPhase.WAITING_FOR_DATA, clock.now_s()))
    gate = _origin_budget(environment, rank, job.spec)
    source, evaluation = _open_data(environment, rank, job.spec, plan, gate)
    held, record = _in_force(environment, rank, job.spec)
    settings = with_training(settings_of(environment, rank, held, plan), held, record, plan)
    settings = dataclasses.replace(settings, rank=dataclasses.replace(settings.rank, device_type=device))
    if settings.export_to is not None or settings.weights is not None:
        settings = dataclasses.replace(settings, tokenizer=_open_tokenizer(environment, job.spec, gate))
    try:
        return train_rank(
            settings,
            source=source,
            evaluation=evaluation,
            sink=sink,
            clock=clock,
            rewards=_rewards(environment, rank, job.spec, gate),
            amend=_amend(environment, rank, job.spec),
            renew=lambda known: with_training(known, *_in_force(environment, rank, job.spec), plan),
            roll_back=RollbackLeader(open_store(rank.checkpoint_url), attempt=rank.attempt, spec=job.spec),
        )
    except (MemoryError, RuntimeError) as error:
        if (message := full_memory(error)) is None:
            raise
        raise out_of_memory_error(job.spec, plan, message) from error


def _amend(environment: Mapping[str, str], rank: RankEnvironment, spec: TrainingJobSpec) -> Amend:
    """Return how changes of the mixture are fixed while ranks train: rank 0 does, beside the leader."""
    if rank.rank:
        return no_changes
    file = Path(rank.job_file).with_name(CHANGES_FILE)
    count = counted_in(environment.get(names.OBJECTS_URL, ""), spec, job=environment.get(names.JOB_UID, ""))
    return MixtureLeader(file, open_store(rank.checkpoint_url), attempt=rank.attempt, spec=spec, count=count)


def _in_force(
    environment: Mapping[str, str], rank: RankEnvironment, spec: TrainingJobSpec
) -> tuple[TrainingJobSpec, MixtureRecord | None]:
    """Return the spec with the training that was fixed last for the attempt and its steps, and the mixture fixed so."""
    record = read_mixture(open_store(rank.checkpoint_url), rank.attempt)
    held = open_steps(
        environment[names.OBJECTS_URL],
        in_force(spec, record),
        job=environment[names.JOB_UID],
        wait_s=float(spec.data.wait_seconds),
    )
    return held, record


def with_training(
    settings: TrainSettings, spec: TrainingJobSpec, record: MixtureRecord | None, plan: Plan
) -> TrainSettings:
    """Return settings with the steps, learning rates and mixture of a spec and a record."""
    return dataclasses.replace(
        settings,
        steps=spec.training.steps_known,
        curriculum=curriculum_stages(spec) if spec.training.stages else (),
        optimizer=_optimizer_settings(spec, plan),
        mixture_steps=frozenset(change.from_step for change in mixture_changes(spec, record)),
    )


def out_of_memory_error(spec: TrainingJobSpec, plan: Plan, message: str) -> RunFailedError:
    """Name the largest consumers of a rank whose memory is full, and a plan that needs less."""
    message = out_of_memory(
        setting_of(spec, plan.shape),
        plan.layout,
        plan.cut,
        packs_per_step=kinds_of_packs(spec)[0].per_step,
        message=message,
        recompute=plan.recompute_of(spec),
    )
    return RunFailedError(message, field="spec.training.recompute, spec.parallelism or spec.workers.replicas")


def settings_of(
    environment: Mapping[str, str], rank: RankEnvironment, spec: TrainingJobSpec, plan: Plan
) -> TrainSettings:
    """Translate spec, plan and environment to the trainer's settings.

    Raises:
        InvalidConfigError: If the ranks of the environment are not the plan's, or a URL is no folder.
    """
    if rank.world_size != plan.layout.world:
        raise InvalidConfigError(
            f"ranks do not fit the plan: WORLD_SIZE is {rank.world_size}, plan {plan.hash} has {plan.layout.world}"
        )
    weights = spec.model.weights
    return TrainSettings(
        rank=RankSettings(
            rank=rank.rank,
            world=rank.world_size,
            attempt=rank.attempt,
            replacement=int(environment.get(names.REPLACEMENT, "0")),
            master_address=rank.master_address,
            master_port=rank.master_port,
            master_fd=rank.master_fd,
            rendezvous_timeout_s=RENDEZVOUS_S + float(spec.data.wait_seconds),
            first_step_timeout_s=_exchange_timeout_s(spec, spec.health.first_step_timeout_seconds),
            collective_timeout_s=_exchange_timeout_s(spec, spec.health.collective_timeout_seconds),
        ),
        layout=plan.layout,
        pipeline=PipelineSettings(
            schedule=plan.cut.schedule, layers=plan.cut.stage_layers, microbatches=plan.cut.microbatches
        ),
        compute_options=ComputeOptions(
            recompute=plan.recompute_of(spec),
            capacity_factor=None if spec.training.capacity_factor is None else float(spec.training.capacity_factor),
        ),
        shape=plan.shape,
        steps=spec.training.steps_known,
        curriculum=curriculum_stages(spec) if spec.training.stages else (),
        images_over=ImagesOver(spec.parallelism.images_over),
        data_wait_s=float(spec.data.wait_seconds),
        seed=spec.training.seed,
        weights=weights_place(weights.location) if weights else None,
        checkpoint=CheckpointSettings(
            store=open_store(rank.checkpoint_url),
            folder=checkpoint_folder(rank.checkpoint_url),
            copies=_copy_files(environment),
            resume_from=rank.resume_from,
            start_from=_start_point(spec),
            interval_steps=spec.checkpoint.every_steps,
            kept=spec.checkpoint.keep,
            best=spec.checkpoint.keep_best,
            age_s_max=spec.checkpoint.max_age_seconds,
            window_steps=spec.health.loss.window_steps if spec.health.loss.action == "Rollback" else 0,
            plan_hash=plan.hash,
            plan=json.loads(plan.to_json()),
        ),
        adapters=adapters_of(spec.training, plan.shape),
        scores=_shared_scores(environment, spec),
        precision=Precision(precision_of(spec.training, plan.hardware)),
        parameter_sharding=ParameterSharding(spec.training.parameter_sharding),
        optimizer=_optimizer_settings(spec, plan),
        evaluation=_evaluation_settings(spec),
        spikes=SpikeRule(**spec.health.loss.model_dump()),
        parameter_hash_steps=spec.health.parameter_hash_steps,
        export_to=_export_place(environment, rank, spec),
        adapters_alone=spec.export is not None and spec.export.adapters == "Alone",
    )


def _start_point(spec: TrainingJobSpec) -> StartPoint | None:
    if spec.start_from is None:
        return None
    root, name = checkpoint_at(spec.start_from.checkpoint)
    own_tokenizer = spec.data.tokenizer.location is None
    return StartPoint(store=open_store(root), root=root, name=name, trains_tokenizer=own_tokenizer)


def _shared_scores(environment: Mapping[str, str], spec: TrainingJobSpec) -> SharedScores | None:
    """Where reference scores are shared, if a stage needs some."""
    if not any(stage.objective.scores_before for stage in curriculum_stages(spec)):
        return None
    return SharedScores(store=open_store(environment[names.OBJECTS_URL]), run=environment[names.JOB_UID])


def _exchange_timeout_s(spec: TrainingJobSpec, seconds: int) -> float:
    """Longest wait inside an exchange of a step; a rank that waits for data makes the others wait there."""
    return float(seconds + (spec.data.wait_seconds if spec.data.start_while_processing else 0))


def _export_place(
    environment: Mapping[str, str], rank: RankEnvironment, spec: TrainingJobSpec
) -> Path | StoredExport | None:
    """Where the model goes: the job's location, the installation's, or a folder beside the checkpoints."""
    if spec.export is None:
        return None
    beside = f"{rank.checkpoint_url.rstrip('/')}/export"
    return export_place(spec.export.location or environment.get(names.EXPORT_URL) or beside)


def _copy_files(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Descriptors of this rank's copy in memory and of its record, if the launcher gave it some."""
    if names.COPY_DATA_FD not in environment or names.COPY_RECORD_FD not in environment:
        return None
    return int(environment[names.COPY_DATA_FD]), int(environment[names.COPY_RECORD_FD])


def parse_job_file(path: str) -> TrainingJob:
    """Read the job that the launcher wrote for its ranks."""
    return parse_job(json.loads(Path(path).read_text(encoding="utf-8")))


def _origin_budget(environment: Mapping[str, str], rank: RankEnvironment, spec: TrainingJobSpec) -> OriginBudget | None:
    """Return this rank's share of the job's budget at the bucket. Where pods have engines, ranks read little."""
    if spec.data.origin_budget is None:
        return None
    return origin_budget(
        environment[names.OBJECTS_URL],
        spec,
        job=environment[names.JOB_UID],
        reader=Reader.RANK_WITH_ENGINE if environment.get(names.DATA_ENGINE_FD) else Reader.RANK,
        holder=f"rank {rank.rank}",
    )


def _open_tokenizer(environment: Mapping[str, str], spec: TrainingJobSpec, gate: OriginBudget | None) -> TokenizerFile:
    url, job = environment[names.OBJECTS_URL], environment[names.JOB_UID]
    return open_tokenizer(url, spec, job=job, gate=gate)


def _rewards(
    environment: Mapping[str, str], rank: RankEnvironment, spec: TrainingJobSpec, gate: OriginBudget | None
) -> Rewards | None:
    """Return what rewards the model's own answers; None: no stage has any.

    Raises:
        InvalidConfigError: On the first rank, if a stage's function is not there.
    """
    objectives = [stage.objective for stage in curriculum_stages(spec) if stage.objective.answers]
    if not objectives:
        return None
    rewards = SandboxedRewards(_open_tokenizer(environment, spec, gate).content)
    for objective in objectives if rank.rank == 0 else ():
        rewards.check(objective)
    return rewards


def _open_data(
    environment: Mapping[str, str], rank: RankEnvironment, spec: TrainingJobSpec, plan: Plan, gate: OriginBudget | None
) -> tuple[BatchSource, EvaluationSource | None]:
    """Wait until the data pipeline has closed the indexes of this job's datasets, and map them.

    Where the pod has a data engine, it does so for all its ranks.

    Raises:
        EnvironmentFailedError: If that takes longer than ``spec.data.waitSeconds``.
    """
    url, job = environment[names.OBJECTS_URL], environment[names.JOB_UID]
    limit_s = float(spec.data.wait_seconds)
    source: BatchSource
    split = StepSplit(data_ranks=plan.layout.dp, microbatches=plan.cut.microbatches)
    if engine := environment.get(names.DATA_ENGINE_FD):
        of_pod = any(_has_first_stage(each, plan) for each in _ranks_of_pod(rank, spec))
        asked = OpenRequest(attempt=rank.attempt, job=rank.job_file, split=split, pixels=of_pod)
        pixels = _has_first_stage(rank.rank, plan)
        source = EngineSource(int(engine), asked, open_wait_s=limit_s, pixels=pixels)
    else:
        ranks = spec.workers.devices
        newest = functools.partial(read_mixture, open_store(rank.checkpoint_url), rank.attempt)
        source = open_packs(
            url,
            spec,
            job=job,
            wait_s=limit_s,
            sleep=sleep_really,
            processes=ranks,
            split=split,
            pixels=_has_first_stage(rank.rank, plan),
            gate=gate,
            mixture=newest(),
            newest_mixture=newest,
        )
    return source, open_held_out(url, spec, job=job, wait_s=limit_s, sleep=sleep_really, gate=gate)


def _ranks_of_pod(rank: RankEnvironment, spec: TrainingJobSpec) -> range:
    first = rank.rank - rank.local_rank
    return range(first, first + spec.workers.devices)


def _has_first_stage(rank: int, plan: Plan) -> bool:
    """Whether a rank holds the first pipeline stage, the only one that encodes images."""
    layout = plan.layout
    stages = PipelineSettings(
        schedule=plan.cut.schedule, layers=plan.cut.stage_layers, microbatches=plan.cut.microbatches
    )
    return stage_ranks(stages, layout.pp)[0] == rank // (layout.world // layout.pp)


def _optimizer_settings(spec: TrainingJobSpec, plan: Plan) -> OptimizerSettings:
    optimizer = spec.training.optimizer
    return OptimizerSettings(
        name=OptimizerName(optimizer.name),
        learning_rate=float(optimizer.learning_rate),
        final_learning_rate=float(optimizer.final_learning_rate),
        schedule=LearningRateSchedule(optimizer.schedule),
        warmup_steps=optimizer.warmup_steps,
        decay_steps=optimizer.decay_steps,
        beta1=float(optimizer.beta1),
        beta2=float(optimizer.beta2),
        momentum=float(optimizer.momentum),
        epsilon=float(optimizer.epsilon),
        weight_decay=float(optimizer.weight_decay),
        gradient_norm_max=float(optimizer.clip_norm),
        router_bias_rate=float(spec.training.router_bias_rate),
        zero1=divides_update(spec.training, plan.shape, precision_of(spec.training, plan.hardware)),
        state_on_host=optimizer.state_memory == "Host",
    )


def _evaluation_settings(spec: TrainingJobSpec) -> EvaluationSettings:
    if spec.evaluation is None:
        return EvaluationSettings()
    early = spec.evaluation.early_stop
    return EvaluationSettings(
        every_steps=spec.evaluation.every_steps,
        samples_max=spec.evaluation.samples_max,
        answer_tokens_max=spec.evaluation.answer_tokens_max,
        thinking_tokens_max=spec.evaluation.thinking_tokens_max,
        cache=CacheKind(spec.evaluation.cache),
        early_stop=None if early is None else EarlyStopRule(patience=early.patience, min_delta=float(early.min_delta)),
        weights=WeightsKind(spec.evaluation.weights),
    )


def _phase(rank: RankEnvironment, job: TrainingJob, phase: RankPhase, now_s: float) -> ProgressRecord:
    return ProgressRecord(
        attempt=rank.attempt, phase=phase, released=True, steps=job.spec.training.steps or 0, updated_at_s=now_s
    )
