"""Settings of one rank: plain values, made from job, plan and environment by the composition root."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from polyreme_api.batch import TokenizerFile
from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import ObjectStore
from polyreme_planner.adapters import Adapters
from polyreme_planner.costs import Recompute
from polyreme_planner.curriculum import CurriculumStage, shape_at, stage_at
from polyreme_planner.int4_weights import WeightsKind, check_device
from polyreme_planner.latent_cache import CacheKind
from polyreme_planner.layout import Layout
from polyreme_planner.schedules import V_SHAPED
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.export.form import AS_TRAINED, WeightsForm
from polyreme_trainer.export.stored import StoredExport
from polyreme_trainer.model.compute_options import DEFAULT_OPTIONS, ComputeOptions
from polyreme_trainer.parallel.flat_layout import BUCKET_SCALARS
from polyreme_trainer.parallel.pipeline import NO_STAGES, PipelineSettings
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.weights.locations import Folder


class OptimizerName(enum.StrEnum):
    """Rule that updates the parameters."""

    ADAMW = "AdamW"
    MUON = "Muon"


class LearningRateSchedule(enum.StrEnum):
    """Shape of the learning rate after the warm-up."""

    WSD = "WSD"
    COSINE = "Cosine"


class Precision(enum.StrEnum):
    """Type in which the model computes; originals, gradients, moments and routing are float32 in any case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ParameterSharding(enum.StrEnum):
    """Sharding of the parameters."""

    NONE = "None"
    """Every rank holds all that it computes with."""
    FSDP2 = "FSDP2"
    """Ranks that would hold the same hold rows of it, and gather a layer when it runs (``parallel/fsdp.py``)."""


