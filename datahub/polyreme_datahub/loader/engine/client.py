"""A rank's end of the data engine: a ``BatchSource`` whose packs another process of the pod prepares; its messages.

An engine that dies is replaced by the launcher. The rank then connects again and repeats its request, which the new
engine answers alike.

Messages are JSON in datagrams, arrays lie in sealed memory files: a reply with arrays carries the descriptor of one
(memfd), which the client maps privately. Nothing is copied, and what a client writes into its arrays stays its own.
Memory files count to the memory of the pod, need no mounted folder, and are freed by the kernel when the last process
that maps them is gone.
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import mmap
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_api import errors as api_errors
from polyreme_api.batch import Array, PackedBatch, PreferenceSet, TokenIds
from polyreme_api.errors import EnvironmentFailedError, PolyremeError
from polyreme_datahub import errors as datahub_errors
from polyreme_datahub.loader.order.balance import StepSplit

CONNECTIONS_MAX = 10
"""Connections that one request may use up: the launcher replaces fewer engines before it gives up."""
REPLY_WAIT_S = 300.0
"""Longest wait for a reply; the launcher replaces a stuck engine long before."""
STEPS_KNOWN_MAX = 64
MESSAGE_BYTES_MAX = 1 << 17
"""Longest message; less than a socket's send buffer takes at once."""
ALIGNMENT = 64
BATCH_ARRAYS = (
    "tokens_T",
    "targets_T",
    "positions_T",
    "document_offsets",
    "branches_B4",
    "grids_I2",
    "patches_PC",
)
"""In the order of the file: patches are last, so that a client without use for them maps what is before."""

Values = npt.NDArray[Any]
Layout = Sequence[tuple[str, Sequence[int], int]]
"""Type, shape and first byte of each array."""


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A message, and the descriptor that came with it."""

    message: dict[str, Any]
    descriptor: int | None


def send(connection: socket.socket, message: Mapping[str, Any], descriptor: int | None = None) -> None:
    """Send a message.

    Raises:
        OSError: If the other end is gone, or the message is too long.
    """
    socket.send_fds(connection, [json.dumps(message).encode()], [] if descriptor is None else [descriptor])


def receive(connection: socket.socket) -> Received | None:
    """Wait for a message; None at the end of the connection."""
    data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 1)
    if not data:
        return None
    return Received(json.loads(data), descriptors[0] if descriptors else None)


_CLASSES: dict[str, type[PolyremeError]] = {
    name: found
    for module in (datahub_errors, api_errors)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, PolyremeError)
}
del _CLASSES[datahub_errors.BadRecordError.__name__]  # Has more arguments, and never reaches a rank.


def describe_error(error: Exception) -> dict[str, Any]:
    """Describe an error, so that ``error_of`` makes its like in another process."""
    if isinstance(error, PolyremeError):
        kind = next(known.__name__ for known in type(error).__mro__ if known.__name__ in _CLASSES)
        return {"error": kind, "message": error.message, "field": error.field}
    if isinstance(error, OSError):
        return {"error": "OSError", "number": error.errno, "message": error.strerror or str(error)}
    return {"error": "PolyremeError", "message": f"the data engine failed: {type(error).__name__}: {error}"}


def error_of(message: Mapping[str, Any]) -> Exception:
    """Make an error out of its description: the same class, message, exit code and field."""
    if message["error"] == "OSError":
        return builtins.OSError(message["number"], message["message"])
    return _CLASSES[message["error"]](message["message"], field=message.get("field"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """What the ranks of a pod ask its engine to open; all of them ask for the same."""

    attempt: int
    job: str
    """File of the job, which the engine reads too."""
    split: StepSplit
    """How the trainer splits a step."""
    pixels: bool
    """Whether any rank of the pod trains on patches; otherwise the engine makes none."""


class EngineSource:
    """Training data from the data engine of this pod.

    Args:
        descriptor: Of the engine's socket (``O_PATH``).
        asked: What is opened.
        open_wait_s: How long opening the data may take beside the usual wait.
        pixels: Whether this rank trains on patches; without, batches have none.

    Raises:
        PolyremeError: What opening the data raised.
    """

    def __init__(self, descriptor: int, asked: OpenRequest, *, open_wait_s: float, pixels: bool) -> None:
        self._path = f"/proc/self/fd/{descriptor}"
        self._hello = {"call": "open", **dataclasses.asdict(asked)}
        self._open_wait_s = open_wait_s + REPLY_WAIT_S
        self._pixels = pixels
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._state: Mapping[str, Any] | None = None
        """Newest state that the engine has confirmed; the next engine begins its order there."""
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Packs and tokens of a pack, by step: asked for by other threads than the one that reads."""
        try:
            opened = self._call(self._hello).message
            self._token_ids = TokenIds(**opened["token_ids"])
            self._preference_sets = [of and PreferenceSet(**of) for of in opened["preference_sets"]]
        except BaseException:
            self.close()
            raise

    def packs_in(self, step: int) -> int:
        """Packs that all ranks together train on in a step."""
        return self._described(step)[0]

    def pack_tokens_in(self, step: int) -> int:
        """Tokens of one pack of a step."""
        return self._described(step)[1]

    @property
    def token_ids(self) -> TokenIds:
        """Special tokens of the tokenizer that made this data."""
        return self._token_ids

    @property
    def preference_sets(self) -> Sequence[PreferenceSet | None]:
        """The sources in the job's order; None: its samples are no pairs."""
        return self._preference_sets

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        """Return packs ``first .. first + count`` of ``step``, as views of the engine's memory."""
        request = {"call": "packs", "step": int(step), "first": int(first), "count": int(count)}
        received = self._call(request)
        try:
            return batch_of(received.message, _arrays(received), pixels=self._pixels)
        finally:
            os.close(_arrays(received))

    def grids(self, step: int, *, first: int, count: int) -> Sequence[Array]:
        """Return the grids [I, 2] of the images of ``count`` packs of ``step``, as the indexes have them."""
        grids_I2, counts = self._arrays({"call": "grids", "step": int(step), "first": int(first), "count": int(count)})
        return np.split(grids_I2, np.cumsum(counts)[:-1])

    def patches(self, step: int, *, pack: int, images: Sequence[int]) -> Array:
        """Return the patches [P, C] of some images of a pack of ``step``, by their numbers in ``grids``."""
        numbers = [int(image) for image in images]
        found: Array = self._arrays({"call": "patches", "step": int(step), "pack": int(pack), "images": numbers})[0]
        return found

    def pairs(self, step: int, *, first: int, count: int) -> Array:
        """Return the pairs [N, 2] of ``count`` packs of ``step``: source and place of each sample."""
        request = {"call": "pairs", "step": int(step), "first": int(first), "count": int(count)}
        found: Array = self._arrays(request)[0]
        return found

    def state(self, step: int) -> Mapping[str, Any]:
        """Describe where a loader is after ``step``."""
        state: Mapping[str, Any] = self._call({"call": "state", "step": int(step)}).message["state"]
        self._state = state
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse to continue from a state that another dataset or order made.

        Raises:
            RefusedError: If the data's identity differs.
        """
        self._call({"call": "check_state", "state": dict(state)})
        self._state = state

    def refresh(self) -> None:
        """Have the engine take over changes of the mixture that were fixed since."""
        self._call({"call": "refresh"})

    def close(self) -> None:
        """Disconnect; packs that were taken stay valid."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _described(self, step: int) -> tuple[int, int]:
        known = self._known.get(step)
        if known is None:
            message = self._call({"call": "describe", "step": int(step)}).message
            known = self._known[step] = (message["packs"], message["tokens"])
            while len(self._known) > STEPS_KNOWN_MAX:
                self._known.popitem(last=False)
        return known

    def _arrays(self, request: Mapping[str, Any]) -> list[Any]:
        received = self._call(request)
        try:
            return mapped(_arrays(received), received.message["layout"], count=len(received.message["layout"]))
        finally:
            os.close(_arrays(received))

    def _call(self, request: Mapping[str, Any]) -> Received:
        """Send a request and wait for its reply; an engine that dies meanwhile is asked again.

        Raises:
            PolyremeError: What the engine's source raised, or that there is no engine any more.
        """
        with self._lock:
            for _ in range(CONNECTIONS_MAX):
                try:
                    received = self._exchange(request)
                except TimeoutError as error:
                    raise EnvironmentFailedError(
                        f"the data engine of this pod did not answer within {REPLY_WAIT_S:g} s: {request['call']}"
                    ) from error
                except ConnectionRefusedError as error:
                    self.close()
                    raise EnvironmentFailedError(
                        "the data engine of this pod died or was stuck too often in this attempt; "
                        "the pod's log has its errors"
                    ) from error
                except (BrokenPipeError, ConnectionResetError):
                    received = None
                if received is not None:
                    if "error" in received.message:
                        raise error_of(received.message)
                    return received
                self.close()
            raise EnvironmentFailedError(f"the data engine of this pod died {CONNECTIONS_MAX} times during one request")

    def _exchange(self, request: Mapping[str, Any]) -> Received | None:
        if self._connection is None:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._connection.settimeout(self._open_wait_s)
            self._connection.connect(self._path)
            opened = self._ask(self._hello)
            if opened is None or "error" in opened.message or request is self._hello:
                return opened
            self._connection.settimeout(REPLY_WAIT_S)
            if self._state is not None:
                checked = self._ask({"call": "check_state", "state": dict(self._state)})
                if checked is None or "error" in checked.message:
                    return checked
        return self._ask(request)

    def _ask(self, request: Mapping[str, Any]) -> Received | None:
        assert self._connection is not None
        send(self._connection, request)
        return receive(self._connection)


