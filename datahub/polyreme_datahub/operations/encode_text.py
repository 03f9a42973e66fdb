"""Tokenize: pages and conversation -> token ids, which of them are learned, and where the last answer begins.

A mark such as ``<box:0>`` is written as coordinates first (``index.shapes``).
"""

from __future__ import annotations

import dataclasses

from polyreme_datahub.index.sample_bytes import check_of
from polyreme_datahub.index.shapes import shapes_of
from polyreme_datahub.operations.declare import RECORD, operation
from polyreme_datahub.operations.values import Value
from polyreme_datahub.record_tokens import encode_record
from polyreme_datahub.tokens import open_tokenizer, token_arrays


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeParameters:
    """What one media token covers."""

    token_px: int
    """Side of the square that becomes one token [pixels]."""


@operation(
    "tokenize",
    5,
    inputs=(RECORD, "compose", "tokenizer"),
    blobs=("tokenizer",),
    parameters=TokenizeParameters,
    gives="tokens",
)
def tokenize(record: Value, composed: Value, tokenizer: Value, parameters: TokenizeParameters) -> Value:
    """Encode a sample's conversation around its images, and note how many tokens it has, and their checksum.

    The tokens are not kept: a rank encodes them again when it needs the sample.

    The value of ``tokenizer`` is the same for all samples: ``{"tokenizer": digest of its file}``, with that blob.
    """
    side = parameters.token_px
    cells = [(page["height"] // side) * (page["width"] // side) for page in composed.data["pages"]]
    digest = tokenizer.data["tokenizer"]
    opened = open_tokenizer(digest, tokenizer.blobs[digest].data)
    sizes = [(page["width"], page["height"]) for page in composed.data["pages"]]
    encoded = encode_record(opened, record.data, shapes_of(composed.data), sizes, cells)
    tokens_T, learned_T = token_arrays(encoded)
    return Value.of(
        {
            "tokens": len(tokens_T),
            "check": check_of(tokens_T, learned_T),
            **{name: encoded[name] for name in ("prompt", "question", "expected")},
        }
    )
