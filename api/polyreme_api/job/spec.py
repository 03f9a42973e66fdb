"""The TrainingJob: the same YAML for ``kubectl apply`` and for ``polyreme run``."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from polyreme_api.fields import Seconds
from polyreme_api.job.data import BUDGET_BYTES_MIN, BUDGET_REQUESTS_MIN, Data, Evaluation
from polyreme_api.job.model import ModelPart, Training
from polyreme_api.job.policy import FailurePolicy, Health
from polyreme_api.job.pre_checks import PreChecks
from polyreme_api.job.schedule import check_schedule
from polyreme_api.job.status import TrainingJobStatus
from polyreme_api.job.workers import (
    STAGES_MEET,
    Checkpoint,
    Export,
    Parallelism,
    Scheduling,
    StartFrom,
    Topology,
    Workers,
)
from polyreme_api.labels import MANAGER
from polyreme_api.metadata import Object, ObjectMeta

LAUNCHER_PARTS = ("model", "data", "training")
"""Parts of the spec that the launcher's ranks train by; a container that brings its own training needs none."""
STORED = {"stored": True}
"""Validation context of a job that exists: changes appended to its schedule are not checked; see ``job.schedule``."""
NO_MODEL = ModelPart.model_construct(preset="")
NO_DATA = Data.model_construct(sources=[], sequence_tokens=0)
NO_TRAINING = Training.model_construct(steps=0, packs_per_step=0)


