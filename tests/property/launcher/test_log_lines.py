"""Any bytes in: each line goes out once, in order, whatever pieces they come in and however little is kept."""

import codecs
import itertools
import re

from hypothesis import example, given
from hypothesis import strategies as st

from polyreme_launcher.log_lines import Backlog, LineCutter, lines_of

LONGEST = 16
WORDS = st.sampled_from(
    [
        *(b"a", b"step 3 loss 2.5", b"\r", b"\r\n", b"\n", b"\n\n", b"\t", "é漢".encode(), b"\xff\xc3", b"\x1b[31m"),
        *(b"\x1b]0;title\x07", b"\x00\x07", b"x" * (LONGEST - 1), "ü".encode() * LONGEST),
    ]
)
STREAMS = st.lists(st.one_of(WORDS, st.binary(max_size=20)), max_size=30).map(b"".join)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


@given(STREAMS, st.lists(st.integers(min_value=0), max_size=20))
@example(b"a" * 14 + b"\xed\xa0\0", [])
def test_each_line_comes_out_once_and_in_order_in_whatever_pieces_its_bytes_come(data: bytes, cuts: list[int]) -> None:
    cutter = LineCutter(LONGEST)
    lines = [line for piece in pieces(data, cuts) for line in cutter.feed(piece)] + cutter.end()
    ends = data.count(b"\n")
    assert len(lines) == ends + (data.rpartition(b"\n")[2] != b"")
    assert lines == lines_of(data, LONGEST)
    for line, raw in zip(lines, data.split(b"\n"), strict=False):
        assert line == only(raw)


def is_begun_character(data: bytes) -> bool:
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data) == ""


def only(raw: bytes) -> str:
    """What is shown of a line, worked out by itself and from its whole bytes."""
    last = raw.rstrip(b"\r").rpartition(b"\r")[2]
    more = len(last) - LONGEST
    shown = last[:LONGEST]
    if more > 0 and (cut := next((back for back in (1, 2, 3) if is_begun_character(shown[-back:])), 0)):
        more, shown = more + cut, shown[:-cut]
    text = shown.decode(errors="replace")
    text = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(\x07|\x1b\\)?|[ -/]*[0-~])?", "", text)
    text = "".join(each for each in text if each == "\t" or not (each < " " or "\x7f" <= each <= "\x9f"))
    return text + (f" ... ({more:,} more bytes)" if more > 0 else "")


@given(
    st.lists(st.tuples(st.binary(max_size=12).map(lambda data: data.replace(b"\r", b"a")), st.booleans()), max_size=40),
    st.integers(min_value=1, max_value=30),
)
def test_lines_that_a_slow_reader_loses_are_counted_and_the_others_are_whole(
    written: list[tuple[bytes, bool]], bytes_max: int
) -> None:
    """The newest are kept."""
    backlog, cutter, lost, shown = Backlog(bytes_max), LineCutter(), 0, list[str]()
    for chunk, read in written:
        if chunk:
            backlog.add(chunk)
        if read:
            gone, lines = backlog.take().lines(cutter)
            lost, shown = lost + gone, shown + lines
    gone, lines = backlog.take().lines(cutter)
    lost, shown = lost + gone, shown + lines + cutter.end()
    data = b"".join(chunk for chunk, _ in written)
    every = lines_of(data)
    assert len(shown) + lost == len(every)
    left = iter(every)
    assert all(line in left for line in shown), "in order, none twice, none that was not written"


def test_the_newest_bytes_are_kept() -> None:
    backlog, cutter = Backlog(64 << 10), LineCutter()
    for number in range(100_000):
        backlog.add(b"line %d\n" % number)
    lost, lines = backlog.take().lines(cutter)
    assert lost + len(lines) == 100_000
    assert len(lines) > 4_000
    assert lines == [f"line {number}" for number in range(lost, 100_000)]


def test_secrets_are_hidden_and_a_progress_bar_is_its_last_state() -> None:
    bar = b"".join(b"\r%3d%%|####|" % share for share in range(101))
    assert lines_of(b"begin\n" + bar + b"\nAWS_SECRET=hunter22x\n") == ["begin", "100%|####|", "AWS_SECRET=***"]
