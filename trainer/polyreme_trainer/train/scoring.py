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
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyreme_api.batch import BatchSource, EvaluationSource, PackedBatch
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.progress import RankPhase
from polyreme_api.store import ObjectStore
from polyreme_planner.curriculum import CurriculumStage
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.fingerprint import weights_fingerprint
from polyreme_trainer.train.forward import answering, branch_scores, held_out_packs
from polyreme_trainer.train.frozen_digest import digest_of_frozen
from polyreme_trainer.train.microbatches import PackReader, to_microbatches
from polyreme_trainer.train.records import Reporter
from polyreme_trainer.train.reference_scores import Part, ReferenceScores, Scored, ScoreStore, keep, of_run, parts_of
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, settle

Row = tuple[int, int, float]
"""Source and sample of a branch, and its score."""
SCORES_POLL_S = 1.0
"""Time between two looks for scores that other programs write."""
FORM = 1
"""Of a score; it rises when the same pair gets another."""


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
            EnvironmentFailedError: If the stage has begun and its scores are lost.
        """
        first, group = self.settings.rank.rank == 0, self.meshes.control_group
        kept = collectives.from_first((of_run(self._run_store, stage),) if first else None, group)[0]
        if kept is not None:
            return kept
        if self.state.step != stage.first_step - 1:
            raise EnvironmentFailedError(
                f"the reference scores of stage {stage.name!r} are not beside the checkpoints, and its reference is "
                f"the model before step {stage.first_step}: the run is at step {self.state.step}; delete the "
                "checkpoints of the stage, and it is scored again",
                field="spec.checkpoint",
            )
        parts, named = parts_of(self.source, stage), stage.objective.reference.name
        stored = ScoreStore(self._shared_store, named or self._reference(stage), self.source.preference_sets)
        known = self._known(stored, parts) if first else {}
        if named:
            return self._written(stage, parts, stored, known)
        settle(self.state)
        made = 0
        self._report(parts, known, made)
        for part in _turned(parts, "" if self.settings.scores is None else self.settings.scores.run):
            fresh = self._score(part, stored, known)
            if fresh is None:
                return None
            made += fresh
            if fresh:
                self._report(parts, known, made)
        return self._keep(stage, parts, known, self._held_out())

    def _keep(
        self, stage: CurriculumStage, parts: Sequence[Part], known: dict[int, Scored], held_out: dict[int, Scored]
    ) -> ReferenceScores:
        """Keep what the first rank knows of the stage's pairs, and give it to all."""
        kept = None
        if self.settings.rank.rank == 0:
            kept = keep(self._run_store, stage, ReferenceScores(_wanted(known, parts), held_out))
        return collectives.from_first(kept, self.meshes.control_group)

    def _written(
        self, stage: CurriculumStage, parts: Sequence[Part], stored: ScoreStore, known: dict[int, Scored]
    ) -> ReferenceScores | None:
        """Wait until other programs have scored every pair; None if some rank was asked to end.

        Raises:
            EnvironmentFailedError: If no score comes for ``data_wait_s``.
        """
        first, group = self.settings.rank.rank == 0, self.meshes.control_group
        total, had, waited_s = sum(part.count for part in parts), -1, 0.0
        while True:
            stops = collectives.gather_to_first(self.stop(), group)
            has = self._report(parts, known, 0) if first else 0
            has, stopped = collectives.from_first((has, any(stops or ())) if first else None, group)
            if stopped or has == total:
                return None if stopped else self._keep(stage, parts, known, {})
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
            known = self._known(stored, parts) if first else {}

    def _report(self, parts: Sequence[Part], known: Mapping[int, Scored], made: int) -> int:
        """Say how many pairs have a score, on the rank that knows it, and return it; this run has made some of them."""
        pairs = [(source, samples) for part in parts for source, samples in part.pairs]
        done = sum(int(known[source].has(samples).sum()) for source, samples in pairs) if known else 0
        total = sum(len(samples) for _, samples in pairs)
        message = f"{done:,} of {total:,} pairs have a reference score, {made:,} made by this run"
        self.reporter.phase(RankPhase.SCORING, message=message)
        return done

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
            "weights": weights_fingerprint(self.state, self.meshes),
            "frozen": "" if self.state.adapters is None else digest_of_frozen(self.state, self.meshes),
            "shape": dataclasses.asdict(self.settings.shape_at(stage.first_step)),
            "precision": str(self.settings.precision),
        }
        return hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()

    def _known(self, stored: ScoreStore, parts: Sequence[Part]) -> dict[int, Scored]:
        return {source: stored.load(source) for source in {source for part in parts for source, _ in part.pairs}}

    def _score(self, part: Part, stored: ScoreStore, known: dict[int, Scored]) -> int | None:
        """Score a part unless it is known; the first rank keeps what is known.

        Returns:
            Pairs that were scored, on the first rank; None if some rank was asked to end.
        """
        first, group = self.settings.rank.rank == 0, self.meshes.control_group
        stops = collectives.gather_to_first(self.stop(), group)
        lacking = None
        if first:
            for source, samples in part.pairs:
                if not known[source].has(samples).all() and (found := stored.find(source, samples)):
                    known[source] = known[source].joined([found])
            lacking = any(not known[source].has(samples).all() for source, samples in part.pairs)
        lacks, stopped = collectives.from_first((lacking, any(stops or ())) if first else None, group)
        if stopped or not lacks:
            return None if stopped else 0
        rows: list[Row] = []
        with answering(self.state.models.values()):
            for step in part.steps:
                rows += self._scores_of(step)
        gathered = collectives.gather_to_first(rows, group)
        return 0 if gathered is None else _commit(part, stored, known, [row for each in gathered for row in each])

    def _scores_of(self, step: int) -> list[Row]:
        """Run a step's packs forward."""
        packs = self.reader.read(step)
        microbatches = to_microbatches(self.state, packs, self.settings)
        return [
            row
            for read, microbatch in zip(packs, microbatches, strict=True)
            for row in _rows(read.batch, branch_scores(self.state, microbatch, self.meshes))
        ]

    def _held_out(self) -> dict[int, Scored]:
        """Score the held-out pairs, by their set, on the first rank; only this run needs them."""
        if self.evaluation is None:
            return {}
        rows: list[Row] = []
        with answering(self.state.models.values()):
            for _, batch, microbatch in held_out_packs(self.state, self.settings, self.evaluation, self.meshes):
                rows += _rows(batch, branch_scores(self.state, microbatch, self.meshes))
        gathered = collectives.gather_to_first(rows, self.meshes.control_group) or []
        found = [row for each in gathered for row in each]
        return {number: _scored(found, number) for number in {row[0] for row in found}}


