"""Container images of one static program each, as OCI archives that need no build tool."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REGISTRY = "polyreme.test"
"""Prefix of the images' names: no registry has it, so nothing is ever pulled."""
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIGURATION = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_INDEX = "application/vnd.oci.image.index.v1+json"
LEVEL = 1
"""Of compression: the archive is read once, on this machine."""


def image_name(program: str) -> str:
    """Return the name of a program's image."""
    return f"{REGISTRY}/{program}:1"


def write_archive(path: Path, program: Path, *, user: int, arguments: Sequence[str] = ()) -> Path:
    """Write an OCI archive of an image with nothing but a static program in it, as its entry point."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as layer:
        _add(layer, program.name, program.read_bytes(), mode=0o755)
    packed = gzip.compress(plain.getvalue(), LEVEL, mtime=0)
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}", *arguments], "User": str(user)},
        "rootfs": {"type": "layers", "diff_ids": [_digest(plain.getvalue())]},
    }
    blobs = [_json(configuration), packed]
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _descriptor(_CONFIGURATION, blobs[0]),
        "layers": [_descriptor(_LAYER, packed)],
    }
    blobs.append(_json(manifest))
    annotations = {
        "io.containerd.image.name": image_name(program.name),
        "org.opencontainers.image.ref.name": image_name(program.name),
    }
    index = {
        "schemaVersion": 2,
        "mediaType": _INDEX,
        "manifests": [{**_descriptor(_MANIFEST, blobs[-1]), "annotations": annotations}],
    }
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, mode="w") as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json(index))
        for blob in blobs:
            _add(archive, f"blobs/sha256/{_digest(blob).partition(':')[2]}", blob)
    return partial.replace(path)


def _add(archive: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}
