"""Measure: how many tokens and patches a sample takes, for one tokenizer and one vision configuration.

A packing plan needs no more than this: it opens no image and reads no text.
"""

from __future__ import annotations

from polyreme_datahub.digests import digest_value
from polyreme_datahub.operations.declare import RECORD, operation
from polyreme_datahub.operations.fit_pages import ComposeParameters, fitting_size
from polyreme_datahub.operations.values import Value
from polyreme_datahub.record_tokens import encode_record
from polyreme_datahub.tokens import open_tokenizer


@operation("measure", 1, inputs=(RECORD, "decode", "tokenizer"), blobs=("tokenizer",), parameters=ComposeParameters)
def measure(record: Value, decoded: Value, tokenizer: Value, parameters: ComposeParameters) -> Value:
    """Count a sample's tokens and patches as compose and tokenize would make them."""
    facts = decoded.data
    if facts["kind"] == "images":
        sizes = [fitting_size(image["width"], image["height"], parameters) for image in facts["images"]]
    else:
        sizes = [(facts["width"], facts["height"])]
    cells = [(height // parameters.token_px) * (width // parameters.token_px) for width, height in sizes]
    grids = [[height // parameters.patch_px, width // parameters.patch_px] for width, height in sizes]
    digest = tokenizer.data["tokenizer"]
    opened = open_tokenizer(digest, tokenizer.blobs[digest].data)
    encoded = encode_record(opened, record.data, {}, sizes, cells)
    return Value.of(
        {
            "tokenizer": digest,
            "vision": vision_digest(parameters),
            "tokens": len(encoded["tokens"]),
            "learned_tokens": sum(stop - start for start, stop in encoded["learned"]),
            "image_tokens": sum(cells),
            "patches": sum(rows * columns for rows, columns in grids),
            "grids": grids,
        }
    )


def vision_digest(parameters: ComposeParameters) -> str:
    """Digest of what decides an image's patches."""
    return digest_value(
        {"patch_px": parameters.patch_px, "merge": parameters.merge, "image_tokens_max": parameters.image_tokens_max}
    )
