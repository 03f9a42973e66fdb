"""The model that is trained: a preset, changed sizes, precision, the optimizer and its schedule."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from polyreme_api.errors import InvalidConfigError
from polyreme_api.fields import (
    STEPS_MAX,
    Coefficient,
    CountOrDecimal,
    Decay,
    DecimalText,
    LearningRate,
    Name,
    Part,
    Url,
)
from polyreme_api.job.data import PackTokens, SourceWeight
from polyreme_api.job.objective import Objective

CAPACITY_FACTOR_MAX = 1000
STAGES_MAX = 16
EPOCHS_MAX = 10_000
PacksPerStep = Annotated[int, Field(ge=1, le=1_000_000)]
ModelPartName = Literal["Tower", "Projector", "Decoder"]
EVERY_PART: tuple[ModelPartName, ...] = ("Tower", "Projector", "Decoder")
StepCount = Annotated[int, Field(ge=0, le=STEPS_MAX)]
Sizes = Annotated[dict[str, CountOrDecimal], Field(max_length=32)]


class ModelOverrides(Part):
    """Sizes that differ from the preset's, by the names of ``polyreme_planner.shapes``."""

    vision: Sizes = Field(default_factory=dict)
    """Sizes of the vision tower, such as ``{layers: 4}``."""
    decoder: Sizes = Field(default_factory=dict)
    """Sizes of the decoder, such as ``{experts: 16, routed_scaling: "2.5"}``."""


class Weights(Part):
    """Weights that the run starts from instead of random ones; an attempt that has a checkpoint does not read them."""

    format: Literal["HuggingFace"] = "HuggingFace"
    """Names and files by Hugging Face's conventions: safetensors, an index where there are several, ``config.json``."""
    location: Url
    """URL of the folder, ``file://`` or ``s3://``; every rank reads it. Kimi-VL's names fill the whole model,
    DeepSeek-V3's names its decoder."""


class ModelPart(Part):
    """The model to train."""

    preset: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of a model preset: ``kimi-vl-nano``, ``kimi-vl-a3b``, ``moonlight-16b-a3b``, ``deepseek-v3`` or
    ``kimi-k2``."""
    overrides: ModelOverrides = Field(default_factory=ModelOverrides)
    """Sizes that differ from the preset's."""
    weights: Weights | None = None
    """Weights that the run starts from; none: drawn by ``training.seed``. With adapters every attempt reads them."""


class Optimizer(Part):
    """Optimizer, learning-rate schedule, and where the optimizer's state is stored."""

    name: Literal["AdamW", "Muon"] = "AdamW"
    """``Muon`` updates the matrices of layers and experts; embedding, head, router and all vectors use AdamW."""
    learning_rate: LearningRate = "1e-3"
    """Peak learning rate."""
    final_learning_rate: LearningRate = "0"
    """Learning rate to which a decay falls."""
    schedule: Literal["WSD", "Cosine"] = "WSD"
    """Shape of the learning rate after its warm-up: ``WSD`` is constant, then falls linearly over ``decaySteps`` (with
    0 it stays constant); ``Cosine`` falls along half a cosine over ``decaySteps`` or, with 0, over all steps after the
    warm-up."""
    beta1: Decay = "0.9"
    """Decay of AdamW's first moment."""
    beta2: Decay = "0.98"
    """Decay of AdamW's second moment."""
    momentum: Decay = "0.95"
    """Decay of Muon's momentum."""
    epsilon: Coefficient = "1e-8"
    """Added to the root of the second moment."""
    weight_decay: Coefficient = "0.05"
    """Decoupled weight decay, on matrices only."""
    clip_norm: Coefficient = "1.0"
    """Largest global norm of the gradient; ``"0"`` disables clipping."""
    warmup_steps: StepCount = 0
    """Steps over which the learning rate rises from zero."""
    decay_steps: StepCount = 0
    """Last steps of the run, over which the learning rate falls to ``finalLearningRate``."""
    state_sharding: Literal["Auto", "Whole", "Sharded"] = "Auto"
    """How moments and float32 copies of narrower weights are stored: ``Whole``, each rank holds those of all its
    weights; ``Sharded``, ranks that hold the same weights divide their update (ZeRO-1). ``Auto``: ``Sharded`` if the
    state of the whole model takes more than 1 GiB."""
    state_memory: Literal["Device", "Host"] = "Device"
    """Where that state is stored. ``Host``: in pinned host memory, copied to the device and back at every step; on CPUs
    it has no effect."""


class Adapters(Part):
    """Low-rank matrices (LoRA) beside the decoder's, trained in their place."""

    rank: Annotated[int, Field(ge=1, le=4096)]
    """With ``Experts`` a multiple of 8."""
    alpha: Coefficient
    """Adapters are scaled by ``alpha / rank``."""
    targets: Annotated[list[Literal["Attention", "Dense", "Experts"]], Field(min_length=1, max_length=3)]
    """Projections that get one: the attention's, those of dense feed-forwards and shared experts, the experts'."""

    @field_validator("alpha")
    @classmethod
    def _adds_something(cls, text: str) -> str:
        if not float(text):
            raise ValueError("alpha is 0, with which adapters add nothing; use a number above 0")
        return text


