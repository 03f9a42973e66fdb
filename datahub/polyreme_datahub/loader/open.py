"""Opens a job's data in a rank: reads the plan object, maps the indexes.

No database, and no bucket's client unless the objects lie in a bucket: safe after a fork, and quick to import.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyreme_api.batch import TokenIds, TokenizerFile
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.chat_format import OWN_TEMPLATE, ChatTemplate, jinja_of
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.blocks import BLOCKS, Journal, Opening, Sizes
from polyreme_datahub.index.damage import note_damage
from polyreme_datahub.index.format import parse_plan, plan_key, special_tokens
from polyreme_datahub.index.succession import IDENTITIES, identity_of
from polyreme_datahub.job_data import longest_pack, plan_data
from polyreme_datahub.loader.augment import AUGMENT_VERSION, settings_of
from polyreme_datahub.loader.balance import StepSplit
from polyreme_datahub.loader.blob_files import BlobFiles, blob_files, read_blob, samples_store
from polyreme_datahub.loader.decode_pool import DecodeRoom, decode_threads
from polyreme_datahub.loader.evaluation import HeldOutSource
from polyreme_datahub.loader.growth import Growth, JournalGrowth
from polyreme_datahub.loader.order import ORDER_VERSION, WINDOW_PACKS, OrderPlan, Segment
from polyreme_datahub.loader.shards import MappedIndex
from polyreme_datahub.loader.source import Balance, PackedSource
from polyreme_datahub.objects import SAMPLES, Gate, open_store
from polyreme_datahub.operations.values import Blob
from polyreme_datahub.tokenizer_file import split_template, tokenizer_json
from polyreme_planner.curriculum import mixture_changes, packs_of_stages
from polyreme_planner.plan import shape_of

POLL_S = 0.2

Sleep = Callable[[float], None]


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
) -> PackedSource:
    """Open the training data; see ``polyreme_datahub.hub.open_source``.

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
    """
    threads = decode_threads(os.environ, processes=processes)
    store, blobs = samples_store(objects_url, gate), blob_files(objects_url, gate=gate)
    plan = _plan(store, spec, job, wait_s=wait_s, sleep=sleep)
    growing = spec.data.start_while_processing
    names = tuple(source.name for source in spec.data.sources)
    digests = [plan["manifests"][source.dataset] for source in spec.data.sources]
    tokenizer = Blob(_tokenizer(store, blobs, plan["tokenizer"]), digest=plan["tokenizer"])
    room = DecodeRoom()
    indexes = [_mapped(store, blobs, digest, tokenizer, room) for digest in digests]
    growth = _growth(plan, Journal(store, plan_key(job, plan_data(spec))), spec, indexes, blobs) if growing else None
    order = OrderPlan(
        seed=spec.data.seed,
        names=names,
        lengths=tuple(index.lengths for index in indexes),
        segments=segments_of(spec),
        packs_per_step=spec.training.packs_per_step,
        pack_tokens=spec.data.sequence_tokens,
        blocks=growth.ends if growth is not None else (),
    )
    identities = [identity_of(plan, source.dataset) for source in spec.data.sources]
    facts = [names, identities, spec.data.seed, [[s.first_step, s.weights] for s in order.segments]]
    facts += [order.packs_per_step, order.pack_tokens, ORDER_VERSION, WINDOW_PACKS]
    if growing:
        facts += [BLOCKS]
    packed = [[order.packs_in(segment), order.tokens_in(segment)] for segment in order.segments]
    if packed != [[order.packs_per_step, order.pack_tokens]] * len(packed):
        facts += packed
    augment = [settings_of(spec.data.augment if of.augment is None else of.augment) for of in spec.data.sources]
    if any(augment):
        facts += [AUGMENT_VERSION, [settings and dataclasses.asdict(settings) for settings in augment]]
    identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    placeholders = spec.data.on_damage == "Placeholder"
    balance = Balance(shape_of(spec), split) if split is not None and spec.data.packs_by == "Cost" else None
    return PackedSource(
        order,
        indexes,
        identity=identity,
        store=store,
        placeholders=placeholders,
        augment=augment,
        threads=threads,
        balance=balance,
        pixels=pixels,
        growth=growth,
    )


def open_held_out(
    objects_url: str, spec: TrainingJobSpec, *, job: str, wait_s: float, sleep: Sleep, gate: Gate | None = None
) -> HeldOutSource | None:
    """Open the held-out data; see ``polyreme_datahub.hub.open_evaluation``."""
    if spec.evaluation is None:
        return None
    store, blobs = samples_store(objects_url, gate), blob_files(objects_url, gate=gate)
    plan = _plan(store, spec, job, wait_s=wait_s, sleep=sleep)
    sets = spec.evaluation.sets
    tokenizer = Blob(_tokenizer(store, blobs, plan["tokenizer"]), digest=plan["tokenizer"])
    return HeldOutSource(
        [part.name for part in sets],
        [_mapped(store, blobs, plan["manifests"][part.dataset], tokenizer) for part in sets],
        samples_max=spec.evaluation.samples_max,
        pack_tokens=longest_pack(spec),
        tokenizer=tokenizer_json(tokenizer.data),
        store=store,
        placeholders=spec.data.on_damage == "Placeholder",
    )


def open_tokenizer(objects_url: str, spec: TrainingJobSpec, *, job: str, gate: Gate | None = None) -> TokenizerFile:
    """Return the tokenizer that a processed job's data was made with; waits for no processing."""
    store = samples_store(objects_url, gate)
    plan = _plan(store, spec, job, wait_s=0.0, sleep=sleep_really)
    content, template = split_template(_tokenizer(store, blob_files(objects_url, gate=gate), plan["tokenizer"]))
    parsed = OWN_TEMPLATE if template is None else ChatTemplate.model_validate(template)
    return TokenizerFile(content=content, chat_template=jinja_of(parsed))


