"""Sealing the training index: one item writes the shards of some thousand ordinals, and the manifest joins them.

Samples that are longer than a pack are dead letters here, or cut into pieces. Where stored records or images are lost,
they are read again from the source.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.digests import action_key, canonical_json, digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.format import Manifest, Shard
from polyreme_datahub.index.pieces import REFUSE, Piece, pieces_of
from polyreme_datahub.index.sample_bytes import check_of
from polyreme_datahub.index.shapes import shapes_of, written_turns
from polyreme_datahub.index.write import IndexedSample, write_shards
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.operations.fit_pages import ComposeParameters
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import Action, IndexRow, Letter, Results, StageCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.flow import Flow, group_items
from polyreme_datahub.runner.inputs import Inputs
from polyreme_datahub.runner.walk import PAGE, Walk, Walked
from polyreme_datahub.tokens import TextTokenizer, encode_conversation, token_arrays

INDEX = "index"
VERSION = 4
EARLIER_WAY = "raise data.sequenceTokens"
"""End of the error in letters of earlier releases, whose keys do not say of which index they are."""
COMPOSE, TOKENIZE = "compose", "tokenize"
IMAGES_PAGE = 32
"""Samples whose encoded images are in memory at once."""
_Read = TypeVar("_Read")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexParameters:
    """What an index is made with."""

    images: ComposeParameters
    tokenizer: str
    """Digest of ``tokenizer.json``."""
    sequence_tokens: int
    long_samples: str = REFUSE
    """What becomes of samples that are longer, as ``spec.data.longSamples``."""

    def key(self, version: DatasetVersion) -> str:
        """Key of a version's index."""
        parameters = dataclasses.asdict(self)
        if self.long_samples == REFUSE:
            # As it was before there was another policy.
            del parameters["long_samples"]
        return digest_value([INDEX, VERSION, version.digest, version.reference, parameters])

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


