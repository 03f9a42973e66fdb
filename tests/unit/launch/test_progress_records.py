"""Which record on a Lease forbids another launcher to write its own."""

import pytest

from polyreme_api.progress import ProgressRecord


@pytest.mark.parametrize(
    ("known", "own", "outdated"),
    [
        ({"attempt": 2}, {"attempt": 1}, True),
        ({"attempt": 1, "replacement": 1}, {"attempt": 1}, True),
        ({"attempt": 1, "released": True}, {"attempt": 1}, True),
        ({"attempt": 1, "released": True}, {"attempt": 1, "released": True}, False),
        ({"attempt": 1}, {"attempt": 1, "released": True}, False),
        ({"attempt": 1, "released": True}, {"attempt": 1, "replacement": 1}, False),
        ({"attempt": 1, "released": True}, {"attempt": 2}, False),
    ],
)
def test_a_record_outdates_those_of_launchers_of_the_past(
    known: dict[str, int], own: dict[str, int], outdated: bool
) -> None:
    assert ProgressRecord.model_validate(known).outdates(ProgressRecord.model_validate(own)) is outdated
