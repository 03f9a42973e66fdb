"""The phase before a preference stage: its pairs are scored under the weights with which the stage begins.

The pairs of a step run through the same packs, layout and kernels as when they are trained, so in the first step every
margin is exactly zero. What other jobs have scored is taken over; what this one scores it leaves to others, a part at a
time, so a scoring that is killed continues where it was. Several gangs with the same order begin at different parts.

Legend: B branches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from polyreme_api.batch import BatchSource, EvaluationSource, PackedBatch
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, StepFailedError
from polyreme_api.progress import RankPhase
from polyreme_api.store import ObjectStore
from polyreme_planner.curriculum import CurriculumStage
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.fingerprint import frozen_fingerprint, saved_fingerprint
from polyreme_trainer.train.forward import answering, branch_scores, held_out_packs
from polyreme_trainer.train.microbatches import PackReader, to_microbatches
from polyreme_trainer.train.records import Reporter
from polyreme_trainer.train.reference_scores import (
    Part,
    ReferenceScores,
    Samples,
    Scored,
    ScoreStore,
    keep,
    of_run,
    parts_of,
)
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, settle

Pair = tuple[int, int]
"""Source and sample."""
Row = tuple[int, int, float]
"""Source and sample of a branch, and its score."""
SCORES_POLL_S = 1.0
"""Time between two looks for scores that other programs write."""
FORM = 1
"""Of a score; it rises when the same pair gets another."""


class Known:
    """What the first rank knows of a stage's scores; the parts of a stage have no pair in common."""

    def __init__(self, by_source: Mapping[int, Scored]) -> None:
        self._base = by_source
        self._added: dict[int, list[Scored]] = {}

    def lacks(self, source: int, samples: Samples) -> Samples:
        """Return which of some samples have no score."""
        return samples[~self._base.get(source, Scored.nothing()).has(samples)]

    def count_lacking(self, parts: Sequence[Part]) -> int:
        """Count the pairs of parts that have no score."""
        return sum(len(self.lacks(*pairs)) for part in parts for pairs in part.pairs)

    def add(self, source: int, scored: Scored) -> None:
        """Add scores that were not known."""
        self._added.setdefault(source, []).append(scored)

    def wanted(self, parts: Sequence[Part]) -> dict[int, Scored]:
        """Return the scores of the parts' pairs; a pair that could not be read has none, which stays so."""
        by_source: dict[int, list[Samples]] = {}
        for part in parts:
            for source, samples in part.pairs:
                by_source.setdefault(source, []).append(samples)
        found: dict[int, Scored] = {}
        for source, planned in by_source.items():
            samples = np.concatenate(planned)
            known = self._base.get(source, Scored.nothing()).joined(self._added.get(source, ()))
            found[source] = known.only(samples).joined([Scored.unknown(samples)])
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Everything that a rank needs to score the pairs of a stage."""

    settings: TrainSettings
    state: TrainState
    source: BatchSource
    reader: PackReader
    meshes: Meshes
    evaluation: EvaluationSource | None
    reporter: Reporter
    stop: Callable[[], bool]
    """Whether this rank was asked to end."""

    def run(self, stage: CurriculumStage) -> ReferenceScores | None:
        """Return the scores of a stage; every rank calls it. None if some rank was asked to end.

        Raises:
            InvalidConfigError: If the stage has begun and has pairs that were not scored, or lost its scores.
            StepFailedError: If a score is no finite number.
        """
        parts = parts_of(self.source, stage)
        kept = self._kept(stage)
        lacking = 0 if kept is None else Known(kept.by_source).count_lacking(parts)
        kept, lacking = collectives.from_first((kept, lacking) if self._is_first else None, self.meshes.control_group)
        if kept is not None and not lacking:
            return kept
        named = stage.objective.reference.name
        if not named and self.state.step != stage.first_step - 1:
            raise self._lost(stage, lacking)
        stored = ScoreStore(self._shared_store, named or self._reference(stage), self.source.preference_sets)
        # What the run has already goes first, so that what was trained once is trained the same again.
        before = {} if kept is None else kept.by_source
        if named:
            return self._written(stage, parts, stored, before)
        return self._scored(stage, parts, stored, before)

    @property
    def _is_first(self) -> bool:
        return self.settings.rank.rank == 0

    def _kept(self, stage: CurriculumStage) -> ReferenceScores | None:
        """Return, on the first rank, what the run has kept, or the run whose checkpoint it has started from."""
        if not self._is_first:
            return None
        saved = self.settings.checkpoint
        kept, start = of_run(self._run_store, stage), saved.start_from
        # Without a checkpoint of its own, it continues after a step only where the other run had the same data.
        if kept is None and start is not None and saved.resume_from is None and self.state.step >= stage.first_step:
            kept = of_run(start.store, stage, root=start.root)
            return None if kept is None else keep(self._run_store, stage, kept)
        return kept

    def _lost(self, stage: CurriculumStage, lacking: int) -> InvalidConfigError:
        what = f"{lacking:,} of its pairs were not scored" if lacking else "its scores are not beside the checkpoints"
        return InvalidConfigError(
            f"stage {stage.name!r} can't continue after step {self.state.step}: {what}, and its reference is the "
            f"model before step {stage.first_step}; undo the change of steps or sources, or begin a new job with the "
            "stage",
            field="spec.training.stages[].steps or spec.data.schedule",
        )

    def _scored(
        self, stage: CurriculumStage, parts: Sequence[Part], stored: ScoreStore, before: Mapping[int, Scored]
    ) -> ReferenceScores | None:
        """Score what is not known."""
        known = self._known(stored, parts, before)
        settle(self.state)
        total = sum(part.count for part in parts)
        have = total - known.count_lacking(parts)
        made = 0
        self._report(have, total, made)
        for part in _turned(parts, "" if self.settings.scores is None else self.settings.scores.run):
            gained = self._score(part, stored, known)
            if gained is None:
                return None
            found, scored = gained
            have, made = have + found + scored, made + scored
            if found or scored:
                self._report(have, total, made)
        return self._keep(stage, parts, known, self._held_out())

    def _keep(
        self, stage: CurriculumStage, parts: Sequence[Part], known: Known, held_out: Mapping[int, Scored]
    ) -> ReferenceScores:
        """Keep what the first rank knows of the stage's pairs, and give it to all."""
        kept = keep(self._run_store, stage, ReferenceScores(known.wanted(parts), held_out)) if self._is_first else None
        return collectives.from_first(kept, self.meshes.control_group)

    def _written(
        self, stage: CurriculumStage, parts: Sequence[Part], stored: ScoreStore, before: Mapping[int, Scored]
    ) -> ReferenceScores | None:
        """Wait until other programs have scored every pair that can be read; None if some rank was asked to end.

        Raises:
            EnvironmentFailedError: If no score comes for ``data_wait_s``.
            PolyremeError: What reading a pair raised that has no score.
        """
        group, total = self.meshes.control_group, sum(part.count for part in parts)
        had, waited_s = -1, 0.0
        looked: set[int] = set()
        damaged: list[Pair] = []
        while True:
            known = self._known(stored, parts, before, damaged)
            has = total - known.count_lacking(parts)
            stops = collectives.gather_to_first(self.stop(), group)
            has, stopped = collectives.from_first((has, any(stops or ())) if self._is_first else None, group)
            self._report(has - len(damaged), total, 0)
            if stopped or has == total:
                return None if stopped else self._keep(stage, parts, known, {})
            if has == had:
                damaged += self._damaged(parts, known, looked)
            had, waited_s = has, waited_s * (has == had)
            if waited_s >= self.settings.data_wait_s:
                raise EnvironmentFailedError(
                    f"{total - has:,} of {total:,} pairs have no score under reference "
                    f"{stage.objective.reference.name!r}, and for {waited_s:g} s none came, at most data.waitSeconds: "
                    f"write them as {stored.folders()}/*.npz",
                    field="spec.training.stages[].objective.reference.name or spec.data.waitSeconds",
                )
            threading.Event().wait(SCORES_POLL_S)
            waited_s += SCORES_POLL_S

    def _report(self, have: int, total: int, made: int) -> None:
        message = f"{have:,} of {total:,} pairs have a reference score, {made:,} made by this run"
        self.reporter.phase(RankPhase.SCORING, message=message)

    @property
    def _run_store(self) -> ObjectStore:
        return self.settings.checkpoint.store

    @property
    def _shared_store(self) -> ObjectStore:
        return self._run_store if self.settings.scores is None else self.settings.scores.store

    def _reference(self, stage: CurriculumStage) -> str:
        """Name all that a score depends on beside the pair."""
        named = {
            "form": FORM,
            "weights": saved_fingerprint(self.state, self.meshes),
            "frozen": "" if self.state.adapters is None else frozen_fingerprint(self.state, self.meshes),
            "shape": dataclasses.asdict(self.settings.shape_at(stage.first_step)),
            "precision": str(self.settings.precision),
            "products": [self.settings.rank.device_type, torch.get_float32_matmul_precision()],
        }
        return hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()

    def _known(
        self,
        stored: ScoreStore,
        parts: Sequence[Part],
        before: Mapping[int, Scored],
        damaged: Sequence[Pair] = (),
    ) -> Known:
        """Read what is stored, on the first rank; damaged pairs count as known, without a score."""
        found: dict[int, Scored] = {}
        for source in {source for part in parts for source, _ in part.pairs} if self._is_first else ():
            nothing = Scored.unknown(np.array([sample for of, sample in damaged if of == source], dtype=np.int64))
            found[source] = before.get(source, Scored.nothing()).finite().joined([stored.load(source), nothing])
        return Known(found)

    def _damaged(self, parts: Sequence[Part], known: Known, looked: set[int]) -> list[Pair]:
        """Read one more step that lacks scores, and return its pairs that can't be read, on the first rank."""
        group = self.meshes.control_group
        lacking = _lacking(self.source, parts, known, looked) if self._is_first else None
        step = collectives.from_first(lacking, group)
        if step is None:
            return []
        looked.add(step)
        read = {pair for packs in self.reader.read(step) for pair in _pairs(packs.batch)}
        everywhere = collectives.gather_to_first(read, group)
        return [] if everywhere is None else sorted(set(_planned(self.source, step)).difference(*everywhere))

    def _score(self, part: Part, stored: ScoreStore, known: Known) -> tuple[int, int] | None:
        """Score a part unless it is known.

        Returns:
            Pairs that others have scored since, and that this run has, on the first rank; None if some rank was asked
            to end.
        """
        group, found, lacking = self.meshes.control_group, 0, False
        stops = collectives.gather_to_first(self.stop(), group)
        if self._is_first:
            for source, samples in part.pairs:
                if len(lacks := known.lacks(source, samples)):
                    others = stored.find(source, samples)
                    if others is None:
                        lacking = True
                    else:
                        known.add(source, others)
                        found += len(lacks)
        lacking, stopped = collectives.from_first((lacking, any(stops or ())) if self._is_first else None, group)
        if stopped or not lacking:
            return None if stopped else (found, 0)
        rows: list[Row] = []
        with answering(self.state.models.values()):
            for step in part.steps:
                rows += self._scores_of(step)
        gathered = self._gathered(rows, f"of steps {part.steps.start} to {part.steps.stop - 1}")
        return found, _commit(part, stored, known, gathered) if self._is_first else 0

    def _gathered(self, rows: list[Row], what: str) -> list[Row]:
        """Collect rows on the first rank.

        Raises:
            StepFailedError: On all ranks, if a score is no finite number: nothing of it is kept.
        """
        group = self.meshes.control_group
        found = [row for each in collectives.gather_to_first(rows, group) or () for row in each]
        bad = sum(not math.isfinite(score) for _, _, score in found)
        if bad := collectives.from_first(bad if self._is_first else None, group):
            raise StepFailedError(
                f"{bad} scores of pairs {what} are no finite numbers under the reference",
                field="spec.training.optimizer.learningRate, or the data of these steps",
            )
        return found

    def _scores_of(self, step: int) -> list[Row]:
        """Run a step's packs forward."""
        packs = self.reader.read(step)
        microbatches = to_microbatches(self.state, packs, self.settings)
        return [
            row
            for read, microbatch in zip(packs, microbatches, strict=True)
            for row in _rows(read.batch, branch_scores(self.state, microbatch, self.meshes))
        ]

    def held_out(self) -> ReferenceScores:
        """Score the held-out pairs alone; every rank calls it, and gets the same."""
        held_out = self._held_out()
        scores = ReferenceScores({}, held_out) if self._is_first else None
        return collectives.from_first(scores, self.meshes.control_group)

    def _held_out(self) -> dict[int, Scored]:
        """Score the held-out pairs, by their set, on the first rank; only this run needs them."""
        if self.evaluation is None or not self.settings.evaluation.every_steps:
            return {}
        rows: list[Row] = []
        with answering(self.state.models.values()):
            for _, batch, microbatch in held_out_packs(self.state, self.settings, self.evaluation, self.meshes):
                rows += _rows(batch, branch_scores(self.state, microbatch, self.meshes))
        found = self._gathered(rows, "that are held out")
        return {number: _of_rows(found, number) for number in {row[0] for row in found}}