def _commit(part: Part, stored: ScoreStore, known: dict[int, Scored], rows: Sequence[Row]) -> int:
    """Write what was not known, and return how much that is; the first rank alone does."""
    made = 0
    for source, samples in part.pairs:
        fresh = _scored(rows, source).only(samples[~known[source].has(samples)])
        if fresh.samples_N.size:  # placeholders of damaged samples have no score, and are not trained either
            known[source] = known[source].joined([stored.commit(source, fresh)])
        made += fresh.samples_N.size
    return made


def _rows(batch: PackedBatch, scores: Sequence[float]) -> list[Row]:
    samples = np.asarray(batch.branches_B4)[:, 2:].tolist()
    return [(*sample, score) for sample, score in zip(samples, scores, strict=True)] if scores else []


def _scored(rows: Sequence[Row], source: int) -> Scored:
    """Put the scores of a source together; the two of a pair are neighbours."""
    own = [row for row in rows if row[0] == source]
    return Scored.of([row[1] for row in own[::2]], [row[2] for row in own])


def _wanted(known: dict[int, Scored], parts: Sequence[Part]) -> dict[int, Scored]:
    """Keep the pairs of the stage alone."""
    wanted: dict[int, list[Any]] = {}
    for part in parts:
        for source, samples in part.pairs:
            wanted.setdefault(source, []).append(samples)
    return {source: known[source].only(np.concatenate(samples)) for source, samples in wanted.items()}


def _turned(parts: Sequence[Part], run: str) -> list[Part]:
    """Begin at a part that depends on the run."""
    begin = int(hashlib.sha256(run.encode()).hexdigest(), 16) % len(parts) if parts else 0
    return [*parts[begin:], *parts[:begin]]