def open_token_ids(objects_url: str, spec: TrainingJobSpec, *, job: str) -> TokenIds:
    """Return the special tokens of a processed job's data; reads a manifest, and no samples."""
    store = open_store(objects_url, patience=SAMPLES)
    plan = _plan(store, spec, job, wait_s=0.0, sleep=sleep_really)
    manifest = read_blob(store, plan["manifests"][spec.data.sources[0].dataset])
    return TokenIds(**special_tokens(manifest))


def segments_of(spec: TrainingJobSpec) -> tuple[Segment, ...]:
    """Return the weights of the sources by step, in the order of the sources, and the packs of each stage."""
    names = [source.name for source in spec.data.sources]
    weights = {1: tuple(source.weight for source in spec.data.sources)}
    for change in mixture_changes(spec):
        given = {weight.source: weight.weight for weight in change.weights}
        weights[change.from_step] = tuple(given.get(name, 0) for name in names)
    packs = {of.first_step: of for of in packs_of_stages(spec)}
    segments: list[Segment] = []
    packed = packs[1]
    for first_step in sorted({*weights, *packs}):
        before, packed = packed, packs.get(first_step, packed)
        # Stages whose steps are packed alike have no border between them.
        if first_step in weights or (before.per_step, before.tokens) != (packed.per_step, packed.tokens):
            weighed = weights.get(first_step) or segments[-1].weights
            segments.append(
                Segment(
                    first_step=first_step, weights=weighed, packs_per_step=packed.per_step, pack_tokens=packed.tokens
                )
            )
    return tuple(segments)


def _mapped(
    store: ObjectStore, blobs: BlobFiles, digest: str, tokenizer: Blob, room: DecodeRoom | None = None
) -> MappedIndex:
    """Map an index; a damaged one is noted, so that the next processing makes it again."""
    try:
        return MappedIndex(blobs, digest, tokenizer=tokenizer, room=room)
    except IndexDamagedError as error:
        note_damage(store, digest, error.message)
        raise


def _tokenizer(store: ObjectStore, blobs: BlobFiles, digest: str) -> bytes:
    try:
        return blobs.read(digest)
    except IndexDamagedError as error:
        note_damage(store, digest, error.message)
        raise


def _growth(
    plan: Mapping[str, Any], journal: Journal, spec: TrainingJobSpec, indexes: Sequence[MappedIndex], blobs: BlobFiles
) -> Growth:
    """Return the blocks of the sources: those of the plan, or those that are sealed while the job trains."""
    references = [source.dataset for source in spec.data.sources]
    if BLOCKS in plan:
        return Growth([Sizes.from_value(plan[BLOCKS][reference]) for reference in references])
    growing = Opening.from_value(plan["opening"]).growing
    places = sorted(growing)
    return JournalGrowth(
        journal,
        indexes,
        [places.index(reference) for reference in references],
        [growing[reference].blocks for reference in references],
        blobs=blobs,
    )


def _plan(store: ObjectStore, spec: TrainingJobSpec, job: str, *, wait_s: float, sleep: Sleep) -> Mapping[str, Any]:
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
        "opening": opening.to_value(),
    }


def sleep_really(delay_s: float) -> None:
    """Wait on this machine's clock."""
    time.sleep(delay_s)  # noqa: TID251 - the shell