def _lacking(source: BatchSource, parts: Sequence[Part], known: Known, looked: set[int]) -> int | None:
    """Find a step, not yet looked at, with a pair that has no score."""
    for part in parts:
        for step in part.steps if known.count_lacking([part]) else ():
            if step not in looked and any(known.lacks(of, np.array([at])).size for of, at in _planned(source, step)):
                return step
    return None


def _planned(source: BatchSource, step: int) -> list[Pair]:
    """Return the pairs of a step, damaged ones too."""
    rows = np.asarray(source.pairs(step, first=0, count=source.packs_in(step))).tolist()
    return [(of, sample) for of, sample in rows]


def _commit(part: Part, stored: ScoreStore, known: Known, rows: Sequence[Row]) -> int:
    """Write what was not known, and return how much that is; the first rank alone does."""
    made = 0
    for source, samples in part.pairs:
        fresh = _of_rows(rows, source).only(known.lacks(source, samples))
        if fresh.samples_N.size:  # placeholders of damaged samples have no score, and are not trained either
            known.add(source, stored.commit(source, samples, fresh))
        made += fresh.samples_N.size
    return made


def _pairs(batch: PackedBatch) -> list[Pair]:
    """Return the pair of each branch."""
    return [(source, sample) for source, sample in np.asarray(batch.branches_B4)[:, 2:].tolist()]


def _rows(batch: PackedBatch, scores: Sequence[float]) -> list[Row]:
    return [(*pair, score) for pair, score in zip(_pairs(batch), scores, strict=True)] if scores else []


def _of_rows(rows: Sequence[Row], source: int) -> Scored:
    """Put the scores of a source together; the two of a pair are neighbours."""
    own = [row for row in rows if row[0] == source]
    return Scored.of([row[1] for row in own[::2]], [row[2] for row in own])


def _turned(parts: Sequence[Part], run: str) -> list[Part]:
    """Begin at a part that depends on the run."""
    begin = int(hashlib.sha256(run.encode()).hexdigest(), 16) % len(parts) if parts else 0
    return [*parts[begin:], *parts[:begin]]
