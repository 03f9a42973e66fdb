"""A process that asked for it ends when its parent ends, also when the parent was faster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

CHILD = """
import os, signal, sys
from polyreme_system.parent_death import end_with_parent

end_with_parent(int(sys.argv[1]), signal.Signals(int(sys.argv[2])))
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = """
import os, signal, subprocess, sys

subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]])
signal.pause()
"""
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, CHILD, str(int(number))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        parent.kill()
        # The child holds the other end of the pipe as long as it lives.
        assert parent.stdout.read() == ""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_child_whose_parent_is_gone_ends_at_once(number: signal.Signals) -> None:
    another = os.getppid()
    ended = subprocess.run([sys.executable, "-c", CHILD, str(another), str(int(number))], check=False, timeout=60)
    assert ended.returncode == -number
