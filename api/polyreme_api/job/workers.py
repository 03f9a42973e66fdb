"""Workers of a job: pods, their places in the network, the parallel layout, checkpoints, export."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from polyreme_api.fields import (
    DEVICES_MAX,
    REPLICAS_MAX,
    SECONDS_MAX,
    STEPS_MAX,
    CheckpointUrl,
    Name,
    Part,
    Seconds,
    Url,
)
from polyreme_api.labels import RESOURCE_DEVICE
from polyreme_api.pod_template import FORMAT, check_pod_template

Degree = Annotated[int, Field(ge=1, le=1_000_000)]
STAGES_MEET = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which a rank holds a stage and its mirror image; a test holds them to those of the planner."""
STAGES_MAX = 512
"""Stages of a pipeline whose layers a job may name."""
StageLayers = Annotated[list[Annotated[int, Field(ge=0, le=10_000)]], Field(min_length=2, max_length=STAGES_MAX)]
PodTemplate = Annotated[dict[str, Any], AfterValidator(check_pod_template), Field(json_schema_extra={"format": FORMAT})]
LevelName = Annotated[str, Field(min_length=1, max_length=63)]


class Runtime(Part):
    """Who starts the ranks in a worker pod."""

    mode: Literal["Launcher", "Environment"] = "Launcher"
    """``Launcher``: the template's first container runs polyreme's launcher, which runs the training that the job
    describes.
    ``Environment``: any framework's container (torchrun, Megatron, DeepSpeed) that reads rank, world size and address
    from its environment; ``model``, ``data`` and ``training`` may be left out and are ignored."""


