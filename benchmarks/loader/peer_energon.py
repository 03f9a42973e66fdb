"""Energon: tar files with its index, by a task encoder; a bucket through Multi-Storage Client with its local copies."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.loader import peer_webdataset
from benchmarks.loader.peer_work import BATCH, PACKED_TOGETHER, SHUFFLED, Given, collate
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors import BaseWebdatasetFactory

PROFILE = "bench"
CACHE_SIZE = "10G"
DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
MIXTURE = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"


def write(place: Path, samples: Iterable[tuple[bytes, bytes]]) -> None:
    """Write tar files and prepare them."""
    peer_webdataset.write(place, samples)
    BaseWebdatasetFactory.prepare_dataset(
        place,
        sorted(path.name for path in place.glob("*.tar")),
        split_parts_ratio=[("train", 1), ("val", 0), ("test", 0)],
        shuffle_seed=None,
        workers=1,
    )
    (place / ".nv-meta/dataset.yaml").write_text(DATASET)


@dataclass
class Held(Sample):
    """A sample at any stage of the work."""

    value: dict[str, Any]


@stateless
def cook(crude: dict[str, Any]) -> Held:
    """Take the bytes of a sample."""
    return Held(**basic_sample_keys(crude), value={"jpg": crude["jpg"], "json": crude["json"]})


class Whole(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Makes samples and batches."""

    decoder = None
    cookers = (Cooker(cook),)

    def __init__(self, given: Given) -> None:
        super().__init__()
        self._given = given

    @stateless
    def encode_sample(self, sample: Held) -> Held:
        """Make a sample."""
        return Held.derive_from(sample, value=self._given.make(sample.value))

    @stateless
    def batch(self, samples: Sequence[Held]) -> dict[str, Any]:
        """Lay samples one after another."""
        return collate([sample.value for sample in samples])


class Packed(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Makes packs: decodes images once they are in one, as Energon's guide to packing has it."""

    decoder = None
    cookers = (Cooker(cook),)

    def __init__(self, given: Given) -> None:
        super().__init__()
        self._given = given

    @stateless
    def preencode_sample(self, sample: Held) -> Held:
        """Encode the text of a sample."""
        return Held.derive_from(sample, value=self._given.encode(sample.value))

    @stateless
    def select_samples_to_pack(self, samples: list[Held]) -> list[list[Held]]:
        """Choose which samples share a pack."""
        numbered = [{**sample.value, "at": at} for at, sample in enumerate(samples)]
        return [[samples[each["at"]] for each in chosen] for chosen in self._given.select(numbered)]

    @stateless
    def postencode_sample(self, sample: Held) -> Held:
        """Decode and augment the image of a sample."""
        return Held.derive_from(sample, value=self._given.finish(sample.value))

    @stateless
    def pack_selected_samples(self, samples: list[Held]) -> Held:
        """Lay samples one after another."""
        return Held.derive_from(samples[0], value=collate([sample.value for sample in samples]))

    @stateless
    def batch(self, samples: Sequence[Held]) -> dict[str, Any]:
        """Return the only pack of a batch."""
        [pack] = samples
        return pack.value


def batches(given: Given) -> Iterable[Any]:
    """Read the only source, once."""
    place = given.only
    if given.is_remote:
        bucket = urlsplit(given.only)
        (given.cache / "msc.json").write_text(json.dumps(_profile(given, bucket.netloc)))
        os.environ["MSC_CONFIG"] = str(given.cache / "msc.json")
        place = f"msc://{PROFILE}{bucket.path}"
    dataset = get_train_dataset(
        place,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=given.workers),
        batch_size=BATCH,
        shuffle_buffer_size=SHUFFLED,
        max_samples_per_sequence=None,
        task_encoder=Whole(given),
        repeat=False,
    )
    return get_loader(dataset)


def packs(given: Given) -> Iterable[Any]:
    """Read a mixture of local sources."""
    blend = "".join(f"      - weight: {weight}\n        path: ./{name}\n" for name, weight in given.sources.items())
    mixture = Path(given.root, "mixture.yaml")
    mixture.write_text(MIXTURE + blend)
    dataset = get_train_dataset(
        mixture,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=given.workers),
        batch_size=1,
        packing_buffer_size=PACKED_TOGETHER,
        shuffle_buffer_size=SHUFFLED,
        max_samples_per_sequence=None,
        task_encoder=Packed(given),
    )
    return get_loader(dataset)


def _profile(given: Given, bucket: str) -> dict[str, Any]:
    options = {
        "base_path": bucket,
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "region_name": os.environ["AWS_REGION"],
    }
    return {
        "profiles": {
            PROFILE: {
                "storage_provider": {"type": "s3", "options": options},
                "credentials_provider": {
                    "type": "S3Credentials",
                    "options": {
                        "access_key": os.environ["AWS_ACCESS_KEY_ID"],
                        "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
                    },
                },
            }
        },
        "cache": {"size": CACHE_SIZE, "location": str(given.cache / "copies")},
    }
