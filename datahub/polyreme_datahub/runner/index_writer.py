"""Writes the training index: shards of what packing needs, beside tar files with the encoded bytes of the samples.

Samples that are longer than a pack are dead letters here, or cut into pieces.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from polyreme_datahub.digests import action_key, canonical_json, digest_value
from polyreme_datahub.index.blocks import shards_of
from polyreme_datahub.index.check import has_shards
from polyreme_datahub.index.format import PREFERENCES, Manifest, Shard
from polyreme_datahub.index.pieces import REFUSE, Piece, pieces_of
from polyreme_datahub.index.sample_bytes import REJECTED, check_of
from polyreme_datahub.index.shapes import shapes_of
from polyreme_datahub.index.write import IndexedSample, write_shards
from polyreme_datahub.job_data import ImageSizes
from polyreme_datahub.record_tokens import encode_record
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rows import IndexRow, Letter, OperationCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_run import read_whole
from polyreme_datahub.runner.inputs import Inputs
from polyreme_datahub.runner.sealing import Group
from polyreme_datahub.runner.walk import PAGE, Walk, Walked
from polyreme_datahub.sources.open import holds_preferences
from polyreme_datahub.tokens import TextTokenizer, token_arrays

INDEX = "index"
VERSION = 4
EARLIER_WAY = "raise data.sequenceTokens"
"""End of the error in letters of earlier releases, whose keys do not name their index."""
IMAGES_PAGE = 32
"""Samples whose encoded images are in memory at once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexParameters:
    """What an index is made with."""

    images: ImageSizes
    tokenizer: str
    """Digest of ``tokenizer.json``."""
    sequence_tokens: int
    long_samples: str = REFUSE
    """What becomes of samples that are longer, as ``spec.data.longSamples``."""
    recipe: str = ""
    """Digest of the recipe; empty: the one that ships, whose keys have none."""

    def key(self, version: DatasetVersion) -> str:
        """Key of a version's index."""
        parameters = self.to_value()
        if self.long_samples == REFUSE:
            # As it was before there was another policy.
            del parameters["long_samples"]
        return digest_value([INDEX, VERSION, version.digest, version.reference, parameters])

    def to_value(self) -> dict[str, Any]:
        """Return them as a JSON-able value."""
        value = dataclasses.asdict(self)
        return value if self.recipe else {name: of for name, of in value.items() if name != "recipe"}

    def letter_key(self, version: DatasetVersion, ordinal: int) -> str:
        """Key of the dead letter of a sample that does not enter this index."""
        return digest_value([self.key(version), ordinal])

    def is_own(self, version: DatasetVersion, letter: Letter) -> bool:
        """Tell whether a dead letter is of this index, and not of one with longer or shorter packs."""
        if letter.key == self.letter_key(version, letter.ordinal):
            return True
        before = f"expected at most {self.sequence_tokens}; {EARLIER_WAY}"
        return self.long_samples == REFUSE and letter.error.endswith(before)


@dataclasses.dataclass(slots=True)
class _Seen:
    """What one pass over an item's samples found."""

    letters: list[Letter] = dataclasses.field(default_factory=list)
    inputs: list[list[str]] = dataclasses.field(default_factory=list)
    """Of each sample what enters the index."""
    samples: int = 0
    """Those in the index; one that was cut is one."""