class Workers(Part):
    """The gang: ``replicas`` pods with ``devices`` ranks each."""

    replicas: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 1
    """Worker pods; may change while the job runs or waits."""
    min_replicas: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] | None = None
    """Smallest number of pods that the job may shrink to; none: it never shrinks."""
    max_replicas: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] | None = None
    """Largest number of pods that the job may grow to; none: it never grows."""
    devices: Annotated[int, Field(ge=1, le=DEVICES_MAX)] = 1
    """Devices, and so ranks, of each pod."""
    device_resource: Annotated[str, Field(min_length=1, max_length=253)] = RESOURCE_DEVICE
    """Resource that counts the devices of a node, such as ``nvidia.com/gpu``."""
    hardware: Literal["cpu", "a100-80g", "h20-96g", "h100-80g", "h200-141g", "b200-180g", "mi300x-192g"] | None = None
    """Kind of device that the plan is made for, by memory and speed; a rank on another kind refuses the plan. None:
    ``cpu`` where ``deviceResource`` is ``polyreme.dev/device``, else ``h100-80g``. A rank of ``cpu`` has 4 GiB, or its
    share of the memory limit of the template's first container."""
    runtime: Runtime = Field(default_factory=Runtime)
    """Who starts the ranks in a worker pod."""
    template: PodTemplate = Field(default_factory=dict)
    """Pod template (``core/v1`` PodTemplateSpec); the first container runs the launcher or the ranks. Fields that
    Kubernetes knows must have its types; others are passed on, and named by the condition ``TemplateFieldsUnknown``."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "Workers":
        low, high = self.min_replicas or 1, self.max_replicas or REPLICAS_MAX
        if not low <= self.replicas <= high:
            raise ValueError(
                f"replicas {self.replicas} is outside minReplicas..maxReplicas ({low}..{high}); "
                "change replicas or the bounds"
            )
        return self


class Topology(Part):
    """How near to each other the pods must be, in the terms of Kueue's topology-aware scheduling.

    A level is named as in the ClusterTopology ``default`` (such as zone, block, rack); the level ``host`` always exists
    below them. A domain is all nodes that share their labels down to that level: one rack, one block. Without any of
    these fields the pods are still placed as near to each other as possible.
    """

    required: LevelName | None = None
    """Level, such as ``rack``: one domain of this level must hold the whole gang; the job waits until one has room."""
    preferred: LevelName | None = None
    """Level: one domain of this level should hold the whole gang; if none can, the next wider level is used."""
    slice_size: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] | None = None
    """Number of consecutive pods that must be in one domain of ``sliceLevel``, such as 8 in one NVLink domain."""
    slice_level: LevelName | None = None
    """Level: one domain of this level must hold each slice; set together with ``sliceSize``."""
    exclusive: LevelName | None = None
    """Level whose domains the job shares with no other job, such as ``rack``."""

    @model_validator(mode="after")
    def _rules(self) -> "Topology":
        if self.required and self.preferred:
            raise ValueError("required and preferred cannot both be set; drop one")
        if (self.slice_size is None) != (self.slice_level is None):
            raise ValueError("sliceSize and sliceLevel must be set together; set both or none")
        return self


class Parallelism(Part):
    """The parallel layout: chosen by the planner, or given."""

    mode: Literal["Auto", "Explicit"] = "Auto"
    """``Auto``: the planner chooses; ``Explicit``: the degrees below."""
    dp: Degree | None = None
    """Data-parallel degree. Where it does not divide ``packsPerStep``, null packs, from which nothing is learned, fill
    the last places; each of its ranks needs at least one pack that is not null."""
    ep: Degree | None = None
    """Expert-parallel degree; divides dp x cp x tp."""
    pp: Degree | None = None
    """Pipeline-parallel degree: ranks among which the layers are split."""
    cp: Degree | None = None
    """Context-parallel degree."""
    tp: Degree | None = None
    """Tensor-parallel degree."""
    schedule: Literal["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"] | None = None
    """Pipeline schedule; needs pp of at least 2, where the default is ``1F1B``. ``1F1B`` has one stage per rank, the
    others two, ``Interleaved1F1B`` more if ``stageLayers`` names more; ``ZBVZeroBubble`` and ``DualPipeV`` put the
    first and the last stage on the same rank."""
    microbatches: Degree | None = None
    """Parts of a data-parallel rank's packs that run one after the other, each of whole packs; they must divide the
    packs of such a rank. ``1F1B`` and ``Interleaved1F1B`` need at least pp of them, the others 2 x pp. None: with a
    pipeline as many as fit, else 1. A gang of another size keeps the packs per microbatch and runs more or fewer
    microbatches."""
    stage_layers: StageLayers | None = None
    """Decoder layers of each stage of a pipeline, in the order of the stages, as ``polyreme plan`` prints them; they
    add up to the model's. Only the first stage, with the tower, and the last, with the head, may have none. None: split
    so that ranks have equal work by operations. A gang of another size keeps them."""
    images_over: Literal["Context", "Data"] = "Context"
    """Ranks that share the encoding of a microbatch's images, balanced by cost: ``Context``, the ranks of one
    context-parallel group; ``Data``, also neighbouring data-parallel ranks, up to eight ranks in all: a rank with few
    images encodes images of one with many, if that makes the slowest at least 2 % faster and saves more than the
    exchange costs.
    Losses differ in their last bits."""

    @model_validator(mode="after")
    def _by_mode(self) -> "Parallelism":
        names = ("dp", "ep", "pp", "cp", "tp", "schedule", "microbatches", "stageLayers")
        of_names = (self.dp, self.ep, self.pp, self.cp, self.tp, self.schedule, self.microbatches, self.stage_layers)
        given = [name for name, value in zip(names, of_names, strict=True) if value is not None]
        if self.mode == "Auto" and given:
            raise ValueError(f"mode Auto chooses the degrees itself, {given[0]} is set; use mode: Explicit or drop it")
        if self.mode == "Explicit" and self.dp is None:
            raise ValueError("mode Explicit needs dp; the other degrees default to 1")
        return self

    @model_validator(mode="after")
    def _pipeline(self) -> "Parallelism":
        ranks = self.pp or 1
        if ranks == 1 and self.schedule is not None:
            raise ValueError(
                f"schedule {self.schedule} needs pp of at least 2, seen {ranks}; raise pp or drop schedule"
            )
        if ranks == 1 or self.microbatches is None:
            return self
        schedule, count = self.schedule or "1F1B", self.microbatches
        least = 2 * ranks if schedule in STAGES_MEET else ranks
        if count < least:
            raise ValueError(
                f"schedule {schedule} over pp {ranks} needs at least {least} microbatches, seen {count}; "
                f"raise microbatches to {least} or more"
            )
        if schedule == "Interleaved1F1B" and count % (count // ranks):
            rounds = count // ranks
            raise ValueError(
                f"schedule Interleaved1F1B over pp {ranks} runs {count} microbatches in {rounds} equal rounds; "
                f"set microbatches to {count - count % rounds} or {count - count % ranks + ranks}"
            )
        return self

    @model_validator(mode="after")
    def _stages(self) -> "Parallelism":
        ranks, layers, schedule = self.pp or 1, self.stage_layers, self.schedule or "1F1B"
        if layers is None:
            return self
        if ranks == 1:
            raise ValueError("stageLayers needs pp of at least 2, seen 1; raise pp or drop stageLayers")
        stages = ranks if schedule == "1F1B" else 2 * ranks
        more = schedule == "Interleaved1F1B" and len(layers) > ranks and len(layers) % ranks == 0
        if len(layers) != stages and not more:
            raise ValueError(
                f"schedule {schedule} over pp {ranks} has {stages} stages, stageLayers has {len(layers)} numbers; give "
                "one for each stage"
            )
        if 0 in layers[1:-1]:
            raise ValueError(
                f"stageLayers {layers} leaves a stage between the first and the last without a layer; give each of "
                "them at least 1"
            )
        return self


EVERY_STEPS, KEEP = 100, 3
"""Default of ``checkpoint.everySteps`` and ``checkpoint.keep``."""


class Checkpoint(Part):
    """When and where the state of training is saved."""

    location: Url | None = None
    """URL of the checkpoint root, ``file://`` or ``s3://``; the default is the run's own folder."""
    every_steps: Annotated[int, Field(ge=1, le=STEPS_MAX)] = EVERY_STEPS
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=1000)] = KEEP
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, Field(ge=0, le=1000)] = 0
    """Also keep so many with the lowest held-out loss."""
    max_age_seconds: Annotated[int, Field(ge=1, le=SECONDS_MAX)] | None = None
    """Age beyond which a checkpoint is deleted although it is among those; the newest is always kept."""
    preemption_grace_seconds: Seconds = 60
    """How long a stopped or preempted job may take to save a checkpoint before it is killed."""


