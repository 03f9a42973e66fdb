"""Certificates of the authorities that an installation's workers trust, instead of the public ones.

Each job has them in a Secret of its own, so that its namespace needs none. The Secret is named after their content, so
pods of a later attempt mount what the operator was given later.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

KEY = "ca.crt"
FOLDER = "/etc/polyreme/ca"
FILE_VARIABLES = ("SSL_CERT_FILE", "AWS_CA_BUNDLE")
"""By which clients of the object store find the file: obstore and OpenSSL by the first, boto3 by the second."""
VOLUME = "polyreme-ca"
BYTES_MAX = 512 << 10
"""A Secret holds 1 MiB at most."""
BEGIN = "-----BEGIN CERTIFICATE-----"
PRIVATE = "PRIVATE KEY-----"
_DIGEST_CHARACTERS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class CaBundle:
    """Certificates as PEM text.

    Raises:
        ValueError: If the text is something else, or too long; the message says what was expected.
    """

    pem: str

    def __post_init__(self) -> None:
        if BEGIN not in self.pem:
            raise ValueError(f"no certificates: expected PEM text with {BEGIN}")
        if PRIVATE in self.pem:
            raise ValueError("holds a private key, which every worker could read: expected certificates alone")
        if len(self.pem.encode()) > BYTES_MAX:
            raise ValueError(f"{len(self.pem.encode())} bytes of certificates, at most {BYTES_MAX} fit into a Secret")

    def object_name(self, job_object: str) -> str:
        """Return the name of a job's Secret."""
        return f"{job_object}-ca-{hashlib.sha256(self.pem.encode()).hexdigest()[:_DIGEST_CHARACTERS]}"


def volume(secret: str) -> dict[str, Any]:
    """Return the volume of a worker's pod."""
    return {"name": VOLUME, "secret": {"secretName": secret}}


def mounted(container: dict[str, Any]) -> dict[str, Any]:
    """Mount the certificates in a container, and name their file to its clients; what its template says comes first."""
    own = list(container.get("env") or [])
    named = {entry.get("name") for entry in own}
    variables = [{"name": name, "value": f"{FOLDER}/{KEY}"} for name in FILE_VARIABLES if name not in named]
    mounts = [*(container.get("volumeMounts") or []), {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}]
    return {**container, "env": [*variables, *own], "volumeMounts": mounts}
