"""Records of a checkpoint root, the figures made of them, and injected faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyreme.commands.quickstart import identical_losses, sentences
from polyreme.local_run.fault_options import Injection, parse_injection
from polyreme.main import invoke
from polyreme.run_files.records import RunRecords, read_records
from polyreme.run_files.timeline import Moment, Timeline, read_timeline
from polyreme_api.commit_marker import CommitMarker, SavedFile, seal
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import COMMIT_MARKER, ResumePoint, attempt_key, steps_key
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import parse_steps
from polyreme_system.clock import SystemClock


def step(attempt: int, number: int, *, loss: float = 1.0, ended_at_s: float = 0.0) -> StepRecord:
    return StepRecord(attempt=attempt, step=number, loss=loss, ended_at_s=ended_at_s)


def marker(*, step: int, size_bytes: int, held_out_loss: float | None = None) -> CommitMarker:
    return CommitMarker(
        attempt=1,
        step=step,
        world=1,
        model_digest="",
        model_shape={},
        plan_hash="",
        files={"data": SavedFile.of(b"1" * size_bytes)},
        loader={},
        committed_at_s=0.0,
        held_out_loss=held_out_loss,
    )


def write_root(root: Path) -> None:
    """Attempt 1 trained 5 steps and saved after 3; attempt 2 continued from there."""
    points = [ResumePoint(attempt=1), ResumePoint(attempt=2, resume_from="a000001-s00000003")]
    for point in points:
        path = root / attempt_key(point.attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(point.model_dump_json(by_alias=True))
    for attempt, numbers in ((1, range(1, 6)), (2, range(4, 9))):
        path = root / steps_key(attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [step(attempt, number, loss=1 / number).model_dump_json(by_alias=True) + "\n" for number in numbers]
        path.write_text("".join(lines))
    for name, committed in (("a000001-s00000003", True), ("a000001-s00000006", True), ("a000002-s00000006", False)):
        (root / name).mkdir()
        (root / name / "data").write_bytes(b"1234")
        if committed:
            (root / name / COMMIT_MARKER).write_bytes(seal(marker(step=int(name[-1]), size_bytes=4)))


def test_history_holds_each_step_once_and_the_rest_is_discarded(tmp_path: Path) -> None:
    write_root(tmp_path)
    records = read_records(tmp_path)
    assert [(record.attempt, record.step) for record in records.history] == [
        *((1, number) for number in (1, 2, 3)),
        *((2, number) for number in (4, 5, 6, 7, 8)),
    ]
    assert [(record.attempt, record.step) for record in records.discarded] == [(1, 4), (1, 5)]


def test_checkpoints_are_listed_with_their_held_out_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_root(tmp_path)
    measured = tmp_path / "a000001-s00000006" / COMMIT_MARKER
    measured.write_bytes(seal(marker(step=6, size_bytes=4, held_out_loss=0.25)))
    assert invoke(["checkpoint", "ls", tmp_path.as_uri(), "-o", "json"]) == ExitCode.OK
    losses = {row["name"]: row["heldoutLoss"] for row in json.loads(capsys.readouterr().out)["items"]}
    assert losses == {"a000001-s00000003": None, "a000001-s00000006": 0.25, "a000002-s00000006": None}


def test_torn_and_late_checkpoints_are_distinguished(tmp_path: Path) -> None:
    write_root(tmp_path)
    entries = {entry.name: entry for entry in read_records(tmp_path).checkpoints}
    assert entries["a000001-s00000003"].history
    late = entries["a000001-s00000006"]
    assert (late.committed, late.history) == (True, False)
    torn = entries["a000002-s00000006"]
    assert (torn.committed, torn.history) == (False, False)


@pytest.mark.parametrize("content", [b"", b"123", None])
def test_a_marked_checkpoint_whose_files_are_not_there_in_full_is_torn(tmp_path: Path, content: bytes | None) -> None:
    write_root(tmp_path)
    data = tmp_path / "a000001-s00000003" / "data"
    data.unlink() if content is None else data.write_bytes(content)
    entries = {entry.name: entry for entry in read_records(tmp_path).checkpoints}
    assert (entries["a000001-s00000003"].committed, entries["a000001-s00000003"].history) == (False, False)


def test_a_root_that_does_not_exist_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    records = read_records(tmp_path / "none")
    assert (list(records.points), records.history, records.evaluation) == ([], [], None)


@pytest.mark.parametrize(
    "tail", [b'{"attempt":1,"st', b"\x00\x00\x00", b'{"attempt":1}\n{"attempt":1,"step":3,"loss":1}\n']
)
def test_a_torn_line_ends_the_records(tail: bytes) -> None:
    whole = step(1, 1).model_dump_json(by_alias=True).encode() + b"\n"
    assert [record.step for record in parse_steps(whole + tail)] == [1]


def test_losses_are_compared_bit_for_bit_and_only_after_a_restart(tmp_path: Path) -> None:
    write_root(tmp_path)
    disturbed = read_records(tmp_path)
    same = [step(1, number, loss=1 / number) for number in range(1, 7)]
    reference = RunRecords(points=[ResumePoint(attempt=1)], steps={1: same}, checkpoints=(), evaluation=None)
    assert identical_losses(disturbed, reference) == (3, 3)
    same[4] = step(1, 5, loss=1 / 5 + 1e-16)
    assert identical_losses(disturbed, reference) == (3, 2)


def test_a_timeline_outlives_its_process_and_drops_repeats_and_damage(tmp_path: Path) -> None:
    first = Timeline(tmp_path, SystemClock())
    first.add(Moment(at_s=1.0, kind="attempt", attempt=1, text="Start"))
    first.add(Moment(at_s=2.0, kind="attempt", attempt=1, text="Start"))
    second = Timeline(tmp_path, SystemClock())
    second.add(Moment(at_s=3.0, kind="released", attempt=1))
    with (tmp_path / "timeline.jsonl").open("a") as stream:
        stream.write('damaged\n{"at_s": 4')
    assert [(moment.at_s, moment.kind) for moment in read_timeline(tmp_path)] == [(1.0, "attempt"), (3.0, "released")]


def test_an_injection_reads_back_what_it_writes() -> None:
    injection = parse_injection("kill-rank=1@130")
    assert injection == Injection(fault="kill-rank", target=1, step=130)
    assert str(injection) == "kill-rank=1@130"


@pytest.mark.parametrize("text", ["", "kill-rank", "kill-rank=1", "kill-rank=a@1", "kill-node=1@1", "kill-rank=1@1 "])
def test_other_forms_of_injection_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="kill-rank=RANK@STEP"):
        parse_injection(text)


def test_the_quickstart_ends_in_sentences_and_a_link_to_its_report() -> None:
    figures = {
        "attempts": 2,
        "resumed_identical": 1,
        "compared_steps": 50,
        "heldout_exact_match_ratio": 0.95,
        "heldout_pages": 240,
        "loss_first": 6.5382,
        "loss_last": 0.00286,
        "restart_s": 0.81,
        "report": "/srv/report.html",
    }
    assert sentences(figures) == [
        "rank 1 was killed at step 70; the job came back as attempt 2, and its next step was done 0.81 s later",
        "all 50 losses that were compared are the same, bit for bit, as in an undisturbed run",
        "228 of 240 held-out pages are answered exactly; the loss fell from 6.538 to 0.003",
        "open the report: file:///srv/report.html",
    ]
    differing = sentences({**figures, "resumed_identical": 0, "restart_s": None})
    assert "some differ" in differing[1]
    assert differing[0].endswith("attempt 2")