class StartFrom(Part):
    """A checkpoint of another run to begin with."""

    checkpoint: CheckpointUrl
    """URL of the checkpoint: its root and its name, as ``s3://bucket/run-7/a000001-s00000180``."""


class Export(Part):
    """What is written after the last step."""

    format: Literal["HuggingFace"] = "HuggingFace"
    """Names and files by Hugging Face's conventions: sharded safetensors and config.json."""
    adapters: Literal["Merged", "Alone"] = "Merged"
    """``Alone``: those of ``training.adapters`` in PEFT's form, without the model."""
    location: Url | None = None
    """URL of the folder, ``file://`` or ``s3://``; the default is the run's own, on a cluster ``export`` beside the
    checkpoints."""


class Scheduling(Part):
    """How the job waits and whom it may displace."""

    queue_name: Name = "default"
    """TrainingQueue that the job waits in."""
    priority_class_name: Annotated[str, Field(max_length=253)] = ""
    """PriorityClass of the job and of its pods, unless their template names another; empty: ``priority`` applies."""
    priority: Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000)] = 0
    """Jobs with a larger value go first. 0: the value of the PriorityClass with ``globalDefault``, if there is one."""
    preemption_policy: Literal["PreemptLowerPriority", "Never"] = "PreemptLowerPriority"
    """Whether the job may preempt jobs of lower priority."""
    min_runtime_seconds: Seconds = 0
    """How long the job runs, once started, before it may be preempted."""
    accept_probation: bool = False
    """Whether workers may be placed on nodes that must prove themselves after a fault: these are free sooner, and fail
    more often. See ``probation`` of the NodeFaultPolicy."""