def _arrays(received: Received) -> int:
    if received.descriptor is None:
        raise EnvironmentFailedError("the data engine sent no memory: this process has too many open files")
    return received.descriptor


def mapped(descriptor: int, layout: Layout, *, count: int) -> list[Values]:
    """Map the first ``count`` arrays of a memory file; each may be written to, by this process alone."""
    sizes = [int(np.prod(shape, dtype=np.int64)) for _, shape, _ in layout[:count]]
    ends = [
        start + size * np.dtype(kind).itemsize for (kind, _, start), size in zip(layout[:count], sizes, strict=True)
    ]
    memory = mmap.mmap(descriptor, max(*ends, ALIGNMENT), access=mmap.ACCESS_COPY)
    return [
        np.frombuffer(memory, dtype=kind, count=size, offset=start).reshape(shape)
        for (kind, shape, start), size in zip(layout[:count], sizes, strict=True)
    ]


def batch_of(message: Mapping[str, Any], descriptor: int, *, pixels: bool) -> PackedBatch:
    """Return the batch of a reply, as views of its memory; without pixels there are no patches."""
    layout = message["layout"]
    found = mapped(descriptor, layout, count=len(layout) - (not pixels))
    if not pixels:
        kind, shape, _ = layout[-1]
        found.append(np.zeros((0, *shape[1:]), np.dtype(kind)))
    names, *arrays = found
    return PackedBatch(
        **dict(zip(BATCH_ARRAYS, arrays, strict=True)),
        sample_ids=json.loads(names.tobytes()),
        unmasked_tokens=message["unmasked"],
        lost_images=message["lost"],
        padding_documents=tuple(message["padding"]),
    )