class IndexWriter:
    """Writes groups of shards of a training index.

    Args:
        context: What work needs of its process.
        flow: The flow whose outputs enter the index: one of its steps gives pages, one gives tokens.
        parameters: Parameters of the index.
        tokenizer: The tokenizer.
    """

    operation = INDEX

    def __init__(self, context: RunContext, flow: Flow, parameters: IndexParameters, tokenizer: TextTokenizer) -> None:
        self._context, self._flow, self._lakehouse = context, flow, context.lakehouse
        self.parameters, self._tokenizer = parameters, tokenizer
        self._pages, self._tokens = flow.recipe.giving("pages"), flow.recipe.giving("tokens")
        self._walk = Walk(context.database, context.lakehouse, constants=flow.recipe.constants)
        self._inputs = Inputs(context.database, context.lakehouse, constants=flow.recipe.constants)

    def name(self, version: DatasetVersion) -> str:
        """Return the name under which the items of a version's groups are leased."""
        return self.parameters.key(version)

    def key(self, version: DatasetVersion, item: WorkItem, walked: Iterable[Walked]) -> str:
        """Return the key of the group of the samples that came through."""
        return self._key(version, item, [self._inputs_of(one) for one in walked])

    def write(self, version: DatasetVersion, item: WorkItem) -> Group:
        """Write a group."""
        seen = _Seen()
        samples = self._samples(version, item, seen)
        shards, tokens = write_shards(self._lakehouse, samples, patch_px=self.parameters.images.patch_px)
        content = {
            "shards": [dataclasses.asdict(shard) for shard in shards],
            "samples": sum(shard.count for shard in shards),
            "tokens": tokens,
        }
        group = canonical_json(content)
        digest = self._lakehouse.put_blob(group)
        return Group(
            key=self._key(version, item, seen.inputs),
            digest=digest,
            count=OperationCount(operation=INDEX, misses=seen.samples, dead=len(seen.letters)),
            letters=seen.letters,
            blobs={
                digest: len(group),
                **{shard.digest: shard.size_bytes for shard in shards},
                **{stored.digest: stored.size_bytes for shard in shards for stored in shard.samples},
            },
        )

    def is_whole(self, group: bytes, *, every_byte: bool) -> bool:
        """Tell whether the shards that a group lists are stored."""
        return has_shards(self._lakehouse.store, shards_of(group), every_byte=every_byte)

    def join(self, version: DatasetVersion, groups: Sequence[str]) -> IndexRow:
        """Store the manifest of a version's groups; return the index."""
        shards: list[Shard] = []
        samples = tokens = 0
        for digest in groups:
            group = json.loads(self._lakehouse.get_blob(digest))
            shards += [Shard.from_value(value) for value in group["shards"]]
            samples, tokens = samples + group["samples"], tokens + group["tokens"]
        digest = self._lakehouse.put_blob(self.manifest(version, shards, samples=samples, tokens=tokens).to_bytes())
        key = self.parameters.key(version)
        return IndexRow(key=key, version_id=version.id, manifest=digest, samples=samples, tokens=tokens)

    def manifest(
        self, version: DatasetVersion, shards: Sequence[Shard] = (), *, samples: int = 0, tokens: int = 0
    ) -> Manifest:
        """Return the manifest of some shards of a version's index."""
        form, parameters = self._tokenizer.format, self.parameters
        return Manifest(
            version=version.digest,
            name=version.name,
            number=version.number,
            tokenizer=parameters.tokenizer,
            vocabulary=self._tokenizer.size,
            token_ids={"media": form.media, "end": form.end, "pad": form.pad},
            patch_px=parameters.images.patch_px,
            merge=parameters.images.merge,
            sequence_tokens=parameters.sequence_tokens,
            samples=samples,
            tokens=tokens,
            shards=tuple(shards),
            kind=PREFERENCES if holds_preferences(version.source) else "",
        )

    def _key(self, version: DatasetVersion, item: WorkItem, inputs: Sequence[Sequence[str]]) -> str:
        return action_key(self.parameters.key(version), digest_value([item.first, list(map(list, inputs))]))

    def _samples(self, version: DatasetVersion, item: WorkItem, seen: _Seen) -> Iterator[IndexedSample]:
        stop = item.first + item.count
        for start in range(item.first, stop, PAGE):
            ordinals = (version, start, min(PAGE, stop - start))
            page = read_whole(self._context, self._flow, ordinals, partial(self._page, *ordinals))
            for at in range(0, len(page), IMAGES_PAGE):
                some = page[at : at + IMAGES_PAGE]
                wanted = self._wanted(some)
                parts = read_whole(self._context, self._flow, ordinals, partial(self._inputs.parts, wanted))
                yield from self._indexed(version, some, parts, seen)

    def _indexed(
        self, version: DatasetVersion, page: Sequence[Walked], parts: Mapping[str, bytes], seen: _Seen
    ) -> Iterator[IndexedSample]:
        for walked in page:
            seen.inputs.append(self._inputs_of(walked))
            encoded, composed = walked.values[self._tokens].data, walked.values[self._pages].data
            record = json.loads(parts[walked.record])
            long = encoded["tokens"] > self.parameters.sequence_tokens
            pieces = self._pieces(record, composed) if long else []
            if long and not pieces:
                seen.letters.append(self._too_long(version, walked, encoded["tokens"], pair=REJECTED in record))
                continue
            seen.samples += 1
            yield IndexedSample(
                ordinal=walked.ordinal,
                sample_id=walked.sample_id,
                record=record,
                encoded=encoded,
                pages=composed["pages"],
                images=parts,
                shapes=shapes_of(composed),
                pieces=pieces,
            )

    def _pieces(self, record: Mapping[str, Any], composed: Mapping[str, Any]) -> list[tuple[Piece, int]]:
        """Cut a sample that is too long; return its pieces with their checksums."""
        if self.parameters.long_samples == REFUSE or REJECTED in record:
            return []
        token_px = self.parameters.images.token_px
        sizes = [(page["width"], page["height"]) for page in composed["pages"]]
        cells = [(height // token_px) * (width // token_px) for width, height in sizes]
        encoded = encode_record(self._tokenizer, record, shapes_of(composed), sizes, cells)
        tokens_T, learned_T = token_arrays(encoded)
        pieces = pieces_of(
            learned_T,
            encoded["images"],
            tokens_max=self.parameters.sequence_tokens,
            policy=self.parameters.long_samples,
        )
        cuts = [slice(piece.start, piece.stop) for piece in pieces]
        return [(piece, check_of(tokens_T[cut], learned_T[cut])) for piece, cut in zip(pieces, cuts, strict=True)]

    def _page(self, version: DatasetVersion, first: int, count: int) -> list[Walked]:
        steps, names = self._flow.recipe.steps, (self._pages, self._tokens)
        return list(self._walk.samples(version, steps, values_of=names, first=first, count=count))

    def _too_long(self, version: DatasetVersion, walked: Walked, tokens: int, *, pair: bool) -> Letter:
        most, way = self.parameters.sequence_tokens, "raise data.sequenceTokens, or set data.longSamples"
        if pair:
            way = "a prompt with its two answers is never cut; raise data.sequenceTokens"
        elif self.parameters.long_samples != REFUSE:
            way = "no piece of it has an answer to learn; raise data.sequenceTokens"
        return Letter(
            key=self.parameters.letter_key(version, walked.ordinal),
            operation=INDEX,
            ordinal=walked.ordinal,
            sample_id=walked.sample_id,
            rule="sequence-tokens",
            error=f"sample is too long: {tokens} tokens, expected at most {most}; {way}",
        )

    def _wanted(self, page: Sequence[Walked]) -> set[str]:
        """Digests of the records and images of some samples."""
        pages = [one for walked in page for one in walked.values[self._pages].data["pages"]]
        return {one["image"] for one in pages if one.get("image") is not None} | {walked.record for walked in page}

    def _inputs_of(self, walked: Walked) -> list[str]:
        return [walked.sample_id, walked.record, *(walked.outputs[name].digest for name in (self._pages, self._tokens))]
