"""Why something failed reaches the Lease, and so the people: real processes say it."""

import logging
import os
from pathlib import Path

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.progress import MESSAGE_CHARACTERS_MAX
from polyreme_launcher.exit_message import short_sentence
from tests.unit.local.kubelet.stack import Stack


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_ranks_error_is_reported_with_its_exit_on_the_lease(tmp_path: Path, rank: int) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        stack.write_script(f"raise={rank}:store s3://me:secret@host/x is away")
        await stack.until(lambda: (r := stack.record()) and r.exits, "the exit is on the Lease")
        record = stack.record()
        assert record is not None
        assert (record.exits[0].rank, record.exits[0].code) == (rank, 1)
        assert record.message == "RuntimeError: store s3://***@host/x is away"


@pytest.mark.slow
async def test_an_attempt_of_another_plan_is_refused_on_the_lease_and_the_next_one_runs(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        await stack.attempt(2, planHash="0123456789abcdef")
        await stack.until(lambda: (r := stack.record()) and r.attempt == 2 and r.exits, "the refusal is there")
        record = stack.record()
        assert record is not None
        assert [(found.rank, found.code) for found in record.exits] == [(0, 2)]
        assert "the status names 0123456789abcdef" in record.message
        await stack.attempt(3)
        await stack.until_training(3)


@pytest.mark.slow
async def test_a_damaged_resume_point_is_refused_on_the_lease(tmp_path: Path) -> None:
    points = tmp_path / "checkpoints" / "attempts"
    points.mkdir(parents=True)
    (points / "000001.json").write_text('{"attempt": 1, "resu')
    async with Stack(tmp_path).running() as stack:
        await stack.submit()
        await stack.until(lambda: (r := stack.record()) and r.exits, "the refusal is there")
        record = stack.record()
        assert record is not None
        assert [(found.rank, found.code) for found in record.exits] == [(0, 2)]
        assert "attempts/000001.json" in record.message
        assert not record.released


@pytest.mark.slow
async def test_a_disk_that_keeps_ranks_from_starting_is_an_environment_failure(tmp_path: Path) -> None:
    async with Stack(tmp_path).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        # A folder in the place of the file: the write of the next attempt's job fails as on a broken disk.
        job = stack.pod_directory(0) / "job.json"
        job.unlink()
        (job / "in the way").mkdir(parents=True)
        await stack.attempt(2)
        await stack.until(lambda: (r := stack.record()) and r.attempt == 2 and r.exits, "the exit is there")
        record = stack.record()
        assert record is not None
        assert [(found.rank, found.code) for found in record.exits] == [(0, 7)]
        assert "rank can't be started" in record.message


def test_a_sentence_is_one_line_of_bounded_length_without_credentials() -> None:
    assert short_sentence("can't reach\n  postgresql://u:p@db/x\n") == "can't reach postgresql://***@db/x"
    assert len(short_sentence("x" * 5000)) == MESSAGE_CHARACTERS_MAX


@pytest.mark.slow
def test_a_rank_reports_the_words_of_its_last_logged_error() -> None:
    from polyreme_launcher.rank import LastError

    told, tells = os.pipe()
    log = logging.getLogger("polyreme.test.words")
    word = LastError(str(tells))
    log.addHandler(word)
    try:
        log.warning("nothing")
        log.error("rank %d ends: %s", 3, InvalidConfigError("no such model: 'x'", field="spec.model"))
        for _ in range(2):
            word.close()
        assert os.read(told, 4096).decode() == "no such model: 'x'; change spec.model"
    finally:
        log.removeHandler(word)
        os.close(told)
        os.close(tells)
