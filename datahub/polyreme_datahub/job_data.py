"""The part of a job's spec that decides which indexes it trains on; process and loader must agree on it."""

from __future__ import annotations

import dataclasses

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.index.pieces import REFUSE
from polyreme_planner.curriculum import kinds_of_packs
from polyreme_planner.plan import shape_of

IMAGE_SHARE = 2
"""An image from files takes at most one part in so many of a pack's tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageSizes:
    """How a job's images become patches. The operations of its recipe take these values by their names."""

    patch_px: int
    merge: int
    """Patches per token, each way."""
    image_tokens_max: int
    """Most language-model tokens of one image from files; larger images are shrunk."""

    @property
    def token_px(self) -> int:
        """Side of the square that becomes one token [pixels]."""
        return self.patch_px * self.merge

    @classmethod
    def of(cls, spec: TrainingJobSpec) -> ImageSizes:
        """Return those of a job."""
        shape, most = shape_of(spec).vision, max(1, spec.data.sequence_tokens // IMAGE_SHARE)
        return cls(patch_px=shape.patch_px, merge=shape.merge, image_tokens_max=most)

    def given(self) -> dict[str, int]:
        """Return what a recipe leaves out, by the names of parameters."""
        return {**dataclasses.asdict(self), "token_px": self.token_px}


def longest_pack(spec: TrainingJobSpec) -> int:
    """Tokens of the longest pack of any curriculum stage: longer samples have no turn in the whole run."""
    return kinds_of_packs(spec)[0].tokens


def datasets_of(spec: TrainingJobSpec) -> tuple[list[str], list[str]]:
    """Return the references of the datasets that are trained on, and of those that are held out."""
    return (
        [source.dataset for source in spec.data.sources],
        [part.dataset for part in spec.evaluation.sets] if spec.evaluation else [],
    )


def plan_data(spec: TrainingJobSpec) -> dict[str, object]:
    """Return it as a JSON-able value."""
    shape = shape_of(spec).vision
    tokens = longest_pack(spec)
    released = {} if spec.data.tokenizer.location is None else {"tokenizer": spec.data.tokenizer.location}
    longest = {"longest_tokens": tokens} if tokens != spec.data.sequence_tokens else {}
    cut = {} if spec.data.long_samples == REFUSE else {"long_samples": spec.data.long_samples}
    trained, heldout = datasets_of(spec)
    return {
        "sources": trained,
        "evaluation": heldout,
        "sequence_tokens": spec.data.sequence_tokens,
        "vocabulary": spec.data.tokenizer.vocabulary,
        "patch_px": shape.patch_px,
        "merge": shape.merge,
        **({"blocks": True} if spec.data.start_while_processing else {}),
        **longest,
        **cut,
        **released,
    }
