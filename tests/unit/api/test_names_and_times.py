"""Names of objects, times, and how errors speak."""

from __future__ import annotations

import re

import pytest

from polyreme_api import labels
from polyreme_api.errors import FencedError, InvalidConfigError, PolyremeError, RefusedError, RetryableError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.labels import job_object_name, pod_name
from polyreme_api.times import parse_rfc3339, rfc3339

UID = "0a1b2c3d-1111-4222-8333-444455556666"


def test_object_names_hold_the_job_and_five_characters_of_its_uid() -> None:
    assert job_object_name("quickstart", UID) == "quickstart-0a1b2"
    assert pod_name("quickstart", UID, index=14_999, replacement=12) == "quickstart-0a1b2-14999-12"


def test_the_longest_pod_name_is_a_dns_label() -> None:
    name = pod_name("a" * 40, UID, index=14_999, replacement=9_999)
    assert len(name) <= 63
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)


def test_two_jobs_of_one_name_have_different_pods() -> None:
    assert pod_name("a", UID, index=0, replacement=0) != pod_name("a", "f" + UID[1:], index=0, replacement=0)


def test_labels_and_annotations_are_of_our_group() -> None:
    names = [value for name, value in vars(labels).items() if name.startswith(("LABEL_", "ANNOTATION_", "RESOURCE_"))]
    assert len(names) == len(set(names)) >= 7
    assert all(name.startswith("polyreme.dev/") for name in names)


def test_times_are_written_as_kubernetes_does() -> None:
    assert rfc3339(0) == "1970-01-01T00:00:00.000000Z"
    assert rfc3339(1_760_000_000.25) == "2025-10-09T08:53:20.250000Z"


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("2025-10-09T08:53:20Z", 1_760_000_000.0),
        ("2025-10-09T08:53:20.250000Z", 1_760_000_000.25),
        ("2025-10-09T10:53:20+02:00", 1_760_000_000.0),
    ],
)
def test_times_of_kubernetes_are_read(text: str, at_s: float) -> None:
    assert parse_rfc3339(text) == at_s


@pytest.mark.parametrize("text", ["", "yesterday", "2025-13-01T00:00:00Z", "2025-10-09T08:53:20", "2025-10-09"])
def test_what_names_no_moment_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="not a time"):
        parse_rfc3339(text)


def test_an_error_names_the_field_to_change() -> None:
    assert str(PolyremeError("it failed: 3, expected 4", field="spec.x")) == "it failed: 3, expected 4; change spec.x"
    assert str(PolyremeError("it failed")) == "it failed"


def test_errors_differ_by_what_the_caller_does_next() -> None:
    assert InvalidConfigError("x").exit_code == ExitCode.USAGE
    assert isinstance(FencedError("x"), RefusedError)
    assert RetryableError("x", delay_s=3).delay_s == 3
    assert len({code.value for code in ExitCode}) == len(ExitCode)
