"""Messages and proofs between launchers."""

import dataclasses
import json

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_launcher.protocol.handshake import (
    FollowerIdentity,
    Hello,
    check_hello,
    decode_hello,
    encode_hello,
    leader_proof,
)
from polyreme_launcher.protocol.messages import (
    LINE_BYTES_MAX,
    Beat,
    Directive,
    Exited,
    Finish,
    Joined,
    Leaving,
    Message,
    Release,
    decode,
    encode,
)

MESSAGES: list[Message] = [
    Directive(attempt=3, run=True, checkpoint_requested=False, replacement=1, job_json='{"a":"ü"}', plan_json="{}"),
    Release(attempt=3, master_address="127.0.0.1", master_port=5, resume_from=None),
    Release(attempt=3, master_address="h", master_port=5, resume_from="a000001-s00000050"),
    Finish(code=0),
    Beat(),
    Beat(ranks=(4, 5)),
    Leaving(),
    Joined(attempt=3, index=1, replacement=0, launcher="a", forked=True),
    Exited(attempt=3, rank=7, code=None, signal=9),
    Exited(attempt=3, rank=7, code=1, signal=None),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not json",
        b"[]",
        b'"text"',
        b'{"type":"Nothing"}',
        b'{"type":"Finish"}',
        b'{"type":"Finish","code":"0"}',
        b'{"type":"Finish","code":true}',
        b'{"type":"Finish","code":0,"more":1}',
        b'{"type":["Finish"],"code":0}',
        b'{"type":"Beat","ranks":[1,"2"]}',
        b'{"type":"Beat","ranks":[true]}',
    ],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidConfigError):
        decode(line)


def test_a_message_that_is_too_long_is_never_sent() -> None:
    long = Directive(
        attempt=1,
        run=True,
        checkpoint_requested=False,
        replacement=0,
        job_json="x" * LINE_BYTES_MAX,
        plan_json="{}",
    )
    with pytest.raises(InvalidConfigError, match="expected at most"):
        encode(long)


def hello(secret: bytes, *, leader_nonce: str = "n1", index: int = 1) -> Hello:
    follower = FollowerIdentity(job_uid="job", index=index, replacement=0, secret=secret)
    return follower.hello(leader_nonce=leader_nonce, nonce="n2")


def test_a_follower_of_the_job_is_known() -> None:
    greeting = decode_hello(encode_hello(hello(b"secret")))
    assert check_hello(b"secret", greeting, job_uid="job", leader_nonce="n1")


@pytest.mark.parametrize(
    ("secret", "job_uid", "leader_nonce"),
    [(b"other", "job", "n1"), (b"secret", "another", "n1"), (b"secret", "job", "n3")],
)
def test_another_secret_job_or_nonce_is_refused(secret: bytes, job_uid: str, leader_nonce: str) -> None:
    assert not check_hello(secret, hello(b"secret"), job_uid=job_uid, leader_nonce=leader_nonce)


def test_a_proof_for_one_index_does_not_serve_another() -> None:
    forged = {**json.loads(encode_hello(hello(b"secret"))), "index": 2}
    assert not check_hello(b"secret", decode_hello(json.dumps(forged).encode()), job_uid="job", leader_nonce="n1")


def test_a_followers_proof_cannot_be_sent_back_as_the_leaders() -> None:
    assert hello(b"secret").proof != leader_proof(b"secret", job_uid="job", leader_nonce="n1", follower_nonce="n2")


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b'{"job_uid":1,"index":"x","replacement":0,"nonce":"","proof":""}']
)
def test_what_is_no_greeting_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidConfigError):
        decode_hello(line)


def test_a_proof_for_another_job_and_a_greeting_that_is_no_ascii_are_refused() -> None:
    secret, job_uid = b"secret", "a"
    follower = FollowerIdentity(job_uid=job_uid, index=1, replacement=0, secret=secret)
    hello = follower.hello(leader_nonce="n", nonce="m")
    assert check_hello(secret, hello, job_uid=job_uid, leader_nonce="n")
    other = dataclasses.replace(hello, job_uid="b")
    assert not check_hello(secret, other, job_uid=job_uid, leader_nonce="n"), "it says that it belongs to another job"
    for field in ("job_uid", "nonce", "proof"):
        line = json.dumps({**json.loads(encode_hello(hello)), field: "\u00fc"}).encode()
        with pytest.raises(InvalidConfigError, match="greeting"):
            decode_hello(line)
