"""Opens a job's data in a rank: reads the plan object, maps the indexes.

No database, and no bucket's client unless the objects lie in a bucket: safe after a fork, and quick to import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyreme_api.batch import PreferenceSet, TokenIds, TokenizerFile
from polyreme_api.environment import DATA_THREADS
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_api.fields import STEPS_MAX
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import AppendedChange, MixtureRecord
from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.chat_format import OWN_TEMPLATE, ChatTemplate, jinja_of
from polyreme_datahub.digests import canonical_json, digest_value
from polyreme_datahub.errors import IndexDamagedError, SourceInvalidError
from polyreme_datahub.index.blocks import BLOCKS, Journal, Opening, Sizes
from polyreme_datahub.index.damage import note_damage
from polyreme_datahub.index.format import (
    ORDER,
    PIXELS,
    PREFERENCES,
    order_of,
    parse_plan,
    pixels_of,
    plan_key,
    special_tokens,
    steps_in,
)
from polyreme_datahub.index.succession import IDENTITIES, identity_of
from polyreme_datahub.job_data import ImageSizes, longest_pack, plan_data
from polyreme_datahub.loader.evaluation import HeldOutSource
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.loader.order.epochs import steps_of_epochs
from polyreme_datahub.loader.order.identity import identity_of_order
from polyreme_datahub.loader.order.outlook import used_up_step
from polyreme_datahub.loader.order.plan import Identity, OrderPlan, unfilled_segments, used_up
from polyreme_datahub.loader.order.weighing import weighed
from polyreme_datahub.loader.read.blob_files import BlobFiles, blob_files, read_blob, samples_store
from polyreme_datahub.loader.sample.augment import AUGMENT_VERSION, AugmentSettings, settings_of
from polyreme_datahub.loader.sample.documents import DocumentCache, Reading
from polyreme_datahub.loader.sample.growth import Growth, Journaled
from polyreme_datahub.loader.sample.mapped_index import MappedIndex
from polyreme_datahub.loader.sample.reader import DecodeRoom
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.loader.steps import Amendments, Balance, Steps
from polyreme_datahub.objects import SAMPLES, Gate, open_store
from polyreme_datahub.operations.values import Blob
from polyreme_datahub.tokenizer_file import split_template, tokenizer_json
from polyreme_planner.mixture import Segment, segments_of, with_steps
from polyreme_planner.plan import shape_of
from polyreme_planner.stage_sources import check_sources

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

POLL_S = 0.2
THREADS_MAX = 8
"""Threads that decode in a process unless the environment asks for more."""
THREADS_LIMIT = 64
"""Most threads that the environment may ask for."""

_log = logging.getLogger(__name__)

Sleep = Callable[[float], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Data:
    """What is stored of a job's data."""

    store: ObjectStore
    blobs: BlobFiles
    plan: Mapping[str, Any]

    def tokenizer(self) -> Blob:
        """Read the tokenizer; a damaged one is noted, so that the next processing rebuilds it."""
        digest = self.plan["tokenizer"]
        with self._noted(digest):
            return Blob(self.blobs.read(digest), digest=digest)

    def index(self, reference: str, tokenizer: Blob, room: DecodeRoom | None = None) -> MappedIndex:
        """Map the index of a dataset's version; a damaged one is noted."""
        digest, pixel_version = self.plan["manifests"][reference], pixels_of(self.plan)
        with self._noted(digest):
            return MappedIndex(self.blobs, digest, tokenizer=tokenizer, pixel_version=pixel_version, room=room)

    @contextlib.contextmanager
    def _noted(self, digest: str) -> Iterator[None]:
        try:
            yield
        except IndexDamagedError as error:
            note_damage(self.store, digest, error.message)
            raise


def sleep_really(delay_s: float) -> None:
    """Wait on this machine's clock."""
    time.sleep(delay_s)  # noqa: TID251 - the shell


