"""The plan object of a job's data: which indexes, versions and tokenizer its ranks read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_api.store import ObjectExistsError, ObjectNotFoundError
from polyreme_datahub.digests import canonical_json
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.blocks import BLOCKS, Sizes
from polyreme_datahub.index.format import (
    NEWEST,
    OLDEST,
    ORDER,
    PIXELS,
    STEPS,
    order_of,
    parse_plan,
    pixels_of,
    seal_plan,
)
from polyreme_datahub.index.succession import IDENTITIES, identities_after
from polyreme_datahub.lakehouse import Lakehouse


@dataclasses.dataclass(kw_only=True)
class JobPlan:
    """What a plan says, as it becomes known."""

    references: Mapping[str, str]
    """Version of each dataset reference."""
    tokenizer: str
    """Digest."""
    manifests: dict[str, str] = dataclasses.field(default_factory=dict)
    """Digest of the index of each dataset reference."""
    identities: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of indexes in loader states, where they are not the manifests' digests."""
    blocks: Mapping[str, Sizes] | None = None
    made: Mapping[str, int] = dataclasses.field(default_factory=lambda: NEWEST)
    """How images become pixels, and how samples are ordered, in a job that begins."""

    def content(self, lakehouse: Lakehouse, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object, after the plan that the job had before."""
        # A job that has begun keeps its pixels and its order.
        made = {PIXELS: pixels_of(before), ORDER: order_of(before)} if before else self.made
        identities = {**identities_after(lakehouse, before, self.manifests), **self.identities}
        blocks = None if self.blocks is None else {name: sizes.to_value() for name, sizes in self.blocks.items()}
        return {
            "references": dict(self.references),
            "manifests": dict(self.manifests),
            "tokenizer": self.tokenizer,
            **{field: version for field, version in made.items() if version != OLDEST[field]},
            **({IDENTITIES: identities} if identities else {}),
            **({} if blocks is None else {BLOCKS: blocks}),
            **({STEPS: before[STEPS]} if STEPS in before else {}),
        }


def read_plan(lakehouse: Lakehouse, key: str) -> Mapping[str, Any]:
    """Return the plan under a key, or nothing where there is none yet, or a damaged one."""
    try:
        return parse_plan(lakehouse.store.get(key), key)
    except (ObjectNotFoundError, IndexDamagedError):
        return {}


def put_steps(lakehouse: Lakehouse, key: str, epochs: int, steps: int) -> None:
    """Add to a plan the steps that were counted for epochs; what it says of others stays."""
    plan = read_plan(lakehouse, key)
    content = {**plan, STEPS: {**plan.get(STEPS, {}), str(epochs): steps}}
    lakehouse.store.put(key, canonical_json(seal_plan(content)))


def put_plan(lakehouse: Lakehouse, key: str, plan: JobPlan, *, pinned: bool) -> None:
    """Write a plan.

    Args:
        lakehouse: Where it is written.
        key: Its key.
        plan: The plan.
        pinned: Whether it is one job's: another run over the same job writes the same bytes.
    """
    before, store = read_plan(lakehouse, key), lakehouse.store
    if not pinned:
        # Counted for another job under the same key, it may be of another mixture.
        before = {field: value for field, value in before.items() if field != STEPS}
    data = canonical_json(seal_plan(plan.content(lakehouse, before)))
    if not pinned or before.get("manifests", plan.manifests) != plan.manifests:
        store.put(key, data)
        return
    try:
        store.put_if_absent(key, data)
    except ObjectExistsError:
        if not read_plan(lakehouse, key):
            store.put(key, data)
