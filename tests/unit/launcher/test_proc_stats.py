"""What the kernel says of ranks, read from real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polyreme_api.rank_state import RankState
from polyreme_launcher.proc_stats import ProcessSampler

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")

SPIN = "import sys\nfor line in sys.stdin:\n    [i * i for i in range(3_000_000)]\n    print(flush=True)\n"


def test_a_stopped_process_is_seen_as_such_and_one_that_computes_is_not_idle() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sightings = ProcessSampler()
        (seen,) = sightings.sample({3: process.pid}, {})
        assert (seen.idle, seen.watched) == (False, False), "it has never been seen before, and has no page"
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        (seen,) = sightings.sample({3: process.pid}, {3: RankState(rank=3, step=7)})
        assert (seen.step, seen.idle, seen.stopped, seen.watched) == (7, False, False, True)
        (seen,) = sightings.sample({3: process.pid}, {})
        assert (seen.idle, seen.stopped) == (True, False)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        (seen,) = sightings.sample({3: process.pid}, {})
        assert (seen.idle, seen.stopped) == (True, True)
        process.kill()


def test_a_process_that_is_gone_is_neither() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert ProcessSampler().sample({3: process.pid}, {}) == ()