def open_packs(
    objects_url: str,
    spec: TrainingJobSpec,
    *,
    job: str,
    wait_s: float,
    sleep: Sleep,
    processes: int = 1,
    split: StepSplit | None = None,
    pixels: bool = True,
    gate: Gate | None = None,
    mixture: MixtureRecord | None = None,
    newest_mixture: Callable[[], MixtureRecord | None] | None = None,
) -> PackedSource:
    """Open the training data; see ``polyreme_datahub.loader.job_packs.open_source``.

    Args:
        objects_url: See there.
        spec: See there.
        job: See there.
        wait_s: See there.
        sleep: Waits.
        processes: Processes that read packs on the same processors as this one, with it.
        split: How the trainer splits a step, for ``spec.data.packs_by: Cost``; None: packs keep the order's numbers.
        pixels: Whether batches have patches, which only ranks of the first pipeline stage need.
        gate: Where requests to a bucket wait.
        mixture: See ``polyreme_datahub.loader.job_packs.open_source``.
        newest_mixture: Reads the mixture that was fixed last, for changes while the data are open; None: none come.
    """
    threads = decode_threads(os.environ, processes=processes)
    data = _stored(objects_url, spec, job, gate, wait_s=wait_s, sleep=sleep)
    tokenizer, room = data.tokenizer(), DecodeRoom()
    indexes = [data.index(source.dataset, tokenizer, room) for source in spec.data.sources]
    growth = None
    if spec.data.start_while_processing:
        journal = Journal(data.store, plan_key(job, plan_data(spec)))
        growth = _growth(data.plan, journal, spec, indexes, data.blobs)
    lengths = tuple(index.lengths for index in indexes)
    order = _order(spec, lengths, segments_of(spec, mixture), version=order_of(data.plan))
    if growth is not None:
        order = dataclasses.replace(order, blocks=growth.ends)
    pairs = [index.manifest.kind == PREFERENCES for index in indexes]
    remake = functools.partial(_by_mixture, plan=data.plan, spec=spec, growing=growth is not None, pairs=pairs)
    order, identity = remake(order, mixture)
    balance = Balance(shape_of(spec), split) if split is not None and spec.data.packs_by == "Cost" else None
    amendments = None if newest_mixture is None else Amendments(mixture, newest_mixture, remake)
    steps = Steps(
        order,
        indexes,
        identity,
        balance=balance,
        growth=growth,
        amendments=amendments,
        tokenizer=data.plan["tokenizer"],
    )
    reading = Reading(
        seed=order.seed,
        names=order.names,
        augment=_augment(spec),
        placeholders=spec.data.on_damage == "Placeholder",
        pixels=pixels,
        threads=threads,
    )
    return PackedSource(
        steps,
        indexes,
        DocumentCache(indexes, data.store, reading),
        preference_sets=_preference_sets(data.plan, spec, indexes),
        pixels=pixels,
    )


def _preference_sets(
    plan: Mapping[str, Any], spec: TrainingJobSpec, indexes: Sequence[MappedIndex]
) -> list[PreferenceSet | None]:
    """Name the content of the sources that are preferences: an index names tokens and images, the plan the resizing."""
    both = zip(spec.data.sources, indexes, _augment(spec), strict=True)
    return [
        PreferenceSet(
            digest=digest_value([identity_of(plan, source.dataset), pixels_of(plan)]), augmented=augment is not None
        )
        if index.manifest.kind == PREFERENCES
        else None
        for source, index, augment in both
    ]


def decode_threads(environment: Mapping[str, str], *, processes: int) -> int:
    """Return how many threads of this process decode.

    Args:
        environment: May name the number.
        processes: Processes that decode on the same processors; without a number each takes its share of them.

    Raises:
        InvalidConfigError: If the number is none, or too large.
    """
    value = environment.get(DATA_THREADS, "")
    if not value:
        return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // processes))
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= THREADS_LIMIT):
        raise InvalidConfigError(
            f"environment variable is no number from 1 to {THREADS_LIMIT}: {DATA_THREADS}={value!r}",
            field=DATA_THREADS,
        )
    return int(value)