class Stage(Part):
    """A range of steps that trains other parts, at another rate, with other positions or on other packs.

    A stage that names any of ``learningRate``, ``finalLearningRate``, ``schedule``, ``warmupSteps`` and ``decaySteps``
    has its own schedule over its own steps; one that names none follows the optimizer's schedule of the whole run.
    """

    name: Name
    """Name in records and in the report."""
    steps: Annotated[int, Field(ge=1, le=STEPS_MAX)]
    """Optimizer steps of the stage; those of all stages add up to ``training.steps``."""
    objective: Objective | None = None
    """What the stage optimises; none: ``kind: Supervised``."""
    trains: Annotated[list[ModelPartName], Field(min_length=1, max_length=3)] = Field(
        default_factory=lambda: list(EVERY_PART)
    )
    """Parts to train; the others keep their weights and the optimizer's state bit for bit, a frozen decoder also its
    routing biases."""
    learning_rate: LearningRate | None = None
    """Peak learning rate; none: the optimizer's."""
    final_learning_rate: LearningRate | None = None
    """Learning rate to which a decay falls; none: the optimizer's."""
    schedule: Literal["WSD", "Cosine"] | None = None
    """Shape of the learning rate; none: the optimizer's."""
    warmup_steps: StepCount | None = None
    """First steps of the stage, over which the learning rate rises from zero; none: it begins at its peak."""
    decay_steps: StepCount | None = None
    """Last steps of the stage, over which the learning rate falls; none: 0."""
    rope_theta: Annotated[int, Field(ge=2, le=1_000_000_000)] | None = None
    """Base of the decoder's rotary positions; none: that of the previous stage, or the preset's in the first stage."""
    packs_per_step: PacksPerStep | None = None
    """Packs of a step; none: ``training.packsPerStep``."""
    sequence_tokens: PackTokens | None = None
    """Tokens of one pack; none: ``data.sequenceTokens``. Longer samples are not used in this stage."""
    weights: Annotated[list[SourceWeight], Field(max_length=256)] = Field(default_factory=list)
    """Weights of the sources from the stage's first step on, like a change in ``data.schedule``: sources that are not
    named get weight 0. Empty: the weights do not change."""