class TrainingJobSpec(Scheduling):
    """The desired state.

    In an existing job only ``workers.replicas``, ``suspend``, ``data.onDamage``, ``checkpoint.keep`` and the end of the
    run (``training.steps``, ``decaySteps`` and ``finalLearningRate`` of the optimizer) may change, while it is not
    admitted also ``queueName``, ``priorityClassName`` and ``priority``, and ``data.schedule`` may get more entries.
    """

    model: ModelPart = Field(default_factory=lambda: NO_MODEL)
    """The model to train; required unless ``workers.runtime.mode`` is ``Environment``."""
    data: Data = Field(default_factory=lambda: NO_DATA)
    """The data to train on; required unless ``workers.runtime.mode`` is ``Environment``."""
    training: Training = Field(default_factory=lambda: NO_TRAINING)
    """Steps, optimizer and stages of the training; required unless ``workers.runtime.mode`` is ``Environment``."""
    parallelism: Parallelism = Field(default_factory=Parallelism)
    """The parallel layout."""
    workers: Workers = Field(default_factory=Workers)
    """The gang of pods."""
    topology: Topology = Field(default_factory=Topology)
    """How near the pods must lie."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """When and where the state of training is saved."""
    start_from: StartFrom | None = None
    """Begin with weights and optimizer's state of a checkpoint, and after its step if the data are the same."""
    evaluation: Evaluation | None = None
    """Held-out questions after the last step, and their loss on the way."""
    export: Export | None = None
    """What is written after the last step."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """Rules and budgets of recovery."""
    health: Health = Field(default_factory=Health)
    """Timeouts for heartbeats, nodes, starts and hangs."""
    pre_checks: PreChecks = Field(default_factory=PreChecks)
    """Checks of the nodes before training."""
    suspend: bool = False
    """Save a checkpoint, stop, and release the devices until this is false again."""
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] = MANAGER
    """Controller that manages the job; with another value than the default this operator ignores the job."""
    ttl_seconds_after_finished: Seconds | None = None
    """How long the finished job is kept; none: it is never deleted. Checkpoints are never deleted with it."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Longest time from first admission to the end."""

    @model_validator(mode="after")
    def _parts_of_the_launcher(self) -> "TrainingJobSpec":
        missing = [name for name in LAUNCHER_PARTS if name not in self.model_fields_set]
        if missing and self.workers.runtime.mode == "Launcher":
            raise ValidationError.from_exception_data(
                "TrainingJobSpec", [{"type": "missing", "loc": (name,), "input": {}} for name in missing]
            )
        return self

    @model_validator(mode="after")
    def _references(self, info: ValidationInfo) -> "TrainingJobSpec":
        if "data" in self.model_fields_set:
            check_sources(self.data)
            check_stages(self.training, self.data)
            if info.context != STORED:
                check_schedule(self.data, self.training)
            check_budget(self.data, self.workers)
            check_early_start(self.training, self.data)
            check_epochs(self.training, self.data)
        if self.evaluation is not None:
            check_held_out(self.evaluation, self.data)
        return self

    @model_validator(mode="after")
    def _one_beginning(self) -> "TrainingJobSpec":
        if self.start_from is not None and self.model.weights is not None and self.training.adapters is None:
            raise ValueError(
                "startFrom begins with the weights of a checkpoint, and model.weights names others; drop one of the two"
            )
        return self

    @model_validator(mode="after")
    def _recomputed_once(self) -> "TrainingJobSpec":
        schedule = self.parallelism.schedule
        if self.training.recompute == "Full" and schedule in STAGES_MEET:
            raise ValueError(
                f"training.recompute Full cannot be combined with parallelism.schedule {schedule}, which computes "
                "gradients of inputs and of weights separately and would recompute every layer for both; use "
                "recompute: Selective, or schedule 1F1B or Interleaved1F1B"
            )
        return self

    @model_validator(mode="after")
    def _adapters_to_export(self) -> "TrainingJobSpec":
        if self.export is not None and self.export.adapters == "Alone" and self.training.adapters is None:
            raise ValueError("export.adapters is Alone, but the job trains no adapters; set training.adapters too")
        return self

    @model_validator(mode="after")
    def _losses_for_the_best(self) -> "TrainingJobSpec":
        if self.checkpoint.keep_best:
            check_best(self.checkpoint, self.evaluation)
        return self

    @model_validator(mode="after")
    def _losses_for_an_early_stop(self) -> "TrainingJobSpec":
        if self.evaluation is not None and self.evaluation.early_stop is not None:
            check_early_stop(self)
        return self

    @model_validator(mode="after")
    def _checkpoints_for_rollbacks(self) -> "TrainingJobSpec":
        if self.health.loss.action == "Rollback":
            check_rollback(self)
        return self

    @model_validator(mode="after")
    def _rows_without_stages(self) -> "TrainingJobSpec":
        sharding, stages = self.training.parameter_sharding, self.parallelism.pp or 1
        if sharding != "None" and stages > 1:
            raise ValueError(
                f"training.parameterSharding {sharding} cannot be combined with parallelism.pp {stages}: a pipeline "
                "keeps gathered parameters until its last microbatch; use pp: 1 and a higher ep or tp, or "
                "parameterSharding: None with optimizer.stateSharding: Sharded"
            )
        return self

    @model_validator(mode="after")
    def _int4_of_whole_matrices(self) -> "TrainingJobSpec":
        sharding = self.training.parameter_sharding
        answering = self.evaluation is not None and self.evaluation.weights == "Int4"
        drawing = any(of.objective is not None and of.objective.drawn_in_int4 for of in self.training.stages)
        if sharding != "None" and (answering or drawing):
            field = "evaluation.weights" if answering else "objective.generation.weights"
            raise ValueError(
                f"{field} Int4 cannot be combined with training.parameterSharding {sharding}, with which no rank holds "
                "whole matrices; use weights: Auto, or parameterSharding: None"
            )
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out parts that were never given: their defaults are not the job's."""
        dumped: dict[str, Any] = dump(self)
        return {
            name: part for name, part in dumped.items() if name not in LAUNCHER_PARTS or name in self.model_fields_set
        }


class TrainingJob(Object):
    """A training run of a mixture-of-experts vision-language model."""

    kind: Literal["TrainingJob"]
    metadata: ObjectMeta
    spec: TrainingJobSpec
    status: TrainingJobStatus = Field(default_factory=TrainingJobStatus)