def open_steps(
    objects_url: str, spec: TrainingJobSpec, *, job: str, wait_s: float = 0.0, sleep: Sleep = sleep_really
) -> TrainingJobSpec:
    """Return a spec with the number of its steps: given, or counted for its epochs when the data were processed.

    Raises:
        EnvironmentFailedError: If they are not counted within ``wait_s``.
    """
    epochs, waited_s = spec.training.epochs, 0.0
    if epochs is None:
        return spec
    while True:
        plan = read_plan(samples_store(objects_url, None), spec, job, wait_s=wait_s, sleep=sleep)
        if (steps := steps_in(plan, epochs)) is not None:
            return with_steps(spec, steps)
        if waited_s >= wait_s:
            raise EnvironmentFailedError(
                f"steps of {epochs} epochs are not counted: waited {wait_s:g} s for them, at most data.waitSeconds",
                field="spec.data.waitSeconds",
            )
        sleep(POLL_S)
        waited_s += POLL_S


def count_steps(objects_url: str, spec: TrainingJobSpec, *, job: str) -> int:
    """Count the steps of a job's epochs, by the data that are processed.

    Raises:
        InvalidConfigError: As ``steps_of_epochs``, or if the warm-up would be longer than the run.
    """
    data = _stored(objects_url, spec, job, None)
    tokenizer = data.tokenizer()
    lengths = tuple(data.index(source.dataset, tokenizer).lengths for source in spec.data.sources)
    order = _order(spec, lengths, segments_of(spec), version=order_of(data.plan))
    epochs, warmup_steps = spec.training.epochs or 1, spec.training.optimizer.warmup_steps
    steps = steps_of_epochs(weighed(order, spec.data), epochs)
    if warmup_steps > steps:
        raise InvalidConfigError(
            f"the warm-up is longer than the run: {warmup_steps} steps of {steps}, which {epochs} epochs of the data "
            f"take; expected at most {steps}",
            field="spec.training.optimizer.warmupSteps",
        )
    return steps


def open_held_out(
    objects_url: str, spec: TrainingJobSpec, *, job: str, wait_s: float, sleep: Sleep, gate: Gate | None = None
) -> HeldOutSource | None:
    """Open the held-out data; see ``polyreme_datahub.loader.job_packs.open_evaluation``."""
    if spec.evaluation is None:
        return None
    data, sets = _stored(objects_url, spec, job, gate, wait_s=wait_s, sleep=sleep), spec.evaluation.sets
    tokenizer = data.tokenizer()
    return HeldOutSource(
        [part.name for part in sets],
        [data.index(part.dataset, tokenizer) for part in sets],
        samples_max=spec.evaluation.samples_max,
        pack_tokens=longest_pack(spec),
        tokenizer=tokenizer_json(tokenizer.data),
        store=data.store,
        placeholders=spec.data.on_damage == "Placeholder",
    )


def open_tokenizer(objects_url: str, spec: TrainingJobSpec, *, job: str, gate: Gate | None = None) -> TokenizerFile:
    """Return the tokenizer that a processed job's data was made with; waits for no processing."""
    data = _stored(objects_url, spec, job, gate)
    content, template = split_template(data.tokenizer().data)
    parsed = OWN_TEMPLATE if template is None else ChatTemplate.model_validate(template)
    return TokenizerFile(
        content=content,
        chat_template=jinja_of(parsed),
        template=canonical_json(parsed.model_dump(mode="json", by_alias=True)),
        image_tokens_max=ImageSizes.of(spec).image_tokens_max,
        pixel_version=pixels_of(data.plan),
    )


def open_token_ids(objects_url: str, spec: TrainingJobSpec, *, job: str) -> TokenIds:
    """Return the special tokens of a processed job's data; reads a manifest, and no samples."""
    store = open_store(objects_url, patience=SAMPLES)
    plan = read_plan(store, spec, job)
    manifest = read_blob(store, plan["manifests"][spec.data.sources[0].dataset])
    return TokenIds(**special_tokens(manifest))


