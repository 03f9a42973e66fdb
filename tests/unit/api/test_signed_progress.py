"""Signatures of progress records: who could have written one, and in which order."""

import json
import math

import pytest

from polyreme_api.labels import ANNOTATION_PROGRESS, ANNOTATION_SIGNATURE
from polyreme_api.progress import Outcome, ProgressRecord
from polyreme_api.signed_progress import ProgressSigner, is_signed, job_key, signature_of

KEY = job_key(b"k" * 32, "uid-a")
RECORD = ProgressRecord(attempt=2, replacement=1, released=True, step=7, loss=math.nan)


def lease(annotations: dict[str, str]) -> dict[str, object]:
    return {"metadata": {"annotations": annotations}}


def test_a_leader_reads_what_leaders_of_its_job_wrote_and_continues_their_numbers() -> None:
    first, second = ProgressSigner(KEY, "uid-a"), ProgressSigner(KEY, "uid-a")
    said = [first.annotations(RECORD, at_s=float(at)) for at in range(3)]
    assert [json.loads(each[ANNOTATION_PROGRESS])["sequence"] for each in said] == [1, 2, 3]
    read = second.read(lease(said[-1]))
    assert read is not None
    assert (read.order, read.updated_at_s) == ((2, 1, 3), 2.0)
    assert json.loads(second.annotations(RECORD, at_s=0.0)[ANNOTATION_PROGRESS])["sequence"] == 4
    second.read(lease(said[0]))
    assert json.loads(second.annotations(RECORD, at_s=0.0)[ANNOTATION_PROGRESS])["sequence"] == 5, "none comes twice"


@pytest.mark.parametrize(
    "changed",
    [
        {ANNOTATION_SIGNATURE: ""},
        {ANNOTATION_SIGNATURE: json.loads('"\\ud800"')},
        {ANNOTATION_PROGRESS: ""},
        {ANNOTATION_PROGRESS: '{"attempt": 1, "outcome": "Succeeded"}'},
        {ANNOTATION_PROGRESS: json.loads('"\\udfff"')},
    ],
)
def test_a_leader_reads_nothing_that_no_leader_signed(changed: dict[str, str]) -> None:
    said = ProgressSigner(KEY, "uid-a").annotations(RECORD, at_s=0.0)
    assert ProgressSigner(KEY, "uid-a").read(lease({**said, **changed})) is None


def test_a_signature_holds_for_one_text_one_job_and_one_key() -> None:
    text, other = "record", job_key(b"k" * 32, "uid-b")
    signature = signature_of(text, key=KEY, job_uid="uid-a")
    assert is_signed(text, signature, keys=(other, KEY), job_uid="uid-a")
    assert not is_signed("record ", signature, keys=(KEY,), job_uid="uid-a")
    assert not is_signed(text, signature, keys=(KEY,), job_uid="uid-b")
    assert not is_signed(text, signature, keys=(other,), job_uid="uid-a")
    assert not is_signed(text, signature, keys=(), job_uid="uid-a")
    assert not is_signed(text, "", keys=(KEY,), job_uid="uid-a")


def test_a_signed_text_that_is_no_record_is_none() -> None:
    text = json.dumps({"attempt": "first", "outcome": Outcome.SUCCEEDED})
    said = {ANNOTATION_PROGRESS: text, ANNOTATION_SIGNATURE: signature_of(text, key=KEY, job_uid="uid-a")}
    assert ProgressSigner(KEY, "uid-a").read(lease(said)) is None
