"""Deduplicate: a barrier that drops samples whose images an earlier sample has, exactly or nearly.

Only images are compared: two questions about one image are duplicates here. Samples without images always stay. Near
copies are looked for among samples with one image: their perceptual hashes differ in few bits, and their colors little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.digests import digest_value
from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.duplicates import DISTANCE_MAX, duplicates, exact_duplicates


class Row(Protocol):
    """A sample, with what ``image-hash`` made of it."""

    @property
    def ordinal(self) -> int:
        """Place in the version."""
        ...

    @property
    def sample_id(self) -> str:
        """Its name."""
        ...

    @property
    def inputs(self) -> Any:
        """Data of each input."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeduplicateParameters:
    """What counts as a copy."""

    distance_max: int = 0
    """Most bits, of 64, in which the perceptual hashes of near copies differ; 0: only exact copies are dropped."""

    def __post_init__(self) -> None:
        if not 0 <= self.distance_max <= DISTANCE_MAX:
            raise InvalidConfigError(
                f"distance_max is {self.distance_max}, expected 0 to {DISTANCE_MAX}", field="distance_max"
            )


@operation("deduplicate-images", 2, inputs=("image-hash",), blobs=False, barrier=True, parameters=DeduplicateParameters)
def deduplicate_images(rows: Iterable[Row], parameters: DeduplicateParameters) -> Mapping[int, str]:
    """Name the samples that are dropped, by ordinal, each with its reason; the smallest ordinal stays."""
    names: dict[str, str] = {}
    exact: dict[str, str] = {}
    near: dict[str, int] = {}
    colors: dict[str, bytes] = {}
    for row in rows:
        images = row.inputs[0]["images"]
        if not images:
            continue
        key = f"{row.ordinal:020d}"
        names[key] = row.sample_id
        exact[key] = digest_value([image["exact"] for image in images])
        if len(images) == 1:
            near[key] = int(images[0]["perceptual"], 16)
            colors[key] = bytes.fromhex(images[0]["colors"])
    dropped = {
        key: f"its images are those of {names[first]}"
        for key, first in exact_duplicates(list(exact), list(exact.values())).items()
    }
    if parameters.distance_max:
        found = duplicates(
            list(near), list(near.values()), distance_max=parameters.distance_max, colors=list(colors.values())
        )
        reason = f"its image is within {parameters.distance_max} bits, and in color, of that of "
        dropped = {key: reason + names[first] for key, first in found.items()} | dropped
    return {int(key): reason for key, reason in sorted(dropped.items())}
