"""Scores of pairs under a reference, as objects that jobs share, and as the one object of a run.

A part is ``reference-scores/<reference>/<set>/<part>.npz`` in the lakehouse: ``samples`` (int64 [N], places in the
set's index) and ``scores`` (float64 [N, 2], sums of the log-probabilities of the chosen and of the rejected answer's
tokens). Its name is the digest of its samples, and the first that is written stays. ``<reference>`` names all that the
scores depend on beside the set: weights, shape, positions, precision. Any program may write parts.

A run keeps what it trains with under ``reference-scores/<stage>.npz`` beside its checkpoints, so a resumed run has the
same numbers whatever becomes of the lakehouse.

Legend: N pairs, B branches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import BatchSource, PreferenceSet
from polyreme_api.errors import EnvironmentFailedError, RefusedError
from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore
from polyreme_planner.curriculum import CurriculumStage

PREFIX = "reference-scores"
HELD_OUT = "held-out-"
"""Begins the names of a run's arrays of held-out pairs; the number of their set follows."""
PART_PAIRS = 512
"""Pairs that are scored before they are written."""

Samples = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """Some scored samples of one set, by their place, rising."""

    samples_N: Samples
    scores_N2: Numbers

    @classmethod
    def of(cls, samples: Sequence[int] | Samples, scores: Any) -> Scored:
        """Put them in order; of a sample that is there twice, the first counts."""
        kept, first = np.unique(np.asarray(samples, dtype=np.int64), return_index=True)
        return cls(kept, np.asarray(scores, dtype=np.float64).reshape(-1, 2)[first])

    @classmethod
    def nothing(cls) -> Scored:
        """No sample."""
        return cls.of([], [])

    def joined(self, others: Iterable[Scored]) -> Scored:
        """Add others; what is here stays."""
        all_of = [self, *others]
        return Scored.of(
            np.concatenate([one.samples_N for one in all_of]), np.concatenate([one.scores_N2 for one in all_of])
        )

    @classmethod
    def unknown(cls, samples: Samples) -> Scored:
        """Samples that could not be scored."""
        return cls.of(samples, np.full((len(samples), 2), np.nan))

    def finite(self) -> Scored:
        """Leave out those that could not be scored."""
        there = np.isfinite(self.scores_N2).all(1)
        return Scored(self.samples_N[there], self.scores_N2[there])

    def has(self, samples: Samples) -> npt.NDArray[np.bool_]:
        """Tell which samples are here."""
        if not self.samples_N.size:
            return np.zeros(len(samples), dtype=bool)
        places = np.searchsorted(self.samples_N, samples).clip(max=self.samples_N.size - 1)
        there: npt.NDArray[np.bool_] = self.samples_N[places] == samples
        return there

    def only(self, samples: Samples) -> Scored:
        """Keep some samples."""
        kept = np.isin(self.samples_N, samples)
        return Scored(self.samples_N[kept], self.scores_N2[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceScores:
    """The scores that a stage trains with, by the number of their source."""

    by_source: Mapping[int, Scored]
    held_out: Mapping[int, Scored] = dataclasses.field(default_factory=dict)
    """Those of held-out pairs, by the number of their set."""

    def of(self, samples_B2: Samples) -> Numbers:
        """Return the score of each branch (B): of a pair the chosen answer's, then the rejected one's; NaN of none.

        Args:
            samples_B2: Source and place of each branch's sample; the two of a pair are neighbours.

        Raises:
            RefusedError: If a pair has none.
        """
        return _scores_of(self.by_source, samples_B2, gaps=False)

    def of_held_out(self, samples_B2: Samples) -> Numbers:
        """Return the same of held-out pairs, whose source is the number of their set."""
        return _scores_of(self.held_out, samples_B2, gaps=True)


def _scores_of(by_source: Mapping[int, Scored], samples_B2: Samples, *, gaps: bool) -> Numbers:
    """Return the score of each branch; with gaps, NaN of those that are not there."""
    scores_B = np.full(len(samples_B2), np.nan)
    for source in np.unique(samples_B2[:, 0]).tolist():
        rows = np.flatnonzero(samples_B2[:, 0] == source)
        wanted, scored = samples_B2[rows, 1], by_source.get(source, Scored.nothing())
        there = scored.has(wanted)
        if not gaps and not there.all():
            raise RefusedError(
                f"a pair has no reference score: sample {int(wanted[~there][0])} of source {source} was not among the "
                "pairs of the stage when it began, and its reference is the model of then; begin a new job with more",
                field="spec.training.stages[].steps or spec.data.schedule",
            )
        places = np.searchsorted(scored.samples_N, wanted[there])
        scores_B[rows[there]] = scored.scores_N2[places, np.arange(rows.size)[there] % 2]
    return scores_B


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive steps whose pairs are scored together."""

    steps: range
    pairs: tuple[tuple[int, Samples], ...]
    """By source: samples that no step before has, rising."""

    @property
    def count(self) -> int:
        """Pairs."""
        return sum(len(samples) for _, samples in self.pairs)


def parts_of(source: BatchSource, stage: CurriculumStage) -> list[Part]:
    """Cut the steps of a stage into parts, by the order and the indexes alone; steps without new pairs are in none."""
    seen: set[tuple[int, int]] = set()
    found: list[Part] = []
    steps: list[int] = []
    fresh: list[tuple[int, int]] = []
    for step in range(stage.first_step, stage.last_step + 1):
        pairs_N2 = np.asarray(source.pairs(step, first=0, count=source.packs_in(step)))
        new = [pair for pair in dict.fromkeys(map(tuple, pairs_N2.tolist())) if pair not in seen]
        if new:
            steps.append(step)
            fresh += new
            seen.update(new)
        if steps and (len(fresh) >= PART_PAIRS or step == stage.last_step):
            found.append(_part(steps, fresh))
            steps, fresh = [], []
    return found


def _part(steps: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Part:
    sources = sorted({source for source, _ in pairs})
    by_source = ((each, sorted(place for source, place in pairs if source == each)) for each in sources)
    return Part(
        steps=range(steps[0], steps[-1] + 1),
        pairs=tuple((source, np.array(places, dtype=np.int64)) for source, places in by_source),
    )


class ScoreStore:
    """Scores of one reference in the lakehouse, by set.

    Args:
        store: The lakehouse's objects.
        reference: Digest of all that scores depend on beside the set.
        sets: The sources in the job's order.
    """

    def __init__(self, store: ObjectStore, reference: str, sets: Sequence[PreferenceSet | None]) -> None:
        self._store, self._reference, self._sets = store, reference, sets
        self._loaded: dict[int, tuple[set[str], Scored]] = {}
        """By source: keys that were read, and what they hold."""

    def load(self, source: int) -> Scored:
        """Return all that is scored of a source, by whomever; of a sample in two parts, what was read first."""
        keys, scored = self._loaded.get(source, (set(), Scored.nothing()))
        fresh = [info.key for info in self._store.list(f"{self._folder(source)}/") if info.key not in keys]
        if fresh:
            scored = scored.joined(map(self._read, fresh))
        self._loaded[source] = ({*keys, *fresh}, scored)
        return scored

    def find(self, source: int, samples: Samples) -> Scored | None:
        """Return the part of exactly these samples, if it is there."""
        with contextlib.suppress(ObjectNotFoundError):
            return self._read(self._key(source, samples))
        return None

    def commit(self, source: int, samples: Samples, scored: Scored) -> Scored:
        """Write a part of some samples, and return it, or the one that was there first."""
        key = self._key(source, samples)
        try:
            self._store.put_if_absent(key, packed({"": scored}))
        except ObjectExistsError:
            return self._read(key)
        return scored

    def folders(self) -> str:
        """Return where parts are, of all sets."""
        return ", ".join(self._folder(source) for source, named in enumerate(self._sets) if named is not None)

    def _folder(self, source: int) -> str:
        named = self._sets[source]
        if named is None:
            raise RefusedError(f"source {source} has no pairs, its reference scores were asked for")
        return f"{PREFIX}/{self._reference}/{named.digest}"

    def _key(self, source: int, samples: Samples) -> str:
        return f"{self._folder(source)}/{hashlib.sha256(samples.astype('<i8').tobytes()).hexdigest()[:32]}.npz"

    def _read(self, key: str) -> Scored:
        found = unpacked(self._store.get(key), key)
        if set(found) != {""} or len(found[""].finite().samples_N) != len(found[""].samples_N):
            raise EnvironmentFailedError(f"{key} holds no finite reference scores; delete it")
        return found[""]


def of_run(store: ObjectStore, stage: CurriculumStage, *, root: str = "") -> ReferenceScores | None:
    """Return the scores that a run has kept for a stage; None if there are none yet.

    Args:
        store: Its checkpoints'.
        stage: The stage.
        root: Where they are, for errors.
    """
    key = run_key(stage)
    try:
        data = store.get(key)
    except ObjectNotFoundError:
        return None
    parts = unpacked(data, f"{root}/{key}" if root else key)
    held_out = {int(name.removeprefix(HELD_OUT)): part for name, part in parts.items() if name.startswith(HELD_OUT)}
    return ReferenceScores({int(name): part for name, part in parts.items() if not name.startswith(HELD_OUT)}, held_out)


def keep(store: ObjectStore, stage: CurriculumStage, scores: ReferenceScores) -> ReferenceScores:
    """Keep a run's scores, and return them; what an attempt before has kept stays as it is."""
    if (kept := of_run(store, stage)) is not None:
        both = {of: kept.by_source.get(of, Scored.nothing()).joined([part]) for of, part in scores.by_source.items()}
        scores = ReferenceScores({**kept.by_source, **both}, {**scores.held_out, **kept.held_out})
    parts = {str(source): part for source, part in scores.by_source.items()}
    parts |= {f"{HELD_OUT}{number}": part for number, part in scores.held_out.items()}
    store.put(run_key(stage), packed(parts))
    return scores


def run_key(stage: CurriculumStage) -> str:
    """Where a run keeps the scores of a stage."""
    return f"{PREFIX}/{stage.name or stage.first_step}.npz"


def packed(parts: Mapping[str, Scored]) -> bytes:
    """Write scored samples by name as NumPy's archive."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {}
    for name, part in parts.items():
        arrays |= {f"{name}samples": part.samples_N, f"{name}scores": part.scores_N2}
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def unpacked(data: bytes, key: str) -> dict[str, Scored]:
    """Read what ``packed`` wrote.

    Raises:
        EnvironmentFailedError: If it is something else.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            names = [name.removesuffix("samples") for name in archive.files if name.endswith("samples")]
            arrays = {name: (archive[f"{name}samples"], archive[f"{name}scores"]) for name in names}
        if lost := [name for name, (samples, scores) in arrays.items() if scores.shape != (len(samples), 2)]:
            raise ValueError(f"{lost[0]}scores are of shape {arrays[lost[0]][1].shape}")
        found = {name: Scored.of(*both) for name, both in arrays.items()}
    except (ValueError, TypeError, KeyError, OSError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise EnvironmentFailedError(
            f"{key} holds no reference scores: {error}, expected arrays samples [N] and scores [N, 2]; delete it, and "
            "its pairs are scored again"
        ) from error
    return found
