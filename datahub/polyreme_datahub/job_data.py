"""The part of a job's spec that decides which indexes it trains on; process and loader must agree on it."""

from __future__ import annotations

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.index.pieces import REFUSE
from polyreme_planner.curriculum import kinds_of_packs
from polyreme_planner.plan import shape_of


def longest_pack(spec: TrainingJobSpec) -> int:
    """Tokens of the longest pack of any stage: longer samples have no turn in the whole run."""
    return kinds_of_packs(spec)[0].tokens


def plan_data(spec: TrainingJobSpec) -> dict[str, object]:
    """Return it as a JSON-able value."""
    shape = shape_of(spec).vision
    tokens = longest_pack(spec)
    released = {} if spec.data.tokenizer.location is None else {"tokenizer": spec.data.tokenizer.location}
    longest = {"longest_tokens": tokens} if tokens != spec.data.sequence_tokens else {}
    cut = {} if spec.data.long_samples == REFUSE else {"long_samples": spec.data.long_samples}
    return {
        "sources": [source.dataset for source in spec.data.sources],
        "evaluation": [part.dataset for part in spec.evaluation.sets] if spec.evaluation else [],
        "sequence_tokens": spec.data.sequence_tokens,
        "vocabulary": spec.data.tokenizer.vocabulary,
        "patch_px": shape.patch_px,
        "merge": shape.merge,
        **({"blocks": True} if spec.data.start_while_processing else {}),
        **longest,
        **cut,
        **released,
    }