def entries_of_state(
    objects_url: str, spec: TrainingJobSpec, state: Mapping[str, Any], *, job: str, gate: Gate | None = None
) -> int | None:
    """Return how many entries of the schedule were known when a loader saved its state; reads no index.

    For states of releases whose resume points have no record of the mixture: their schedules could not change.

    Raises:
        EnvironmentFailedError: If the data is not processed.
    """
    plan = read_plan(samples_store(objects_url, gate), spec, job)
    for count in range(len(spec.data.schedule), -1, -1):
        mixture = MixtureRecord(base=tuple(spec.data.schedule[:count]))
        order = _order(spec, (), segments_of(spec, mixture), version=order_of(plan))
        if _identity(order, spec, plan, mixture).at(0) == state.get("data"):
            return count
    return None


def _order(
    spec: TrainingJobSpec,
    lengths: tuple[npt.NDArray[np.int64], ...],
    segments: tuple[Segment, ...],
    *,
    version: int,
) -> OrderPlan:
    limits = tuple(source.epochs_max for source in spec.data.sources)
    return OrderPlan(
        seed=spec.data.seed,
        names=tuple(source.name for source in spec.data.sources),
        lengths=lengths,
        segments=segments,
        packs_per_step=spec.training.packs_per_step,
        pack_tokens=spec.data.sequence_tokens,
        epochs_max=limits if any(limits) else (),
        last_step=spec.training.steps if any(limits) else None,
        version=version,
    )


def _identity(
    order: OrderPlan, spec: TrainingJobSpec, plan: Mapping[str, Any], mixture: MixtureRecord | None
) -> Identity:
    augment = _augment(spec)
    settings = [of and dataclasses.asdict(of) for of in augment]
    return identity_of_order(
        order,
        spec,
        [identity_of(plan, source.dataset) for source in spec.data.sources],
        mixture,
        augmentation=[AUGMENT_VERSION, settings] if any(augment) else [],
        pixel_version=pixels_of(plan),
    )


def _augment(spec: TrainingJobSpec) -> tuple[AugmentSettings | None, ...]:
    return tuple(settings_of(spec.data.augment if of.augment is None else of.augment) for of in spec.data.sources)


def _by_mixture(
    order: OrderPlan,
    mixture: MixtureRecord | None,
    *,
    plan: Mapping[str, Any],
    spec: TrainingJobSpec,
    growing: bool,
    pairs: Sequence[bool],
) -> tuple[OrderPlan, Identity]:
    """Return an order with the weights of a mixture, and its identity."""
    if mixture is not None:
        mixture = _without_other_kinds(spec, mixture, pairs)
    order = _amended(order, spec, mixture)
    check_sources(spec, order.segments, preferences=pairs)
    if mixture is not None and not growing:
        # While samples come, ranks that open the data one after the other would judge a source differently.
        order, mixture = _without_vain_changes(order, spec, mixture)
    used = weighed(order, spec.data)
    if not unfilled_segments(used) and (step := used_up_step(used, spec.training.steps or STEPS_MAX)) is not None:
        raise SourceInvalidError(used_up(used, step), field="spec.data.sources[].epochsMax")
    return used, _identity(used, spec, plan, mixture)


def _without_other_kinds(spec: TrainingJobSpec, mixture: MixtureRecord, pairs: Sequence[bool]) -> MixtureRecord:
    """Leave out appended changes that weigh preferences in a supervised stage, or the other way round."""
    kept: tuple[AppendedChange, ...] = ()
    for change in mixture.changes:
        tried = mixture.model_copy(update={"changes": (*kept, change)})
        try:
            check_sources(spec, segments_of(spec, tried), preferences=pairs)
        except InvalidConfigError as error:
            _log.warning("weights from step %d on are ignored: %s", change.step, error.message)
        else:
            kept = (*kept, change)
    return mixture.model_copy(update={"changes": kept})


