"""Mutual authentication of two launchers of one job, without sending its secret.

Challenge and response with HMAC-SHA-256 (RFC 2104), nonces in both directions, and the role in each proof, so that
neither side's proof can be sent back as the other's (reflection).
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json

from polyreme_api.errors import InvalidConfigError

NONCE_BYTES = 32
GREETING_BYTES_MAX = 4096
"""Longest line before the peer is authenticated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The identity of a follower, and its proof for the leader's nonce."""

    job_uid: str
    index: int
    replacement: int
    nonce: str
    proof: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowerIdentity:
    """A follower as its job knows it."""

    job_uid: str
    index: int
    replacement: int
    secret: bytes
    """The job's."""

    def hello(self, *, leader_nonce: str, nonce: str) -> Hello:
        """Answer the leader's nonce, with a nonce of the follower's own."""
        proof = _proof(
            self.secret, "follower", self.job_uid, str(self.index), str(self.replacement), leader_nonce, nonce
        )
        return Hello(job_uid=self.job_uid, index=self.index, replacement=self.replacement, nonce=nonce, proof=proof)


def leader_proof(secret: bytes, *, job_uid: str, leader_nonce: str, follower_nonce: str) -> str:
    """Compute the leader's proof."""
    return _proof(secret, "leader", job_uid, leader_nonce, follower_nonce)


def check_hello(secret: bytes, hello: Hello, *, job_uid: str, leader_nonce: str) -> bool:
    """Return whether a follower belongs to this job, in constant time."""
    known = FollowerIdentity(job_uid=job_uid, index=hello.index, replacement=hello.replacement, secret=secret)
    expected = known.hello(leader_nonce=leader_nonce, nonce=hello.nonce).proof
    same_job = hmac.compare_digest(hello.job_uid.encode(), job_uid.encode())
    return hmac.compare_digest(hello.proof.encode(), expected.encode()) and same_job


def encode_hello(hello: Hello) -> bytes:
    """Write the follower's line."""
    return json.dumps(dataclasses.asdict(hello)).encode() + b"\n"


def decode_hello(line: bytes) -> Hello:
    """Read the follower's line.

    Raises:
        InvalidConfigError: If it is no greeting.
    """
    try:
        data = json.loads(line)
        hello = Hello(**data)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidConfigError(f"not a launcher's greeting: {len(line)} bytes") from error
    numbers = all(type(value) is int and value >= 0 for value in (hello.index, hello.replacement))
    texts: tuple[object, ...] = (hello.job_uid, hello.nonce, hello.proof)
    if not numbers or not all(isinstance(text, str) and text.isascii() for text in texts):
        raise InvalidConfigError(f"not a launcher's greeting: {len(line)} bytes")
    return hello


def _proof(secret: bytes, *parts: str) -> str:
    # Parts are joined with their lengths, so that no two lists of parts give the same text.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
