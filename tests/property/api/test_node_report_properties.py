"""What a node's conditions say is read back as it was written, and reading never raises."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.node_report import (
    COUNT_MAX,
    EVENTS_MAX,
    MESSAGE_CHARACTERS_MAX,
    TIME_MAX_S,
    NodeEvent,
    decode,
    encode,
)

WORDS = st.text(string.ascii_letters + string.digits + "_.:/-", min_size=1, max_size=64)
EVENTS = st.builds(
    NodeEvent,
    code=st.from_regex(r"\A[A-Z][A-Za-z0-9]{0,30}\Z"),
    device=st.one_of(st.just(""), WORDS),
    count=st.integers(1, COUNT_MAX),
    last_s=st.integers(0, TIME_MAX_S),
    boot=st.one_of(st.just(""), WORDS),
    sequence=st.integers(0, 10**15),
    action=st.sampled_from(["", "None", "Watch", "RestartApplication", "Reset", "Reboot", "Replace", "Support"]),
)


@given(st.text(max_size=2_000), st.lists(EVENTS, max_size=2 * EVENTS_MAX))
def test_what_fits_comes_back_and_the_message_is_bounded(sentence: str, events: list[NodeEvent]) -> None:
    message = encode(sentence, events)
    assert len(message) <= MESSAGE_CHARACTERS_MAX
    read, problem = decode(message)
    assert problem == ""
    assert list(read) == events[: len(read)]
    assert read or not events


@given(st.one_of(st.text(max_size=3_000), st.text("code=Xid79 last=\n0123456789-", max_size=1_200)))
def test_any_text_is_read_without_an_error(message: str) -> None:
    events, problem = decode(message)
    assert len(events) <= EVENTS_MAX
    assert problem or len(events) == message.count("\n")


def test_a_megabyte_impossible_counts_and_foreign_keys_are_reported() -> None:
    assert decode("x" * 1_000_000) == ((), "its message has more than 1024 characters, so no event of it is read")
    for line in (
        "code=Xid79 count=0",
        f"code=Xid79 count={COUNT_MAX + 1}",
        f"code=Xid79 last={TIME_MAX_S + 1}",
        "code=Xid79 last=-1",
        "code=Xid79 code=Xid48",
        "code=Xid79 action=Burn",
        "device=GPU-1",
        "code=Xid79 price=1",
    ):
        events, problem = decode(f"a sentence\ncode=Xid48\n{line}")
        assert [event.code for event in events] == ["Xid48"]
        assert problem == f"line 3 of its message is no event: {line!r}"
