"""Operations that misbehave, each in its own way, for the sandbox's tests. A sample's record says which."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.values import Blob, Dropped, Value

HELD: list[bytes] = []


def grow(megabytes: int) -> bytes:
    return os.urandom(2**20) * megabytes


def loop() -> None:
    while True:
        pass


def fork_bomb() -> None:
    while True:
        os.fork()


def die_as_long_as(path: str) -> None:
    """Die like a process that the system has killed, until the file is gone that stands for its hunger."""
    with Path(path).open("rb") as file:
        left = file.read()
    if left:
        os.kill(os.getpid(), signal.SIGKILL)


def leak() -> None:
    HELD.append(grow(150))


def raise_address() -> None:
    raise ValueError(object())


DEEDS: Mapping[str, Callable[..., Any]] = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "loop": loop,
    "sleep": time.sleep,
    "memory": lambda: [grow(64) for _ in range(1000)],
    "leak": leak,
    "fork": fork_bomb,
    "program": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "file": lambda path: Path(path).write_bytes(b"x"),
    "network": lambda: socket.create_connection(("127.0.0.1", 9)),
    "kill parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "exception": lambda: dict[str, int]()["missing"],
    "stop": lambda: sys.exit(0),
    "address": raise_address,
    "die while": die_as_long_as,
    "nothing": lambda: None,
}


@operation("act", 1, inputs=("record",))
def act(record: Value) -> Value:
    """Do what the record says."""
    deed, *arguments = record.data["do"]
    if deed == "bad":
        raise BadRecordError("sample is bad", rule="badness")
    if deed == "drop":
        raise Dropped("too plain")
    if deed == "type":
        return "no value"  # type: ignore[return-value]
    if deed == "not json":
        return Value.of({"a": {1, 2}})
    if deed == "foreign blob":
        return Value.of({}, kept=[Blob(b"never seen")])
    if deed == "large":
        return Value.of({"size": arguments[0]}, made=[Blob(bytes(arguments[0]))])
    if deed == "environment":
        return Value.of({"names": sorted(os.environ), "user": os.geteuid()})
    DEEDS[deed](*arguments)
    return Value.of({"did": deed}, kept=record.blobs.values())


@operation("copy", 1, inputs=("act",))
def copy(acted: Value) -> Value:
    """Make a new blob out of each; crash on one that asks for it."""
    if any(blob.data == b"crash" for blob in acted.blobs.values()):
        ctypes.string_at(0)
    made = [Blob(blob.data[::-1]) for blob in acted.blobs.values()]
    return Value.of({"made": [blob.digest for blob in made]}, made=made)


@operation("act-on-many", 1, inputs=("record",), batch=4)
def act_on_many(records: Sequence[Value]) -> list[Value | BadRecordError | Dropped]:
    """Do what each record says; the first that fails ends the whole batch."""
    made: list[Value | BadRecordError | Dropped] = []
    for record in records:
        try:
            made.append(act(record))
        except (BadRecordError, Dropped) as decision:
            made.append(decision)
    return [Value.of({**one.data, "batch": len(records)}) if isinstance(one, Value) else one for one in made]