def check_sources(data: Data) -> None:
    """Refuse a mixture whose names do not fit together.

    Raises:
        ValueError: Naming the source.
    """
    names = [source.name for source in data.sources]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"data.sources: two sources are named {doubled[0]!r}; names are unique")
    from_start = bool(data.schedule) and data.schedule[0].from_step == 1
    if not from_start and not any(source.weight for source in data.sources):
        raise ValueError("data.sources: every weight is 0; give one source a weight above 0")
    steps = [change.from_step for change in data.schedule]
    if steps != sorted(set(steps)):
        raise ValueError(f"data.schedule: fromStep must rise, seen {steps}; order the changes")


def check_stages(training: Training, data: Data) -> None:
    """Refuse stages whose weights do not fit the mixture.

    Raises:
        ValueError: Naming the stage.
    """
    known = {source.name for source in data.sources}
    for stage in training.stages:
        where, weighed = f"training.stages: {stage.name!r}", [weight.source for weight in stage.weights]
        if doubled := sorted({name for name in weighed if weighed.count(name) > 1}):
            raise ValueError(f"{where} weighs {doubled[0]!r} twice; drop one")
        if strange := [name for name in weighed if name not in known]:
            raise ValueError(f"{where} weighs source {strange[0]!r}, sources are {', '.join(sorted(known))}")
        if weighed and not any(weight.weight for weight in stage.weights):
            raise ValueError(f"{where} gives every source weight 0; raise one, or leave weights out")


def check_budget(data: Data, workers: Workers) -> None:
    """Refuse a budget at the bucket that is too small to be divided.

    Raises:
        ValueError: Naming the field.
    """
    if (budget := data.origin_budget) is None:
        return
    pods = max(workers.replicas, workers.max_replicas or 0)
    readers = pods * (1 + workers.devices)
    for name, given, least in (
        ("requestsPerSecond", budget.requests_per_second, BUDGET_REQUESTS_MIN),
        ("bytesPerSecond", budget.bytes_per_second, BUDGET_BYTES_MIN),
    ):
        if given < least * readers:
            raise ValueError(
                f"data.originBudget: {name} {given} is too small for {pods} pods with {1 + workers.devices} processes "
                f"each, which need {least}; give at least {least * readers}"
            )


def check_early_start(training: Training, data: Data) -> None:
    """Refuse to start on data whose order depends on all of them.

    Raises:
        ValueError: Naming the field.
    """
    if not data.start_while_processing:
        return
    if data.tokenizer.location is None:
        raise ValueError(
            "data.startWhileProcessing: the tokenizer is trained on the whole datasets, so no sample is ready before "
            "all are; set data.tokenizer.location to a released one, or leave startWhileProcessing out"
        )
    of_sizes = ["weightsBy: Tokens"] if data.weights_by == "Tokens" else []
    of_sizes += ["temperature"] if data.temperature is not None else []
    of_sizes += [f"epochsMax of source {of.name!r}" for of in data.sources if of.epochs_max is not None]
    if of_sizes:
        raise ValueError(
            f"data.startWhileProcessing: {of_sizes[0]} needs the size of every source, which is known when all are "
            "processed; drop one of the two"
        )
    if training.scored_before:
        raise ValueError(
            f"data.startWhileProcessing: stage {training.scored_before[0]!r} scores all of its pairs before its first "
            "step; leave startWhileProcessing out, or use its objective.reference.scores: Online"
        )
    for stage in training.stages:
        if stage.objective is not None and stage.objective.answers:
            raise ValueError(
                f"data.startWhileProcessing: stage {stage.name!r} leaves room for answers in its packs; which samples "
                "fit is known when all are processed: leave startWhileProcessing out"
            )
        tokens = data.sequence_tokens if stage.sequence_tokens is None else stage.sequence_tokens
        if tokens != data.sequence_tokens:
            raise ValueError(
                f"data.startWhileProcessing: training.stages {stage.name!r} has packs of {tokens} tokens, the data "
                f"{data.sequence_tokens}; which samples fit is known when all are processed: give every stage the same "
                "sequenceTokens, or leave startWhileProcessing out"
            )