class Training(Part):
    """How long and how the model is trained."""

    steps: Annotated[int, Field(ge=1, le=STEPS_MAX)] | None = None
    """Optimizer steps of the whole run; either this or ``epochs`` is given."""
    epochs: Annotated[int, Field(ge=1, le=EPOCHS_MAX)] | None = None
    """Ends the run with the first step after which every sample that fits has been trained on so often, of all
    sources with a weight. The steps are counted when the data are processed."""
    packs_per_step: PacksPerStep
    """Packs of ``data.sequenceTokens`` tokens that all ranks together train on in one step."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the initial weights."""
    precision: Literal["Auto", "float32", "bfloat16"] = "Auto"
    """Type in which the model computes; the router's scores, gradients and the optimizer stay float32. ``Auto``:
    bfloat16 on accelerators, float32 on processors."""
    tf32: bool = False
    """Whether NVIDIA devices round the inputs of float32 matrix products to TF32: several times as fast, with 10 bits
    of mantissa. It changes nothing in bfloat16 or on processors."""
    parameter_sharding: Literal["None", "FSDP2"] = "None"
    """How parameters are stored: ``None``, each rank holds all that it computes with; ``FSDP2``, ranks that would hold
    the same parameters hold rows of them and gather a layer when it runs (torch's ``fully_shard``); gradients and the
    optimizer's state are sharded too. ``FSDP2`` needs AdamW and ``pp: 1``."""
    adapters: Adapters | None = None
    """Adapters, trained while the model and its router biases stay as they are."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """Optimizer, its schedule and its state."""
    stages: Annotated[list[Stage], Field(max_length=STAGES_MAX)] = Field(default_factory=list)
    """Stages of the run, one after the other; empty: all parts are trained at every step."""
    router_bias_rate: Coefficient = "0.001"
    """Change of an expert's routing bias per step, against its load (DeepSeek-V3, section 2.1.2)."""
    capacity_factor: DecimalText | None = None
    """Rows that a rank may send to an expert in a microbatch, relative to an even distribution, such as ``"1.25"``;
    further rows are dropped, and their tokens skip that expert. Buffers then have a fixed size. None: no row is
    dropped. Which rows are dropped depends on layout and microbatches, and so does the result of the training."""
    recompute: Literal["Auto", "None", "Selective", "Full"] = "Auto"
    """What layers recompute in the backward pass to save memory: ``Selective`` norms, activations, keys and values;
    ``Full`` each layer as a whole, with its communication. Losses stay the same, bit for bit. ``Auto``: the planner
    takes the fastest plan that fits the memory; with an Explicit layout, the least recomputation that makes it fit.
    ``Full`` cannot be combined with the schedules ``ZBVZeroBubble`` and ``DualPipeV``."""

    @field_validator("capacity_factor")
    @classmethod
    def _some_capacity(cls, text: str | None) -> str | None:
        if text is not None and not 0 < float(text) <= CAPACITY_FACTOR_MAX:
            raise ValueError(
                f"capacityFactor {text} is outside its range: above 0, at most {CAPACITY_FACTOR_MAX}; "
                "leave it out to drop no rows"
            )
        return text

    @field_validator("parameter_sharding", mode="before")
    @classmethod
    def _rows_of_all_ranks(cls, given: object) -> object:
        if given == "HSDP":
            raise ValueError(
                "rows within a node and copies on the others, is not available; use FSDP2, "
                "whose gathers of experts stay small with a higher ep, or parameterSharding: None with "
                "optimizer.stateSharding: Sharded, which gathers every weight once a step"
            )
        return given

    @model_validator(mode="after")
    def _rows_go_with_it(self) -> "Training":
        if self.parameter_sharding == "None":
            return self
        if self.optimizer.name == "Muon":
            raise ValueError(
                f"parameterSharding {self.parameter_sharding} cannot be combined with optimizer.name Muon, which needs "
                "whole matrices; use AdamW, or parameterSharding: None with optimizer.stateSharding: Sharded"
            )
        if self.optimizer.state_sharding == "Whole":
            raise ValueError(
                f"parameterSharding {self.parameter_sharding} shards the state of the optimizer too, "
                "optimizer.stateSharding is Whole; leave stateSharding out, or use parameterSharding: None"
            )
        return self

    @model_validator(mode="after")
    def _adapters_learn_alone(self) -> "Training":
        if self.adapters is None:
            return self
        if self.parameter_sharding != "None":
            raise ValueError(
                f"adapters cannot be combined with parameterSharding {self.parameter_sharding}, which would gather "
                "the frozen model's rows for each layer; use parameterSharding: None"
            )
        for stage in self.stages:
            if stage.trains != ["Decoder"]:
                raise ValueError(
                    f"stage {stage.name} trains {', '.join(stage.trains)}, with adapters only those of the decoder "
                    "learn; write trains: [Decoder] in every stage, or leave adapters out"
                )
        return self

    @model_validator(mode="after")
    def _one_end(self) -> "Training":
        if (self.steps is None) == (self.epochs is None):
            seen = "neither" if self.steps is None else "both"
            raise ValueError(
                f"exactly one of steps and epochs is given, seen {seen}; set steps, or epochs to end by the data"
            )
        if self.epochs is not None and self.stages:
            raise ValueError(
                f"epochs {self.epochs} cannot be combined with stages, which begin at fixed steps; give steps instead"
            )
        return self

    @model_validator(mode="after")
    def _stages_fill_the_run(self) -> "Training":
        names = [stage.name for stage in self.stages]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages are named {doubled[0]!r}; names are unique")
        scoring = [
            stage for stage in self.stages if stage.objective is not None and stage.objective.kind != "Supervised"
        ]
        if scoring and self.capacity_factor is not None:
            raise ValueError(
                f"capacityFactor {self.capacity_factor} cannot be combined with the objective of stage "
                f"{scoring[0].name!r}: which rows are dropped depends on their neighbours, so scores could not be "
                "compared; leave it out"
            )
        total = sum(stage.steps for stage in self.stages)
        if self.stages and total != self.steps:
            raise ValueError(
                f"steps of stages add up to {total}, steps is {self.steps}; "
                f"change steps to {total}, or those of a stage"
            )
        return self

    @property
    def scored_before(self) -> list[str]:
        """Names of the stages that score all of their pairs before their first step."""
        return [stage.name for stage in self.stages if stage.objective is not None and stage.objective.scores_before]

    @property
    def holds_reference(self) -> bool:
        """Whether a stage compares answers with a copy of the weights in memory."""
        return any(stage.objective is not None and stage.objective.holds_reference for stage in self.stages)

    @property
    def steps_known(self) -> int:
        """Steps, of a training whose steps are known: given, or counted (``with_steps``).

        Raises:
            InvalidConfigError: If they follow from data that are not processed.
        """
        if self.steps is None:
            raise InvalidConfigError(
                f"the number of steps is not known: {self.epochs} epochs are counted when the data are processed",
                field="spec.training.epochs",
            )
        return self.steps

    def with_steps(self, steps: int) -> "Training":
        """Return this training with the steps that were counted for its epochs."""
        return self.model_copy(update={"steps": steps, "epochs": None})
