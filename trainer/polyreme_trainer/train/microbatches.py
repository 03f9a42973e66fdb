"""A step's packs as one rank trains on them: read, images assigned to encoders, then copied to the model's device.

Reading needs only the host, and packs are a pure function of the step. So a thread reads the packs of the next step
while this one is trained; the main thread does everything that touches the device or other ranks.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from polyreme_api.batch import BatchSource, PackedBatch
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, NotSealedError
from polyreme_trainer.parallel.mesh import Meshes, packs_of
from polyreme_trainer.train.image_assignment import BalancedImages, ImageBalancer
from polyreme_trainer.train.inputs import DrawnAnswers, Inputs, to_inputs
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState

SEALED_POLL_S = 0.2
"""Time between two tries to read samples that are still processed."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadPacks:
    """Packs of a microbatch of this rank, in host memory."""

    batch: PackedBatch
    balanced: BalancedImages | None
    """Encoders of the images, if other data-parallel ranks take part."""
    first: int = 0
    """Number of the first pack in its step."""
    drawn: DrawnAnswers | None = None
    """Of packs whose answers the model has drawn."""


def read_packs(
    source: BatchSource, settings: TrainSettings, meshes: Meshes, image_balancer: ImageBalancer | None, number: int
) -> list[ReadPacks]:
    """Read this rank's packs of a step, one microbatch at a time: each has whole packs, and equally many.

    The last places of a step that its packs do not fill are null packs, which the source makes.

    Raises:
        InvalidConfigError: If packs, microbatches and ranks do not fit.
        PolyremeError: If the source cannot read them.
    """
    packs = source.packs_in(number)
    mine = packs_of(settings.layout, meshes.rank, packs)
    count = settings.pipeline.microbatches
    if len(mine) % count:
        raise InvalidConfigError(
            f"microbatches do not fit: {count} do not divide the {len(mine)} packs of a data-parallel rank",
            field="spec.parallelism.microbatches",
        )
    share = len(mine) // count
    places = len(mine) * settings.layout.dp
    firsts = [[dp + place for dp in range(0, places, len(mine))] for place in range(0, len(mine), share)]
    balanced = (
        [None] * count
        if image_balancer is None
        else image_balancer.assign(
            source, number, [[range(first, first + share) for first in by_rank] for by_rank in firsts]
        )
    )
    return [
        ReadPacks(source.packs(number, first=first, count=share), one, first)
        for first, one in zip(mine[::share], balanced, strict=True)
    ]


def to_microbatches(state: TrainState, packs: Sequence[ReadPacks], settings: TrainSettings) -> list[Inputs]:
    """Copy packs to the device of the model.

    Raises:
        InvalidConfigError: If images do not fit their media tokens, or a stream cannot be split evenly.
    """
    device = settings.rank.device_type
    return [
        to_inputs(
            read.batch,
            device=device,
            media_token=state.media_token,
            sharing=state.sharing,
            balanced=read.balanced,
            dtype=state.computes_in,
            reference=None if state.weigher is None else state.weigher.reference,
            drawn=read.drawn,
        )
        for read in packs
    ]


def read_microbatches(
    state: TrainState, source: BatchSource, settings: TrainSettings, meshes: Meshes, number: int
) -> list[Inputs]:
    """Read this rank's packs of a step and copy them to the device, one after another."""
    return to_microbatches(state, read_packs(source, settings, meshes, state.image_balancer, number), settings)


class PackReader:
    """Reads the packs of steps in order, at most one step ahead of the training.

    One thread makes every call that walks the source's order, so the source needs no lock. An error while reading the
    next step is raised when that step is taken: a run that ends before never sees it, and notes about damage that the
    source has made stay.

    Where a step's samples are still processed, the thread stays free, so that the state of the step before can be
    saved, and ``take`` asks again until they are there.

    Args:
        source: Training data.
        settings: The run.
        meshes: This rank's groups.
        image_balancer: Assigns images to encoders; None: none are exchanged.
        on_wait: Called once with what ``take`` waits for, when samples are still processed.
    """

    def __init__(
        self,
        source: BatchSource,
        settings: TrainSettings,
        meshes: Meshes,
        *,
        image_balancer: ImageBalancer | None,
        on_wait: Callable[[str], None] = _log.info,
    ) -> None:
        self._on_wait = on_wait
        self._source, self._settings, self._meshes, self._image_balancer = source, settings, meshes, image_balancer
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="packs")
        self._pause = threading.Event()
        """Never set: what is waited for is in another process."""
        self._ahead: tuple[int, concurrent.futures.Future[list[ReadPacks]]] | None = None

    def __enter__(self) -> Self:
        """Start without reading anything."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the read in progress, and drop its result."""
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> list[ReadPacks]:
        """Return the packs of a step, and begin to read those of the next one.

        Raises:
            EnvironmentFailedError: If its samples are not processed within ``data_wait_s``.
            PolyremeError: What reading this step raised.
        """
        ahead = self._ahead
        reading = ahead[1] if ahead is not None and ahead[0] == step else self._begin(step)
        packs = self._sealed(step, reading)
        self._ahead = (step + 1, self._begin(step + 1)) if step < self._settings.steps else None
        return packs

    def _sealed(self, step: int, reading: concurrent.futures.Future[list[ReadPacks]]) -> list[ReadPacks]:
        waited_s = 0.0
        while True:
            try:
                return reading.result()
            except NotSealedError as error:
                if waited_s >= self._settings.data_wait_s:
                    raise EnvironmentFailedError(
                        f"{error.message}; step {step} waited {self._settings.data_wait_s:g} s for it, at most "
                        "data.waitSeconds",
                        field="spec.data.waitSeconds",
                    ) from error
                if not waited_s:
                    self._on_wait(error.message)
            self._pause.wait(SEALED_POLL_S)
            waited_s += SEALED_POLL_S
            reading = self._begin(step)

    def read(self, step: int) -> list[ReadPacks]:
        """Return the packs of any step, once more or out of turn; errors as ``take``."""
        return self._sealed(step, self._begin(step))

    def state(self, step: int) -> Mapping[str, Any]:
        """Describe the source's position after a step, however far it has been read."""
        return self._thread.submit(self._source.state, step).result()

    def refresh(self, settings: TrainSettings) -> None:
        """Take over changed settings, and have the source take over changes of the mixture, after what is read now."""
        self._settings = settings
        self._thread.submit(self._source.refresh).result()

    def _begin(self, step: int) -> concurrent.futures.Future[list[ReadPacks]]:
        return self._thread.submit(read_packs, self._source, self._settings, self._meshes, self._image_balancer, step)
