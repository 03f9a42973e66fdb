"""The data of training and evaluation: sources, mixture, packing, tokenizer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyreme_api.fields import (
    STEPS_MAX,
    Coefficient,
    DatasetReference,
    Name,
    Part,
    Probability,
    Seconds,
    Temperature,
    Url,
)

Weight = Annotated[int, Field(ge=0, le=65_536)]
PackTokens = Annotated[int, Field(ge=16, le=1_048_576)]
ColorPercent = Annotated[int, Field(ge=0, le=90)]
SKIP_STEPS_MAX = 10_000
"""Most steps whose samples one change skips: each window of them is packed once, in some 30 ms."""
EPOCHS_MAX = 100_000
"""Most epochs that a source may be limited to."""
SCHEDULE_MAX = 1024
"""Most changes of the weights in a job."""
BUDGET_REQUESTS_MIN, BUDGET_BYTES_MIN = 10, 2**20
"""Least of a budget at the bucket for each process that reads: it can still renew its share, and fetch."""


class Crop(Part):
    """A window of the image, drawn at each visit; it contains all boxes, points and polygons of the image."""

    min_area_percent: Annotated[int, Field(ge=10, le=100)] = 60
    """Smallest window, as a share of the image's area."""
    max_stretch_percent: Annotated[int, Field(ge=0, le=50)] = 0
    """How far the window's shape may differ from the image's, either way; the window is stretched to the image's."""


class Scale(Part):
    """Shrinks the image on its page, at a drawn place; the rest of the page is white."""

    min_percent: Annotated[int, Field(ge=25, le=100)] = 70
    """Smallest size, as a share of each side."""


class Mirror(Part):
    """Mirrors the image left to right, unless the sample's text or the sample itself says that it may not be."""

    probability: Probability = "0.5"
    """Share of the visits."""


class Color(Part):
    """Changes the colors; each by a factor that is drawn between 1 less and 1 plus the percentage."""

    brightness_percent: ColorPercent = 20
    """Brightness, from black."""
    contrast_percent: ColorPercent = 20
    """Contrast, around the middle gray."""
    saturation_percent: ColorPercent = 20
    """Saturation, from the pixel's gray."""


class Augment(Part):
    """Random changes of images, drawn at each visit of a sample; without an operation nothing is changed.

    A draw is a function of ``data.seed``, the sample and the visit. Lengths in tokens never change. Held-out data is
    never augmented.
    """

    crop: Crop | None = None
    """A window of the image."""
    scale: Scale | None = None
    """A smaller image on a white page."""
    mirror: Mirror | None = None
    """Left to right."""
    color: Color | None = None
    """Brightness, contrast, saturation."""


class Source(Part):
    """One dataset of the mixture."""

    name: Name
    """Name of this source within the mixture."""
    dataset: DatasetReference
    """Registered dataset, ``name`` or ``name@version``; names under ``sample/`` come with polyreme."""
    weight: Weight = 1
    """Share, relative to the other sources': of samples, unless ``data.weightsBy`` or ``data.temperature`` is given."""
    epochs_max: Annotated[int, Field(ge=1, le=EPOCHS_MAX)] | None = None
    """Most times that a sample is trained on; none: no limit. After its last epoch a source is never used again, and
    the others share its turns by their weights. A job whose steps need more data than all limits leave is refused."""
    augment: Augment | None = None
    """Augmentation of this source, in place of ``data.augment``; ``{}``: none."""


class SourceWeight(Part):
    """A source's weight from some step on."""

    source: Name
    """Name of a source of the mixture."""
    weight: Weight
    """Share from that step on, as ``weight`` of a source."""


class MixtureChange(Part):
    """New weights from a step on; sources that are not named get weight 0. Samples may be skipped there."""

    from_step: Annotated[int, Field(ge=1, le=STEPS_MAX)]
    """First step with these weights."""
    weights: Annotated[list[SourceWeight], Field(min_length=1, max_length=256)]
    """Weights by source."""
    skip_steps: Annotated[int, Field(ge=0, le=SKIP_STEPS_MAX)] = 0
    """Skips the samples of the next N steps, for example after a loss spike: those that the weights before would have
    drawn. Training continues with the samples that follow."""


class Tokenizer(Part):
    """Byte-level BPE: trained on the datasets' own text, or that of released weights."""

    vocabulary: Annotated[int, Field(ge=300, le=1_000_000)] = 512
    """Largest number of tokens of a tokenizer that is trained, including special tokens; at most the model's."""
    location: Url | None = None
    """URL of a folder with a ``tokenizer.json`` of Hugging Face's and a ``polyreme-template.json``, ``file://`` or
    ``s3://``, in place of training one. A job reads it once, when its data is first processed."""


class OriginBudget(Part):
    """Most that all pods of a job together ask the bucket of their training data for; never exceeded in any second."""

    requests_per_second: Annotated[int, Field(ge=BUDGET_REQUESTS_MIN, le=1_000_000)]
    """Requests a second; at least 10 for each device and each pod, whose processes may all read at once."""
    bytes_per_second: Annotated[int, Field(ge=BUDGET_BYTES_MIN, le=10**13)]
    """Bytes a second; at least 1 MiB for each device and each pod."""