class ImagesOver(enum.StrEnum):
    """Ranks that share the images of a microbatch."""

    CONTEXT = "Context"
    """Those that share its stream."""
    DATA = "Data"
    """Neighbouring data-parallel ranks too, if one has many more images than others (``image_balancing.py``)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW or Muon, its schedule and state, clipping, and the router's bias rule."""

    name: OptimizerName = OptimizerName.ADAMW
    learning_rate: float = 2e-3
    final_learning_rate: float = 0.0
    """The learning rate after its decay."""
    schedule: LearningRateSchedule = LearningRateSchedule.WSD
    warmup_steps: int = 20
    """First steps, over which the learning rate rises linearly."""
    decay_steps: int = 0
    """Last steps of the run, over which the learning rate falls; 0: none, and with a cosine all after the warm-up."""
    momentum: float = 0.95
    """Decay of Muon's momentum; AdamW updates the parameters that Muon does not."""
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.05
    gradient_norm_max: float = 1.0
    """Norm to which the gradient of the whole model is clipped; 0 clips nothing."""
    router_bias_rate: float = 1e-3
    zero1: bool = False
    """Whether ranks that hold the same weights shard their update, and so its state (ZeRO-1)."""
    bucket_scalars: int = BUCKET_SCALARS
    """Scalars that are exchanged at a time under ZeRO-1."""
    state_on_host: bool = False
    """Whether that state lives in host memory; if the model does, it does anyway."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """A checkpoint of another run, with which a run without one of its own begins."""

    store: ObjectStore
    root: str
    """URL of the store."""
    name: str
    trains_tokenizer: bool = True
    """Whether the tokenizer is trained on the data of this run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Where and how often checkpoints are saved."""

    store: ObjectStore
    """The checkpoint root: a folder or a bucket."""
    folder: Path | None = None
    """The same root as a folder, if it is one: step records are appended there at once."""
    copies: tuple[int, int] | None = None
    """Files in memory (descriptors) for a copy of the newest checkpoint and for its record; None for no copy."""
    resume_from: str | None = None
    """Name of the checkpoint that the attempt begins at; never any other."""
    start_from: StartPoint | None = None
    """Where a run begins that has no checkpoint yet; None: at step 1, with new weights."""
    interval_steps: int = 100
    kept: int = 2
    """Committed checkpoints to keep; at least 1."""
    best: int = 0
    """Checkpoints with the lowest held-out loss to keep beside those."""
    age_s_max: float | None = None
    """Age beyond which all but the newest are deleted; None: none is deleted by age."""
    window_steps: int = 0
    """For rollbacks, also keep a checkpoint that is more than so many steps older than the newest; 0: no such one."""
    plan_hash: str = ""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The plan as plain data, kept in each checkpoint."""

    def __post_init__(self) -> None:
        """Refuse numbers that would lose everything.

        Raises:
            InvalidConfigError: Naming the field.
        """
        if self.interval_steps < 1:
            raise InvalidConfigError(
                f"checkpoint interval too small: {self.interval_steps}, expected at least 1",
                field="spec.checkpoint.everySteps",
            )
        if self.kept < 1:
            raise InvalidConfigError(
                f"too few checkpoints kept: {self.kept}, expected at least 1", field="spec.checkpoint.keep"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedScores:
    """Where jobs share the scores of pairs under a reference."""

    store: ObjectStore
    run: str = ""
    """Names the run: runs that score the same begin at different pairs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpikeRule:
    """What a spike of the loss is, and what follows."""

    action: Literal["Notify", "Stop", "Skip", "Rollback"] = "Notify"
    window_steps: int = 128
    deviations: int = 12
    """Median deviations above the median that are a spike."""
    update_norm_steps: int = 0
    """The norm of the update is measured every so many steps; 0: never."""

    def measures_update(self, step: int) -> bool:
        """Whether the norm of a step's update is measured."""
        return self.update_norm_steps > 0 and step % self.update_norm_steps == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopRule:
    """When a run ends because its held-out loss no longer falls."""

    patience: int
    """Measurements in a row that may fail to lower it."""
    min_delta: float = 0.0
    """By how much it must fall to count as lower."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Held-out pages after the last step, and their loss during training."""

    every_steps: int = 0
    """Steps between two measurements of the held-out loss, which is then also measured after the last step; 0: none."""
    samples_max: int = 2000
    answer_tokens_max: int = 16
    thinking_tokens_max: int | None = None
    """Tokens after which a thought is ended; None: answers have no thoughts."""
    cache: CacheKind = CacheKind.AUTO
    early_stop: EarlyStopRule | None = None
    """None: all steps are trained."""
    weights: WeightsKind = WeightsKind.AUTO
    """Of answers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """All that ``train_rank`` needs except data and sink."""

    rank: RankSettings
    layout: Layout
    shape: ModelShape
    steps: int
    """Steps of the whole run; an attempt that resumes at step s trains the rest."""
    checkpoint: CheckpointSettings
    curriculum: tuple[CurriculumStage, ...] = ()
    """Curriculum stages; empty: everything learns at every step."""
    pipeline: PipelineSettings = NO_STAGES
    """Pipeline stages and microbatches of a step."""
    compute_options: ComputeOptions = DEFAULT_OPTIONS
    """What layers recompute, and which rows they drop."""
    images_over: ImagesOver = ImagesOver.CONTEXT
    seed: int = 0
    weights: Path | Folder | None = None
    """Folder, or place in a bucket, of weights that a run without a checkpoint starts from; None: drawn by the seed."""
    adapters: Adapters | None = None
    """Adapters that are trained, and nothing else; None: the model itself."""
    precision: Precision = Precision.FLOAT32
    parameter_sharding: ParameterSharding = ParameterSharding.NONE
    """Sharding of the parameters; with sharded parameters the optimizer's state is sharded too."""
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    spikes: SpikeRule = SpikeRule()
    parameter_hash_steps: int = 0
    """Copies of parameters are compared every so many steps, and before each checkpoint; 0: never."""
    mixture_steps: frozenset[int] = frozenset()
    """Steps at which the weights of sources change."""
    export_to: Path | StoredExport | None = None
    """Folder, or place in a bucket, of the trained model, which rank 0 writes after the last step; None: no export."""
    export_form: WeightsForm = AS_TRAINED
    adapters_alone: bool = False
    """Whether that is the adapters alone, in PEFT's form, and not the model with its adapters merged."""
    scores: SharedScores | None = None
    """Where reference scores are shared; None: beside the checkpoints."""
    data_wait_s: float = 0.0
    """Longest wait for samples of a step that are still processed [s]."""
    tokenizer: TokenizerFile | None = None
    """To put beside the exported model, and to compare with that of ``weights``."""

    def __post_init__(self) -> None:
        """Refuse settings that do not go together.

        Raises:
            InvalidConfigError: Naming the fields.
        """
        if self.compute_options.recompute is Recompute.FULL and self.pipeline.schedule in V_SHAPED:
            raise InvalidConfigError(
                f"recompute full cannot be combined with schedule {self.pipeline.schedule}, which computes gradients "
                "of inputs and of weights separately and would recompute every layer for both; use selective, or "
                "another schedule",
                field="spec.training.recompute or spec.parallelism.schedule",
            )
        if self.parameter_sharding is not ParameterSharding.NONE:
            self._check_rows()
        self._check_device()

    def _check_device(self) -> None:
        drawing = any(stage.objective.drawn_in_int4 for stage in self.curriculum)
        if self.evaluation.weights is not WeightsKind.INT4 and not drawing:
            return
        field = "spec.training.stages[].objective.generation.weights" if drawing else "spec.evaluation.weights"
        check_device(self.rank.device_type, field=field)

    def _check_rows(self) -> None:
        field = "spec.training.parameterSharding"
        if self.layout.pp > 1:
            raise InvalidConfigError(
                f"parameter sharding {self.parameter_sharding} cannot be combined with pp {self.layout.pp}: a pipeline "
                "keeps gathered parameters until its last microbatch; use pp 1 and a higher ep or tp, or "
                "stateSharding Sharded",
                field=f"{field} or spec.parallelism.pp",
            )
        if self.optimizer.name is OptimizerName.MUON:
            raise InvalidConfigError(
                f"parameter sharding {self.parameter_sharding} cannot be combined with Muon, which needs whole "
                "matrices; use AdamW, or stateSharding Sharded",
                field=f"{field} or spec.training.optimizer.name",
            )

    def stage_at(self, step: int) -> CurriculumStage:
        """Return the curriculum stage of a step; after the last step, the last one."""
        return stage_at(self.curriculum_stages, step)

    @property
    def curriculum_stages(self) -> tuple[CurriculumStage, ...]:
        """Curriculum stages, at least one."""
        return self.curriculum or (CurriculumStage(steps=self.steps),)

    def shape_at(self, step: int) -> ModelShape:
        """Return the model's shape as it is trained at a step: a curriculum stage may set another rotary theta."""
        return shape_at(self.shape, self.curriculum_stages, step)
