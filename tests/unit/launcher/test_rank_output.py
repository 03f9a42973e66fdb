"""What real processes write, through pipes, files and the pod's own output."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme_api.rank_logs import ATTEMPTS_KEPT, RankAttempt, split_line
from polyreme_launcher.line_printer import LinePrinter
from polyreme_launcher.log_files import PART_BYTES_MAX, LogFile, earlier_part, read_end
from polyreme_launcher.log_lines import lines_of
from polyreme_launcher.rank_output import RankOutput
from polyreme_launcher.rank_processes import RankParent
from polyreme_system.clock import SystemClock
from tests.unit.launcher.writing_rank import BACKTRACE, BINARY, FLOOD_LINES

pytestmark = pytest.mark.slow

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(Path(__file__).parents[3]),
    "POLYREME_RANK_TARGET": "tests.unit.launcher.writing_rank:main",
}
ALL_WAYS = ["by print", "by standard error", "by C's printf", "by a descriptor", "by a child", "without an end"]


class Pod:
    """Ranks of one attempt, and the output of their pod: read when it is asked for, and not before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reader, self.writer = os.pipe()
        self.printer = LinePrinter(self.writer, SystemClock())
        self.output = RankOutput(
            on_data=self.printer.take,
            on_end=self.printer.end,
            on_trouble=lambda prefix, words: self.printer.take(prefix, f"{words}\n".encode()),
        )
        self.ended: dict[int, tuple[int | None, int | None]] = {}

    def run(self, *writes: str) -> None:
        """Run a rank for each of these until all have ended."""

        async def story() -> None:
            parent = RankParent(
                environment=ENVIRONMENT, on_exit=self._on_exit, on_forked=lambda: None, on_fail=lambda error: None
            )
            parent.start()
            for rank, what in enumerate(writes):
                log = RankAttempt(1, rank)
                variables = {**ENVIRONMENT, "WRITES": what}
                with self.output.open((1, rank), path=self.folder / log.file_name, prefix=log.prefix) as output:
                    parent.fork(attempt=1, rank=rank, environment=variables, output=output, descriptors={})
            async with asyncio.timeout(120):
                while len(self.ended) < len(writes):
                    await asyncio.sleep(0.01)
            await parent.close()

        asyncio.run(story())

    def file(self, rank: int) -> bytes:
        return read_end(self.folder / RankAttempt(1, rank).file_name, bytes_max=1 << 30)

    def printed(self) -> dict[int, list[str]]:
        """What the pod has printed, by rank."""
        chunks: list[bytes] = []

        def read() -> None:
            while chunk := os.read(self.reader, 1 << 16):
                chunks.append(chunk)

        reading = threading.Thread(target=read)
        reading.start()
        self.output.close()
        self.printer.close(60)
        os.close(self.writer)
        reading.join()
        lines: dict[int, list[str]] = {}
        text = b"".join(chunks).decode()
        assert text.endswith("\n")
        for line in text[:-1].split("\n"):
            log, words = split_line(line)
            assert log is not None, line
            lines.setdefault(log.rank, []).append(words)
        return lines

    def _on_exit(self, attempt: int, rank: int, code: int | None, number: int | None, message: str) -> None:
        self.output.finish((attempt, rank))
        self.ended[rank] = code, number


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path)
    yield made
    os.close(made.reader)


def test_what_a_process_wrote_before_it_was_killed_or_crashed_is_kept_and_printed_in_order(pod: Pod) -> None:
    pod.run("all ways", "crash", "all ways")
    assert pod.ended == {0: (None, signal.SIGKILL), 1: (None, signal.SIGSEGV), 2: (None, signal.SIGKILL)}
    for rank in range(3):
        assert pod.file(rank).decode() == "\n".join(ALL_WAYS)
    assert pod.printed() == dict.fromkeys(range(3), ALL_WAYS)


