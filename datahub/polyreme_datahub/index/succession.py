"""The identity of an index that took the place of one in an older format: the older one's, if both hold the same data.

A checkpoint's loader state names the indexes by digest. An index that was written again in a newer format has another
digest, though its samples and their order are the same; a plan then says which index it replaces, and states stay
valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.lakehouse import Lakehouse

IDENTITIES = "identities"
"""Field of a plan: dataset reference -> digest of the index that its index replaces."""
_SAME = ("version", "tokenizer", "sequence_tokens", "patch_px", "merge", "samples", "tokens")


def identities_after(lakehouse: Lakehouse, before: Mapping[str, Any], manifests: Mapping[str, str]) -> dict[str, str]:
    """Return the identities of new manifests that replace those of a plan; only those that differ from the manifests.

    An older manifest that is lost, or that holds other data, has no successor.

    Raises:
        StoreFailedError: If the store stays away.
    """
    found: dict[str, str] = {}
    for reference, manifest in manifests.items():
        older = before.get("manifests", {}).get(reference)
        if older is None:
            continue
        identity = before.get(IDENTITIES, {}).get(reference, older)
        if identity != manifest and (older == manifest or _same(lakehouse, older, manifest)):
            found[reference] = identity
    return found


def identity_of(plan: Mapping[str, Any], reference: str) -> str:
    """Return the digest by which loader states name the index of a dataset."""
    return str(plan.get(IDENTITIES, {}).get(reference, plan["manifests"][reference]))


def _same(lakehouse: Lakehouse, older: str, newer: str) -> bool:
    try:
        facts = [json.loads(lakehouse.get_blob(digest)) for digest in (older, newer)]
    except (ObjectNotFoundError, IndexDamagedError, ValueError):
        return False
    return all(facts[0].get(name) == facts[1].get(name) for name in _SAME)