class IndexWork:
    """Writes groups of shards, and manifests.

    Args:
        database: Registry.
        lakehouse: Where bytes lie.
        flow: The flow whose outputs enter the index.
        parameters: Parameters of the index.
        tokenizer: The tokenizer.
        remake: Makes what is stored of some ordinals again, from the source.
        owner: Holder of the leases.
        now_s: Wall clock [s].
        on_counts: Called after each commit with what it added.
    """

    def __init__(
        self,
        database: Database,
        lakehouse: Lakehouse,
        flow: Flow,
        *,
        parameters: IndexParameters,
        tokenizer: TextTokenizer,
        remake: Callable[[DatasetVersion, int, int], None],
        owner: str,
        now_s: Callable[[], float],
        on_counts: Callable[[WorkItem, Sequence[StageCount]], None],
    ) -> None:
        self._database, self._lakehouse, self._flow = database, lakehouse, flow
        self._parameters, self._tokenizer, self._remake = parameters, tokenizer, remake
        self._owner, self._now_s, self._on_counts = owner, now_s, on_counts
        self._walk = Walk(database, lakehouse, constants=flow.recipe.constants)
        self._inputs = Inputs(database, lakehouse, constants=flow.recipe.constants)
        self._groups: dict[str, str] = {}
        """Digests of the groups that this object wrote, by item."""

    def items(self, version: DatasetVersion) -> list[WorkItem]:
        """Return the items of a version's index."""
        return group_items(self._parameters.key(version), INDEX, version)

    def do(self, item: WorkItem) -> None:
        """Write the shards of an item's ordinals; written twice, they are the same bytes.

        Raises:
            EnvironmentFailedError: If store or registry stay away; the item is still due.
            IndexDamagedError: If stored data is lost that the source no longer gives.
        """
        version = self._flow.versions[item.version_id]
        seen = _Seen()
        shards, tokens = write_shards(
            self._lakehouse,
            self._samples(version, item, seen),
            patch_px=self._parameters.images.patch_px,
        )
        samples = sum(shard.count for shard in shards)
        group = canonical_json(
            {"shards": [dataclasses.asdict(shard) for shard in shards], "samples": samples, "tokens": tokens}
        )
        digest = self._lakehouse.put_blob(group)
        key = self._group_key(version, item.first, seen.inputs)
        counts = [StageCount(stage=INDEX, misses=seen.samples, dead=len(seen.letters))]
        results.commit(
            self._database,
            Results(
                version_id=version.id,
                actions=[Action(key=key, operation=INDEX, inputs=(version.digest,), output=digest)],
                letters=seen.letters,
                blobs={
                    digest: len(group),
                    **{shard.digest: shard.size_bytes for shard in shards},
                    **{stored.digest: stored.size_bytes for shard in shards for stored in shard.samples},
                },
                counts=counts,
            ),
            finished=item,
            owner=self._owner,
            now_s=self._now_s(),
        )
        self._groups[item.key] = digest
        self._on_counts(item, counts)

    def close(self) -> None:
        """Nothing was started."""

    def finish(self, version: DatasetVersion) -> IndexRow:
        """Join the groups of a version in a manifest, and enter the index in the registry.

        Raises:
            IndexDamagedError: If a group is missing.
        """
        shards: list[Shard] = []
        samples = tokens = 0
        for item in self.items(version):
            group = self._group(version, item)
            shards += [Shard.from_value(value) for value in group["shards"]]
            samples, tokens = samples + group["samples"], tokens + group["tokens"]
        digest = self._lakehouse.put_blob(self.manifest(version, shards, samples=samples, tokens=tokens).to_bytes())
        key = self._parameters.key(version)
        return IndexRow(key=key, version_id=version.id, manifest=digest, samples=samples, tokens=tokens)

    def manifest(
        self, version: DatasetVersion, shards: Sequence[Shard] = (), *, samples: int = 0, tokens: int = 0
    ) -> Manifest:
        """Return the manifest of some shards of a version's index."""
        form, parameters = self._tokenizer.format, self._parameters
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
        )

    def group_of(self, version: DatasetVersion, item: WorkItem) -> str | None:
        """Return the digest of the group of shards that an item has written; None if it wrote none of these samples."""
        if item.key not in self._groups:
            steps = self._flow.recipe.steps
            walked = self._walk.samples(version, steps, values_of=(), first=item.first, count=item.count)
            key = self._group_key(version, item.first, [_inputs_of(one) for one in walked])
            found = results.outputs_of(self._database, [key])
            if key not in found:
                return None
            self._groups[item.key] = found[key].digest
        return self._groups[item.key]

    def take(self, item: WorkItem, group: str) -> None:
        """Take a group that an earlier process has written and published."""
        self._groups[item.key] = group

    def _group(self, version: DatasetVersion, item: WorkItem) -> Mapping[str, Any]:
        digest = self.group_of(version, item)
        if digest is None:
            raise IndexDamagedError(f"no shards of {version.reference} for ordinals from {item.first} on")
        return dict(json.loads(self._lakehouse.get_blob(digest)))

    def _group_key(self, version: DatasetVersion, first: int, inputs: Sequence[Sequence[str]]) -> str:
        return action_key(self._parameters.key(version), digest_value([first, list(map(list, inputs))]))

    def _samples(self, version: DatasetVersion, item: WorkItem, seen: _Seen) -> Iterator[IndexedSample]:
        stop = item.first + item.count
        for start in range(item.first, stop, PAGE):
            ordinals = (version, start, min(PAGE, stop - start))
            page = self._whole(ordinals, lambda ordinals=ordinals: self._page(*ordinals))  # type: ignore[misc]
            for at in range(0, len(page), IMAGES_PAGE):
                some = page[at : at + IMAGES_PAGE]
                parts = self._whole(ordinals, lambda some=some: self._inputs.parts(_wanted(some)))  # type: ignore[misc]
                yield from self._indexed(version, some, parts, seen)

    def _indexed(
        self, version: DatasetVersion, page: Sequence[Walked], parts: Mapping[str, bytes], seen: _Seen
    ) -> Iterator[IndexedSample]:
        for walked in page:
            seen.inputs.append(_inputs_of(walked))
            encoded, composed = walked.values[TOKENIZE].data, walked.values[COMPOSE].data
            record = json.loads(parts[walked.record])
            long = encoded["tokens"] > self._parameters.sequence_tokens
            pieces = self._pieces(record, composed) if long else []
            if long and not pieces:
                seen.letters.append(self._too_long(version, walked, encoded["tokens"]))
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
        if self._parameters.long_samples == REFUSE:
            return []
        token_px = self._parameters.images.token_px
        sizes = [(page["width"], page["height"]) for page in composed["pages"]]
        cells = [(height // token_px) * (width // token_px) for width, height in sizes]
        turns = written_turns(record["conversations"], shapes_of(composed), sizes)
        encoded = encode_conversation(self._tokenizer, turns, cells)
        tokens_T, learned_T = token_arrays(encoded)
        pieces = pieces_of(
            learned_T,
            encoded["images"],
            tokens_max=self._parameters.sequence_tokens,
            policy=self._parameters.long_samples,
        )
        cuts = [slice(piece.start, piece.stop) for piece in pieces]
        return [(piece, check_of(tokens_T[cut], learned_T[cut])) for piece, cut in zip(pieces, cuts, strict=True)]

    def _whole(self, ordinals: tuple[DatasetVersion, int, int], read: Callable[[], _Read]) -> _Read:
        """Read what is stored of some ordinals; where it is lost, have it made again and read it once more."""
        try:
            return read()
        except (IndexDamagedError, ObjectNotFoundError):
            self._remake(*ordinals)
            return read()

    def _page(self, version: DatasetVersion, first: int, count: int) -> list[Walked]:
        steps = self._flow.recipe.steps
        return list(self._walk.samples(version, steps, values_of=(COMPOSE, TOKENIZE), first=first, count=count))

    def _too_long(self, version: DatasetVersion, walked: Walked, tokens: int) -> Letter:
        most, way = self._parameters.sequence_tokens, "raise data.sequenceTokens, or set data.longSamples"
        if self._parameters.long_samples != REFUSE:
            way = "no piece of it has an answer to learn; raise data.sequenceTokens"
        return Letter(
            key=self._parameters.letter_key(version, walked.ordinal),
            operation=INDEX,
            ordinal=walked.ordinal,
            sample_id=walked.sample_id,
            rule="sequence-tokens",
            error=f"sample is too long: {tokens} tokens, expected at most {most}; {way}",
        )


def _wanted(page: Sequence[Walked]) -> set[str]:
    """Digests of the records and images of some samples."""
    images = {
        one["image"] for walked in page for one in walked.values[COMPOSE].data["pages"] if one.get("image") is not None
    }
    return images | {walked.record for walked in page}


def _inputs_of(walked: Walked) -> list[str]:
    return [walked.sample_id, walked.record, walked.outputs[COMPOSE].digest, walked.outputs[TOKENIZE].digest]
