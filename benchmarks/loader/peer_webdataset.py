"""WebDataset: tar files, over its ``WebLoader``; a bucket is read by pipes from curl, which signs its requests."""

import io
import os
import shlex
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import webdataset
from benchmarks.loader.peer_work import BATCH, SHUFFLED, Given, collate, packed_loader, shards_of

PAYLOAD = "--header 'x-amz-content-sha256: UNSIGNED-PAYLOAD'"
"""S3 requires this header, which curl 7.88 does not send by itself."""


def write(place: Path, samples: Iterable[tuple[bytes, bytes]]) -> None:
    """Write tar files."""
    place.mkdir()
    at = 0
    for number, shard in enumerate(shards_of(samples)):
        with tarfile.open(place / f"{number:06d}.tar", "w") as tar:
            for pair in shard:
                for data, kind in zip(pair, ("jpg", "json"), strict=True):
                    member = tarfile.TarInfo(f"{at:06d}.{kind}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                at += 1


def urls(root: str, shards: Iterable[str]) -> list[str]:
    """Return what WebDataset opens for each shard."""
    bucket = urlsplit(root)
    if bucket.scheme != "s3":
        return [f"{root}/{name}" for name in shards]
    user = f"{os.environ['AWS_ACCESS_KEY_ID']}:{os.environ['AWS_SECRET_ACCESS_KEY']}"
    signed = f"--aws-sigv4 aws:amz:{os.environ['AWS_REGION']}:s3 --user {shlex.quote(user)} {PAYLOAD}"
    place = f"{os.environ['AWS_ENDPOINT_URL']}/{bucket.netloc}{bucket.path}"
    return [f"pipe:curl --silent --fail {signed} {place}/{name}" for name in shards]


def batches(given: Given) -> Iterable[Any]:
    """Read the only source, once."""
    shards = urls(given.only, given.shards)
    made = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False, seed=1)
    made = made.shuffle(SHUFFLED).map(given.make).batched(BATCH, collation_fn=collate)
    return webdataset.WebLoader(made, batch_size=None, num_workers=given.workers)


def packs(given: Given) -> Iterable[Any]:
    """Read a mixture of local sources, whose shards each worker draws with replacement."""
    sources = []
    for name in given.sources:
        shards = sorted(str(path) for path in Path(given.root, name).glob("*.tar"))
        sources.append(webdataset.WebDataset(shards, resampled=True).shuffle(SHUFFLED))
    return packed_loader(webdataset.RandomMix(sources, probs=given.shares), given)