def test_a_process_that_writes_without_end_waits_for_no_reader_and_its_last_lines_are_kept(pod: Pod) -> None:
    """Nothing is read of the pod's output until the process has ended."""
    pod.run("flood")
    assert pod.ended == {0: (0, None)}
    path = pod.folder / RankAttempt(1, 0).file_name
    assert path.stat().st_size <= PART_BYTES_MAX
    assert earlier_part(path).stat().st_size <= PART_BYTES_MAX
    assert lines_of(pod.file(0))[-1] == "the last words"
    assert len(pod.file(0)) > PART_BYTES_MAX
    printed = pod.printed()[0]
    assert printed[-1] == "the last words"
    lost = sum(int(line.split()[0].replace(",", "")) for line in printed if "dropped: they came faster" in line)
    assert lost > 0
    shown = [line for line in printed if "dropped: they came faster" not in line]
    assert len(shown) + lost == FLOOD_LINES + 1
    numbers = [int(line.split()[0]) for line in shown[:-1]]
    assert numbers == sorted(set(numbers))


def test_binary_is_lines_of_text_and_the_file_has_every_byte(pod: Pod) -> None:
    pod.run("binary")
    assert pod.file(0) == BINARY
    printed = pod.printed()[0]
    assert printed == lines_of(BINARY)
    assert len(printed) == BINARY.count(b"\n") + 1
    assert all(line.isprintable() or "\t" in line for line in printed)


def test_tracebacks_stay_in_order_within_a_rank_while_others_write(pod: Pod) -> None:
    pod.run("errors", "errors", "flood")
    printed = pod.printed()
    for rank in range(2):
        lines = printed[rank]
        assert lines == lines_of(pod.file(rank))
        assert lines.count("ValueError: a thread fails") == 4
        assert len([line for line in lines if "in _fail" in line]) == 4 * 4
        assert any(f"Previous line repeated {BACKTRACE - 3} more times" in line for line in lines)
        assert lines[-1] == "RuntimeError: the cause"


def test_a_process_left_behind_that_holds_the_pipe_delays_no_end(pod: Pod) -> None:
    pod.run("stray")
    assert pod.printed() == {0: ["a child that leaves the group holds the pipe"]}


def test_output_that_no_file_takes_is_printed_and_that_is_reported_once(pod: Pod, tmp_path: Path) -> None:
    pod.folder = tmp_path / "no-such-folder"
    pod.run("all ways")
    lines = pod.printed()[0]
    assert [line for line in lines if "can't be kept" not in line] == ALL_WAYS
    (trouble,) = [line for line in lines if "can't be kept" in line]
    assert trouble.endswith(": No such file or directory")


def test_what_was_written_before_an_end_is_in_the_file_when_the_end_is_taken(tmp_path: Path) -> None:
    output = RankOutput(on_data=lambda *_: None, on_end=lambda _: None, on_trouble=lambda *_: None)
    for number in range(30):
        with output.open((1, number), path=tmp_path / str(number), prefix="") as descriptor:
            os.write(descriptor, b"x" * 10_000)
            output.finish((1, number))
        assert (tmp_path / str(number)).stat().st_size == 10_000
    output.close()


def test_a_pod_keeps_the_files_of_its_newest_attempts(tmp_path: Path) -> None:
    output = RankOutput(on_data=lambda *_: None, on_end=lambda _: None, on_trouble=lambda *_: None)
    others = {"job.json", "born-0.a1"}
    for name in others:
        (tmp_path / name).touch()
    for attempt in range(1, ATTEMPTS_KEPT + 4):
        log = RankAttempt(attempt, 3)
        earlier_part(tmp_path / log.file_name).write_text("earlier\n")
        with output.open((attempt, 3), path=tmp_path / log.file_name, prefix=log.prefix) as descriptor:
            os.write(descriptor, b"a line\n")
        output.finish((attempt, 3))
    output.close()
    kept = {RankAttempt(attempt, 3).file_name for attempt in range(4, ATTEMPTS_KEPT + 4)}
    assert {path.name for path in tmp_path.iterdir()} == others | kept | {f"{name}.1" for name in kept}


def test_the_end_of_a_file_begins_with_a_line_and_reaches_into_its_earlier_part(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", part_bytes_max=100)
    for number in range(30):
        log.write(b"line %04d\n" % number)
    log.close()
    assert read_end(tmp_path / "log", bytes_max=1000).splitlines()[-1] == b"line 0029"
    assert len(read_end(tmp_path / "log", bytes_max=1000)) > 100
    for bytes_max in range(60):
        lines = read_end(tmp_path / "log", bytes_max=bytes_max).splitlines()
        assert lines == [b"line %04d" % number for number in range(30 - bytes_max // 10, 30)]
    assert read_end(tmp_path / "none", bytes_max=10) == b""