class Data(Part):
    """Training data: a mixture of sources, packed to a fixed token count."""

    sources: Annotated[list[Source], Field(min_length=1, max_length=256)]
    """Datasets of the mixture."""
    weights_by: Literal["Samples", "Tokens"] = "Samples"
    """What the weights are shares of. ``Tokens``: a source with longer samples gets fewer of them; only those that fit
    the packs count."""
    temperature: Temperature | None = None
    """Each weight is multiplied by the size of its source (samples or tokens, see ``weightsBy``) to the power of
    1 / temperature: with ``"1"`` and equal weights every sample is trained on equally often, a higher temperature
    favors small sources; none: the weights alone."""
    schedule: Annotated[list[MixtureChange], Field(max_length=SCHEDULE_MAX)] = Field(default=[])
    """Changes of the weights during the run, in the order of their steps. While the job exists, changes may be
    appended, and none may be changed or removed. New weights of a change that is appended after the first attempt
    has begun apply from the next window of the order (256 packs, in whole steps) after ``fromStep``, at least eight
    steps ahead."""
    sequence_tokens: PackTokens
    """Tokens of one pack; ``longSamples`` says what becomes of longer samples."""
    long_samples: Literal["Refuse", "Truncate", "Split"] = "Refuse"
    """What becomes of a sample that is longer than a pack, the longest one where stages have several. ``Refuse``: it
    is a dead letter. ``Truncate``: its first tokens are trained on. ``Split``: it is cut into pieces, and each is
    trained on like a sample. An image is never cut: a piece ends before one that does not fit. Held-out samples are
    always refused."""
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    """The tokenizer."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of the order of samples, and of their augmentation."""
    augment: Augment | None = None
    """Random changes of images, of all sources without an ``augment`` of their own; none: images are read as they
    are."""
    wait_seconds: Seconds = 600
    """How long ranks wait for the processed data before they give up; with ``start_while_processing``, for each
    block."""
    start_while_processing: bool = False
    """Whether training starts while the datasets are still processed. The first epoch then takes the records in blocks
    of 4,096, in the order of the dataset, and shuffles each block by itself; later epochs shuffle everything. The order
    is the same however fast the data are processed. Needs ``tokenizer.location``."""
    packs_by: Literal["Order", "Cost"] = "Order"
    """How the packs of a step are assigned to data-parallel ranks and microbatches. ``Order``: in the order of the
    samples. ``Cost``: so that the slowest rank has less to do, by the operations of attention and of the images in each
    pack. A step has the same packs with both, and resumes alike; its loss differs in the last bits."""
    origin_budget: OriginBudget | None = None
    """Most requests and bytes a second at the bucket; none: as many as the loaders need. Data in a directory are read
    without limit."""
    on_damage: Literal["Stop", "Placeholder"] = "Stop"
    """What a rank does when it reads a sample whose stored bytes do not match their checksum. ``Stop``: the job fails
    with reason DataDamaged before the step that would have trained on it. ``Placeholder``: padding of the same length
    without targets takes the sample's place, each one is reported, and training continues."""


class EvaluationSet(Part):
    """One held-out dataset."""

    name: Name
    """Name in the report."""
    dataset: DatasetReference
    """Registered dataset; never a source of the mixture."""


class EarlyStop(Part):
    """When a run ends before its last step: its held-out loss, of all sets, no longer falls."""

    patience: Annotated[int, Field(ge=1, le=1000)] = 3
    """Measurements in a row that may fail to lower it; the run ends with the last of them."""
    min_delta: Coefficient = "0"
    """By how much a measurement must be below the lowest one before it to count as lower."""


class Evaluation(Part):
    """Held-out questions, answered by free-running decoding after the last step; their loss can be measured earlier."""

    every_steps: Annotated[int, Field(ge=0, le=STEPS_MAX)] = 0
    """Steps between two measurements of the held-out loss, which is also measured after the last step; 0: never. It is
    the loss of the expected answers of the same samples, and does not affect the training."""
    sets: Annotated[list[EvaluationSet], Field(min_length=1, max_length=64)]
    """Held-out datasets."""
    early_stop: EarlyStop | None = None
    """Ends the run when the held-out loss no longer falls; None: it trains all steps."""
    samples_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Largest number of samples, spread evenly over all sets."""
    answer_tokens_max: Annotated[int, Field(ge=1, le=4096)] = 16
    """Longest answer decoded [tokens]."""
    cache: Literal["Auto", "Int8"] = "Auto"
    """How answers keep the latents of their tokens: in the type of the computation, or in 8 bits."""
    weights: Literal["Auto", "Int4"] = "Auto"
    """Weights that answer: those in training, or copies of the decoder's products in 4 bits. ``Int4`` needs processors
    and whole parameters."""
    thinking_tokens_max: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Tokens after which a thought is ended with ``</think>``; what follows that is the answer. None: no thoughts."""

    @model_validator(mode="after")
    def _losses_for_an_early_stop(self) -> "Evaluation":
        if self.early_stop is not None and not self.every_steps:
            raise ValueError(
                "earlyStop needs the held-out loss during training, everySteps is 0; give the steps between two "
                "measurements"
            )
        return self

    @model_validator(mode="after")
    def _room_for_an_answer(self) -> "Evaluation":
        if self.thinking_tokens_max is not None and self.thinking_tokens_max >= self.answer_tokens_max:
            raise ValueError(
                f"thinkingTokensMax {self.thinking_tokens_max} leaves no token of answerTokensMax "
                f"{self.answer_tokens_max} for the answer; raise answerTokensMax, or lower thinkingTokensMax"
            )
        return self
