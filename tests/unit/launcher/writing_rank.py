"""A rank without torch that writes as the variable ``WRITES`` says, in every way that a process can."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

FLOOD_LINES = 400_000
"""Of the flood: 40 MiB, more than pipes, backlogs and files hold together."""
BINARY = bytes(range(256)) * 40
BACKTRACE = 50


def main() -> int:
    match os.environ["WRITES"]:
        case "all ways":
            _all_ways()
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            _all_ways()
            ctypes.string_at(0)
        case "flood":
            for number in range(FLOOD_LINES):
                print(f"{number:>9} {'x' * 90}")
            print("the last words")
        case "binary":
            os.write(1, BINARY)
        case "errors":
            threads = [threading.Thread(target=_fail, args=(BACKTRACE,)) for _ in range(4)]
            for thread in threads:
                thread.start()
                thread.join()
            raise RuntimeError("the cause")
        case "stray":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            print("a child that leaves the group holds the pipe")
    return 0


def _all_ways() -> None:
    """Python's two streams, C's, the descriptors themselves, a child; no line end after the last line."""
    print("by print")
    print("by standard error", file=sys.stderr)
    ctypes.CDLL(None).printf(b"by C's printf\n")
    os.write(2, b"by a descriptor\n")
    subprocess.run(["echo", "by a child"], check=True)
    sys.stderr.write("without an end")
    sys.stderr.flush()


def _fail(depth: int) -> None:
    if depth:
        _fail(depth - 1)
    raise ValueError("a thread fails")