def _without_vain_changes(
    order: OrderPlan, spec: TrainingJobSpec, mixture: MixtureRecord
) -> tuple[OrderPlan, MixtureRecord]:
    """Leave out appended changes by which a run would have no samples: what runs must not fail by them.

    One may weigh a source without a sample that fits, or leave only sources that have had their epochs. Which ones
    follows from the data and the changes before, so all ranks of all attempts leave the same ones out, and a later
    change does not bring one back.
    """
    kept: tuple[AppendedChange, ...] = ()
    last = spec.training.steps or STEPS_MAX
    for change in mixture.changes:
        tried = _amended(order, spec, mixture.model_copy(update={"changes": (*kept, change)}))
        if unfilled_segments(tried) or used_up_step(weighed(tried, spec.data), last) is not None:
            _log.warning("weights from step %d on are ignored: a source has no sample left that fits", change.step)
        else:
            kept = (*kept, change)
    mixture = mixture.model_copy(update={"changes": kept})
    return _amended(order, spec, mixture), mixture


def _amended(order: OrderPlan, spec: TrainingJobSpec, mixture: MixtureRecord | None) -> OrderPlan:
    return dataclasses.replace(order, segments=segments_of(spec, mixture))


def _growth(
    plan: Mapping[str, Any], journal: Journal, spec: TrainingJobSpec, indexes: Sequence[MappedIndex], blobs: BlobFiles
) -> Growth:
    """Return the blocks of the sources: those of the plan, or those that are sealed while the job trains."""
    references = [source.dataset for source in spec.data.sources]
    if BLOCKS in plan:
        return Growth([Sizes.from_value(plan[BLOCKS][reference]) for reference in references])
    growing = Opening.from_value(plan["opening"]).growing
    places = sorted(growing)
    return Growth(
        [Sizes((), (), growing[reference].blocks) for reference in references],
        Journaled(
            journal=journal,
            indexes=indexes,
            places=[places.index(reference) for reference in references],
            blobs=blobs,
        ),
    )


def _stored(
    objects_url: str,
    spec: TrainingJobSpec,
    job: str,
    gate: Gate | None,
    *,
    wait_s: float = 0.0,
    sleep: Sleep = sleep_really,
) -> _Data:
    store = samples_store(objects_url, gate)
    return _Data(store, blob_files(objects_url, gate=gate), read_plan(store, spec, job, wait_s=wait_s, sleep=sleep))


def read_plan(
    store: ObjectStore, spec: TrainingJobSpec, job: str, *, wait_s: float = 0.0, sleep: Sleep = sleep_really
) -> Mapping[str, Any]:
    """Read the plan object; one that is not there yet is waited for.

    Of a job that starts while its data are processed, the opening does for a plan.

    Raises:
        EnvironmentFailedError: If it does not come within ``wait_s``.
        IndexDamagedError: If its bytes are damaged.
    """
    key = plan_key(job, plan_data(spec))
    name = key.rpartition("/")[2]
    waited_s = 0.0
    while True:
        try:
            return parse_plan(store.get(key), name)
        except ObjectNotFoundError as error:
            if spec.data.start_while_processing and (opening := Journal(store, key).opening()) is not None:
                return _as_plan(opening)
            if waited_s >= wait_s:
                raise EnvironmentFailedError(
                    f"data is not processed: waited {wait_s:g} s for {name}, at most data.waitSeconds",
                    field="spec.data.waitSeconds",
                ) from error
        sleep(POLL_S)
        waited_s += POLL_S


def _as_plan(opening: Opening) -> Mapping[str, Any]:
    growing = opening.growing.items()
    return {
        "references": opening.references,
        "tokenizer": opening.tokenizer,
        "manifests": {**opening.manifests, **{reference: of.manifest for reference, of in growing}},
        IDENTITIES: {reference: of.identity for reference, of in growing},
        PIXELS: opening.pixels,
        ORDER: opening.order,
        "opening": opening.to_value(),
    }
