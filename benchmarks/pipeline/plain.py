"""The floor: two plain processes that read each JPEG, call the same functions, and write into the same kind of store.

Usage: plain.py LISTING OBJECTS_URL; prints one line of JSON. Nothing is reused, leased, checked or recovered here.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path

from benchmarks.pipeline import photo_operations, usage

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.objects import open_store
from polyreme_datahub.operations.declare import find_operation
from polyreme_datahub.operations.values import Blob, Value

PROCESSES = 2
BUNDLE_BYTES = 16 * 2**20


def apply_steps(path: Path) -> tuple[dict[str, bytes], dict[str, object]]:
    """Run all steps on one image; return the bytes to store, by digest, and the values of the steps."""
    blob = Blob(path.read_bytes())
    record = Value({"kind": "images", "images": [blob.digest], "masks": [None], "boxes": []}, {blob.digest: blob})
    values = {"record": record}
    for name, inputs, parameters in photo_operations.STEPS:
        operation = find_operation(name)
        arguments = [values[source] for source in inputs]
        values[operation.name] = operation.call(arguments, operation.parameters(**parameters))
    new = {digest: value.blobs[digest].data for value in values.values() for digest in value.new}
    return {blob.digest: blob.data, **new}, {name: value.data for name, value in values.items()}


def paths_of(listing: Path) -> list[Path]:
    """Return the images of a JSON Lines file."""
    return [listing.parent / json.loads(line)["images"][0] for line in listing.read_text().splitlines()]


def bundles(paths: Sequence[Path]) -> Iterator[tuple[bytes, list[dict[str, object]]]]:
    """Yield bytes to store and the values that go with them."""
    parts: dict[str, bytes] = {}
    values: list[dict[str, object]] = []
    for path in paths:
        made, line = apply_steps(path)
        parts |= made
        values.append(line)
        if sum(map(len, parts.values())) >= BUNDLE_BYTES:
            yield b"".join(parts.values()), values
            parts, values = {}, []
    if values:
        yield b"".join(parts.values()), values


def write(objects: str, bundle: bytes, values: Sequence[dict[str, object]]) -> None:
    """Write one bundle and its values; both are durable afterwards."""
    store, digest = open_store(objects), digest_bytes(bundle)
    store.put(f"bundles/{digest}", bundle)
    store.put(f"values/{digest}.jsonl", "\n".join(json.dumps(line) for line in values).encode())


def work(objects: str, paths: Sequence[Path]) -> list[object]:
    """Process some images; return their cards."""
    cards = []
    for bundle, values in bundles(paths):
        write(objects, bundle, values)
        cards += [line["card"] for line in values]
    return cards


def main(listing: Path, objects: str) -> None:
    """Process all images in two processes."""
    paths = paths_of(listing)
    started_s = time.monotonic()
    with get_context("spawn").Pool(PROCESSES) as pool:
        found = pool.starmap(work, [(objects, paths[at::PROCESSES]) for at in range(PROCESSES)], chunksize=1)
        pool.close()
        pool.join()
    usage.report(started_s, [card for cards in found for card in cards])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
