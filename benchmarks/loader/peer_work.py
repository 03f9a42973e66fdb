"""Shared parts of all peers: their input, batches and packs as tensors, and a packer around an endless stream."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.loader import work
from torch.utils.data import DataLoader, IterableDataset

from polyreme_datahub.loader.order.order import pack

BATCH = 8
"""As many samples as a step of ours has."""
SHARD_BYTES = 8 * 2**20
SHUFFLED = 64
"""Samples among which streams shuffle."""
PACKED_TOGETHER = 128
"""Samples that a worker packs together; each is a JPEG and tokens until it is in a pack."""

Sample = Mapping[str, Any]
"""Bytes by kind: ``jpg`` (empty where a sample has no image) and ``json``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a peer reads."""

    root: str
    """Folder, or ``s3://`` URL, with one folder of a source each."""
    sources: Mapping[str, int]
    """Weights by name."""
    cache: Path
    """Empty folder for local copies."""
    workers: int
    shards: Sequence[str]
    """Names of the files of the only source, for peers that are given each."""
    made: work.Work
    pack_tokens: int
    """Tokens of a pack; 0 where samples are not packed."""

    @property
    def is_remote(self) -> bool:
        """Whether the shards lie in a bucket."""
        return self.root.startswith("s3://")

    @property
    def only(self) -> str:
        """Return the place of the only source."""
        [name] = self.sources
        return f"{self.root}/{name}"

    @property
    def shares(self) -> list[float]:
        """Return the weights as shares of one."""
        return [weight / sum(self.sources.values()) for weight in self.sources.values()]

    def make(self, sample: Sample) -> dict[str, Any]:
        """Make a sample in a worker."""
        return self.made.make(bytes(sample["jpg"]), json.loads(bytes(sample["json"])))

    def make_batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Make a batch in a worker."""
        return collate([self.make(sample) for sample in samples])

    def encode(self, sample: Sample) -> dict[str, Any]:
        """Encode a sample that will be packed; its image is decoded when it is in a pack."""
        facts = json.loads(bytes(sample["json"]))
        tokens_T, learned_T = self.made.encode(facts)
        return {"jpg": bytes(sample["jpg"]), "facts": facts, "tokens": tokens_T, "learned": learned_T}

    def select(self, samples: Sequence[Sample]) -> list[list[Any]]:
        """Choose which encoded samples share a pack."""
        lengths = [len(sample["tokens"]) for sample in samples]
        return [[samples[at] for at in chosen] for chosen in pack(lengths, capacity=self.pack_tokens)]

    def finish(self, encoded: Sample) -> dict[str, Any]:
        """Decode and augment the image of an encoded sample."""
        patches_PC = self.made.augmented(encoded["jpg"], encoded["facts"])
        return {
            "name": encoded["facts"]["name"],
            "tokens": encoded["tokens"],
            "learned": encoded["learned"],
            "patches": patches_PC,
        }


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """Lay samples one after another: tokens, targets' marks and patches, each as one tensor."""
    return {
        "names": [sample["name"] for sample in samples],
        "token_counts": [len(sample["tokens"]) for sample in samples],
        "patch_counts": [len(sample["patches"]) for sample in samples],
        "tokens": torch.from_numpy(np.concatenate([sample["tokens"] for sample in samples]).astype(np.int64)),
        "learned": torch.from_numpy(np.concatenate([sample["learned"] for sample in samples])),
        "patches": torch.from_numpy(np.concatenate([sample["patches"] for sample in samples])),
    }


def packed_loader(samples: Iterable[Sample], given: Given) -> Iterable[Any]:
    """Return packs of a stream of samples that a peer mixes in each worker: none of its own packs."""
    return DataLoader(_Packs(samples, given), batch_size=None, num_workers=given.workers)


class _Packs(IterableDataset[Any]):
    def __init__(self, samples: Iterable[Sample], given: Given) -> None:
        self._samples, self._given = samples, given

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Sample] = []
        while True:
            for sample in self._samples:
                waiting.append(self._given.encode(sample))
                if len(waiting) == PACKED_TOGETHER:
                    for chosen in self._given.select(waiting):
                        yield collate([self._given.finish(encoded) for encoded in chosen])
                    waiting = []


def shards_of(samples: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Cut samples into shards of equal counts, of some ``SHARD_BYTES`` each and at least two."""
    listed = list(samples)
    count = max(2, round(sum(len(jpeg) + len(facts) for jpeg, facts in listed) / SHARD_BYTES))
    for at in range(count):
        yield listed[at * len(listed) // count : (at + 1) * len(listed) // count]
