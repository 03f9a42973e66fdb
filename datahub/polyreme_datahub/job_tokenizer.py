"""The tokenizer of a job: a released one as it is read, or one that is trained on the texts of its datasets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.digests import action_key, action_prefix, digest_bytes, digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.damage import drop_notes
from polyreme_datahub.index.sample_bytes import texts_of
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rows import Action
from polyreme_datahub.released_tokenizer import read_released
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_run import read_whole
from polyreme_datahub.tokens import OPERATION, VERSION, train_tokenizer

CORPUS_RECORDS_MAX = 200_000
"""Records of one version that the tokenizer is trained on."""
CORPUS_PAGE = 256


def released_tokenizer(lakehouse: Lakehouse, location: str, *, embedded: int) -> str:
    """Store a released tokenizer as it is now; return its digest.

    Args:
        lakehouse: Takes the file.
        location: Where it lies.
        embedded: Rows of the model's embedding.
    """
    digest = lakehouse.put_blob(read_released(location, embedded=embedded))
    drop_notes(lakehouse.store, digest)
    return digest


def trained_tokenizer(context: RunContext, flow: Flow, trained: Sequence[DatasetVersion], vocabulary: int) -> str:
    """Return the digest of the tokenizer that is trained on some versions, whose records a flow has read."""
    prefix = action_prefix(OPERATION, VERSION, {"vocabulary": vocabulary, "records_max": CORPUS_RECORDS_MAX})
    source = digest_value(sorted({version.digest for version in trained}))
    key = action_key(prefix, source)
    known = results.outputs_of(context.database, [key]).get(key)
    if known is not None and is_stored(context.lakehouse, known.digest):
        return known.digest
    data = train_tokenizer(_corpus(context, flow, trained), vocabulary=vocabulary)
    context.lakehouse.put_blob(data)
    action = Action(key=key, operation=OPERATION, inputs=(source,), output=digest_bytes(data))
    digest = results.put_action(context.database, action).digest
    drop_notes(context.lakehouse.store, digest)
    return digest


def is_stored(lakehouse: Lakehouse, digest: str) -> bool:
    """Tell whether a blob is stored and whole."""
    try:
        lakehouse.get_blob(digest)
    except (ObjectNotFoundError, IndexDamagedError):
        return False
    return True


def _corpus(context: RunContext, flow: Flow, trained: Sequence[DatasetVersion]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for version in {version.id: version for version in trained}.values():
        for first in range(0, min(version.records, CORPUS_RECORDS_MAX), CORPUS_PAGE):
            read = partial(_records, context, version, first)
            for record in read_whole(context, flow, (version, first, CORPUS_PAGE), read):
                counts.update(texts_of(json.loads(record)))
    return counts


def _records(context: RunContext, version: DatasetVersion, first: int) -> list[bytes]:
    rows = results.samples_between(context.database, version.id, first=first, count=CORPUS_PAGE)
    places = results.places_of(context.database, {row.record for row in rows})
    return list(context.lakehouse.get_parts(places).values())
