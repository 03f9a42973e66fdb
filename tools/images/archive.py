"""Read an OCI archive: its digest, configuration and layers."""

import contextlib
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
"""Annotations that hold an image's name: docker's whole name is in the first, buildah's in the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer, as a registry stores it."""

    digest: str
    bytes: int
    """Compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An image in a file."""

    path: Path
    name: str
    digest: str
    config: dict[str, Any]
    """User, environment, labels, entry point: as the image specification names them."""
    layers: tuple[Layer, ...]

    def files(self, number: int) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
        """Every member of a layer, with its content where it is a file."""
        with (
            tarfile.open(self.path) as outer,
            _blob(outer, self.layers[number].digest) as blob,
            tarfile.open(fileobj=blob, mode="r|*") as inner,
        ):
            for member in inner:
                yield member, inner.extractfile(member) if member.isreg() else None


def read(path: Path) -> Archive:
    """Read what an archive says of its image.

    Raises:
        ValueError: If the file is no OCI archive of one image.
    """
    with tarfile.open(path) as outer:
        try:
            (found,) = _json(outer, "index.json")["manifests"]
            manifest = _json(outer, _blob_name(found["digest"]))
            config = _json(outer, _blob_name(manifest["config"]["digest"]))["config"]
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path.name} is no OCI archive of one image: {error}") from error
    annotations = found.get("annotations", {})
    return Archive(
        path=path,
        name=next((annotations[key] for key in NAMES if key in annotations), ""),
        digest=found["digest"],
        config=config,
        layers=tuple(Layer(digest=layer["digest"], bytes=layer["size"]) for layer in manifest["layers"]),
    )


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


@contextlib.contextmanager
def _blob(outer: tarfile.TarFile, digest: str) -> Iterator[IO[bytes]]:
    file = outer.extractfile(_blob_name(digest))
    assert file is not None
    with file:
        yield file


def _json(outer: tarfile.TarFile, name: str) -> Any:
    file = outer.extractfile(name)
    assert file is not None
    with file:
        return json.load(file)
