"""The index stage: a barrier after tokenize, one message a version. Too long samples are dead letters here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from polyreme_datahub.digests import digest_value
from polyreme_datahub.index.format import Manifest
from polyreme_datahub.index.write import IndexedSample, all_gray, write_shards
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.operations.types import CHUNK, COMPOSE, INDEX, TOKENIZE, ImageParameters
from polyreme_datahub.operations.worker import Chains, Chunk
from polyreme_datahub.registry import work
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work import DeadLetter, IndexRow, Outcome, SampleRow, StageCount
from polyreme_datahub.tokens import TextTokenizer
from polyreme_datahub.topics.types import Message

VERSION = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexParameters:
    """What an index is made with."""

    images: ImageParameters
    tokenizer: str
    """Digest."""
    sequence_tokens: int

    def key(self, version: DatasetVersion) -> str:
        """Key of a version's index."""
        return digest_value([INDEX, VERSION, version.digest, version.reference, dataclasses.asdict(self)])


class Indexer:
    """Writes indexes."""

    def __init__(
        self,
        database: Database,
        lakehouse: Lakehouse,
        versions: Mapping[int, DatasetVersion],
        chains: Chains,
        *,
        parameters: IndexParameters,
        tokenizer: TextTokenizer,
        now_s: Callable[[], float],
    ) -> None:
        self._database = database
        self._lakehouse = lakehouse
        self._versions = versions
        self._chains = chains
        self._parameters = parameters
        self._tokenizer = tokenizer
        self._now_s = now_s

    def do(self, message: Message) -> tuple[StageCount, Sequence[Message]]:
        """Write the index of a message's version; written twice, it is the same bytes.

        Raises:
            EnvironmentFailedError: If store or registry stay away; the message is still due.
        """
        chunk = Chunk.of(message)
        version = self._versions[chunk.version_id]
        work.begin_try(self._database, message.key, now_s=self._now_s())
        key = self._parameters.key(version)
        dead: list[DeadLetter] = []
        channels = 1 if self._is_gray(version) else 3
        shards, tokens = write_shards(
            self._lakehouse,
            self._samples(version, dead),
            patch_px=self._parameters.images.patch_px,
            channels=channels,
        )
        ids = self._tokenizer.ids
        samples = sum(shard.count for shard in shards)
        manifest = Manifest(
            version=version.digest,
            name=version.name,
            number=version.number,
            tokenizer=self._parameters.tokenizer,
            vocabulary=self._tokenizer.size,
            token_ids={"media": ids.media, "end": ids.end, "pad": ids.pad},
            patch_px=self._parameters.images.patch_px,
            merge=self._parameters.images.merge,
            channels=channels,
            sequence_tokens=self._parameters.sequence_tokens,
            samples=samples,
            tokens=tokens,
            shards=shards,
        )
        digest = self._lakehouse.put_blob(manifest.to_bytes())
        outcome = Outcome(
            version_id=version.id,
            count=StageCount(stage=INDEX, misses=samples, dead=len(dead)),
            dead_letters=dead,
            index=IndexRow(key=key, version_id=version.id, manifest=digest, samples=samples, tokens=tokens),
        )
        work.commit(self._database, message, outcome, now_s=self._now_s())
        return outcome.count, ()

    def _samples(self, version: DatasetVersion, dead: list[DeadLetter]) -> Iterator[IndexedSample]:
        for rows, encoded, composed in self._chunks(version):
            parts = self._read({*encoded.values(), *composed.values()})
            geometry = {at: json.loads(parts[digest]) for at, digest in composed.items()}
            pngs = self._read({page["png"] for value in geometry.values() for page in value["pages"]})
            for row in rows:
                if row.ordinal not in encoded:
                    continue
                value = json.loads(parts[encoded[row.ordinal]])
                if (letter := self._too_long(row, encoded[row.ordinal], len(value["tokens"]))) is not None:
                    dead.append(letter)
                    continue
                shape = geometry[row.ordinal]
                yield IndexedSample(
                    sample_id=row.sample_id,
                    encoded=value,
                    pages=shape["pages"],
                    pngs=[pngs[page["png"]] for page in shape["pages"]],
                    boxes=shape["boxes"],
                )

    def _is_gray(self, version: DatasetVersion) -> bool:
        for _, _, composed in self._chunks(version):
            parts = self._read(set(composed.values()))
            pages = [page for part in parts.values() for page in json.loads(part)["pages"]]
            if not all_gray(self._read({page["png"] for page in pages}).values()):
                return False
        return True

    def _chunks(self, version: DatasetVersion) -> Iterator[tuple[list[SampleRow], dict[int, str], dict[int, str]]]:
        for first in range(0, version.records, CHUNK):
            rows = work.samples_between(self._database, version.id, first=first, count=CHUNK)
            yield rows, self._chains.outputs(TOKENIZE, rows), self._chains.outputs(COMPOSE, rows)

    def _too_long(self, row: SampleRow, encoded: str, tokens: int) -> DeadLetter | None:
        most = self._parameters.sequence_tokens
        if tokens <= most:
            return None
        return DeadLetter(
            key=digest_value([INDEX, encoded, most, row.ordinal]),
            stage=INDEX,
            ordinal=row.ordinal,
            sample_id=row.sample_id,
            rule="sequence-tokens",
            error=f"sample is too long: {tokens} tokens, expected at most {most}; raise data.sequenceTokens",
        )

    def _read(self, digests: set[str]) -> dict[str, bytes]:
        return self._lakehouse.get_parts(work.places_of(self._database, digests)) if digests else {}
