"""What is trained: a model preset, changed sizes, precision, the optimizer and its schedule."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from polyreme_api.fields import STEPS_MAX, DecimalText, Part, Url

CAPACITY_FACTOR_MAX = 1000
Sizes = Annotated[dict[str, Annotated[int, Field(ge=0, le=10_000_000)]], Field(max_length=32)]


class ModelOverrides(Part):
    """Sizes that differ from the preset's, by the names of ``polyreme_api.plan.shapes``."""

    vision: Sizes = Field(default_factory=dict)
    """Sizes of the vision tower, as ``{layers: 4}``."""
    decoder: Sizes = Field(default_factory=dict)
    """Sizes of the decoder, as ``{experts: 16}``."""


class Weights(Part):
    """Weights that the run starts from instead of drawn ones; an attempt that has a checkpoint does not read them."""

    format: Literal["HuggingFace"] = "HuggingFace"
    """Names and files by Hugging Face's conventions: safetensors, an index where there are several, ``config.json``."""
    location: Url
    """URL of the folder; every rank reads it. Kimi-VL's names fill the whole model, DeepSeek-V3's its decoder."""


class ModelPart(Part):
    """The model to train."""

    preset: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of a model preset: ``kimi-vl-nano``, ``kimi-vl-a3b``, ``moonlight-16b-a3b``."""
    overrides: ModelOverrides = Field(default_factory=ModelOverrides)
    """Sizes that differ from the preset's."""
    weights: Weights | None = None
    """Weights that the run starts from; none: drawn by ``training.seed``."""


class Optimizer(Part):
    """Optimizer, learning-rate schedule, and where the optimizer's state lies."""

    name: Literal["AdamW", "Muon"] = "AdamW"
    """``Muon`` updates the matrices of layers and experts; embedding, head, router and all vectors are AdamW's."""
    learning_rate: DecimalText = "1e-3"
    """Peak learning rate."""
    final_learning_rate: DecimalText = "0"
    """Learning rate to which a decay falls."""
    schedule: Literal["WSD", "Cosine"] = "WSD"
    """Shape of the learning rate behind its warm-up: ``WSD`` stays, then falls on a line over ``decaySteps`` (with 0 it
    is constant); ``Cosine`` falls on half a cosine, over ``decaySteps`` or, with 0, all steps behind the warm-up."""
    beta1: DecimalText = "0.9"
    """Decay of AdamW's first moment."""
    beta2: DecimalText = "0.98"
    """Decay of AdamW's second moment."""
    momentum: DecimalText = "0.95"
    """Decay of Muon's momentum."""
    epsilon: DecimalText = "1e-8"
    """Added to the root of the second moment."""
    weight_decay: DecimalText = "0.05"
    """Decoupled weight decay, on matrices only."""
    clip_norm: DecimalText = "1.0"
    """Largest global norm of the gradient; ``"0"`` clips nothing."""
    warmup_steps: Annotated[int, Field(ge=0, le=STEPS_MAX)] = 0
    """Steps over which the learning rate rises from zero."""
    decay_steps: Annotated[int, Field(ge=0, le=STEPS_MAX)] = 0
    """Last steps of the run, over which the learning rate falls to ``finalLearningRate``."""
    state_sharding: Literal["Auto", "Whole", "Sharded"] = "Auto"
    """Who holds moments, and float32 weights beside narrower ones: ``Whole``, every rank those of all its weights;
    ``Sharded``, ranks that hold the same weights divide their update (ZeRO-1). ``Auto``: ``Sharded`` where the state of
    the whole model takes more than 1 GiB."""
    state_memory: Literal["Device", "Host"] = "Device"
    """Where that state lies. ``Host``: in pinned memory of the host, copied to the device and back at every step; on
    processors there is no other memory, and it changes nothing."""


class Training(Part):
    """How long and how the model is trained."""

    steps: Annotated[int, Field(ge=1, le=STEPS_MAX)]
    """Optimizer steps of the whole run."""
    packs_per_step: Annotated[int, Field(ge=1, le=1_000_000)]
    """Packs of ``data.sequenceTokens`` tokens that all ranks together train on in one step."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the initial weights."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type in which the model computes; the router's scores, gradients and the optimizer stay float32."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """Optimizer, its schedule and its state."""
    router_bias_rate: DecimalText = "0.001"
    """Change of an expert's routing bias a step, against its load (DeepSeek-V3, section 2.1.2)."""
    capacity_factor: DecimalText | None = None
    """Rows that a rank may send to an expert in a microbatch, in shares of what each would get if all got as many, as
    ``"1.25"``; the first ones go, the others are dropped: those tokens lack that expert. Buffers are then of one size.
    None: no row is dropped. What is dropped hangs on layout and microbatches, and so does what is learned."""
    recompute: Literal["None", "Selective", "Full"] = "None"
    """What layers make anew in the backward pass, so as not to hold it: ``Selective`` norms, activations, keys and
    values; ``Full`` each layer as a whole, with its exchanges. Losses stay the same, bit for bit. ``Full`` does not go
    with the schedules ``ZBVZeroBubble`` and ``DualPipeV``."""

    @field_validator("capacity_factor")
    @classmethod
    def _some_capacity(cls, text: str | None) -> str | None:
        if text is not None and not 0 < float(text) <= CAPACITY_FACTOR_MAX:
            raise ValueError(
                f"capacityFactor {text} lies outside its range: above 0, at most {CAPACITY_FACTOR_MAX}; "
                "leave it out to drop nothing"
            )
        return text