def check_epochs(training: Training, data: Data) -> None:
    """Refuse to count the steps of epochs where they can't be counted before the first step.

    Raises:
        ValueError: Naming the field.
    """
    if training.epochs is None:
        return
    if data.start_while_processing:
        raise ValueError(
            f"training.epochs {training.epochs} needs the size of every source, which is known when all are processed, "
            "and data.startWhileProcessing starts before; give training.steps, or leave startWhileProcessing out"
        )
    if limited := [of.name for of in data.sources if of.epochs_max is not None]:
        raise ValueError(
            f"training.epochs {training.epochs} cannot be combined with epochsMax of source {limited[0]!r}; give "
            "training.steps, or drop epochsMax"
        )


def check_rollback(spec: TrainingJobSpec) -> None:
    """Refuse rollbacks that would find no checkpoint before the window.

    Raises:
        ValueError: Naming the fields.
    """
    window, every, keep = spec.health.loss.window_steps, spec.checkpoint.every_steps, spec.checkpoint.keep
    if spec.workers.runtime.mode == "Environment":
        raise ValueError(
            "health.loss.action Rollback needs checkpoints of the ranks, and workers.runtime.mode Environment has "
            "none; use action: Notify"
        )
    if spec.training.steps is not None and every >= spec.training.steps:
        raise ValueError(
            f"health.loss.action Rollback needs checkpoints, and the first is saved at step {every} of "
            f"{spec.training.steps}; lower checkpoint.everySteps"
        )
    if window < every:
        raise ValueError(
            f"health.loss.windowSteps {window} is below checkpoint.everySteps {every}, and a rollback goes back by "
            "whole checkpoints; raise windowSteps or lower everySteps"
        )
    if window > keep * every:
        raise ValueError(
            f"health.loss.windowSteps {window} is above the {keep * every} steps that checkpoint.keep {keep} x "
            f"everySteps {every} covers; raise keep or lower windowSteps"
        )
    if spec.checkpoint.max_age_seconds is not None:
        raise ValueError(
            "checkpoint.maxAgeSeconds could delete the checkpoint that health.loss.action Rollback needs; drop "
            "maxAgeSeconds"
        )


def check_best(checkpoint: Checkpoint, evaluation: Evaluation | None) -> None:
    """Refuse to keep the best of checkpoints at whose steps no held-out loss is measured.

    Raises:
        ValueError: Naming the fields.
    """
    measured, every = 0 if evaluation is None else evaluation.every_steps, checkpoint.every_steps
    if not measured or every % measured:
        raise ValueError(
            f"checkpoint.keepBest needs the held-out loss at each checkpoint: evaluation.everySteps is {measured} and "
            f"checkpoint.everySteps {every}; make evaluation.everySteps a divisor of it"
        )


def check_early_stop(spec: TrainingJobSpec) -> None:
    """Refuse an early stop that would leave out stages, or that judges what they do not lower.

    Raises:
        ValueError: Naming the fields.
    """
    if len(spec.training.stages) > 1:
        raise ValueError(
            f"evaluation.earlyStop ends the whole run, not one of its {len(spec.training.stages)} training.stages; "
            "leave earlyStop out, or train the stages as jobs of their own with startFrom"
        )
    objectives = [stage.objective.kind for stage in spec.training.stages if stage.objective is not None]
    if learned := [kind for kind in objectives if kind != "Supervised"]:
        raise ValueError(
            f"evaluation.earlyStop judges the loss of expected answers, which objective {learned[0]} of "
            "training.stages does not lower; leave one of the two out"
        )


def check_held_out(evaluation: Evaluation, data: Data) -> None:
    """Refuse to evaluate on what is trained on, and two results of one name.

    Raises:
        ValueError: Naming the set.
    """
    names = [held_out.name for held_out in evaluation.sets]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"evaluation.sets: two sets are named {doubled[0]!r}; names are unique")
    trained = {source.dataset.partition("@")[0]: source.name for source in data.sources}
    for held_out in evaluation.sets:
        if (source := trained.get(held_out.dataset.partition("@")[0])) is not None:
            raise ValueError(
                f"evaluation.sets: {held_out.name!r} evaluates on {held_out.dataset}, source {source!r} trains on it; "
                "choose a dataset that is held out"
            )
