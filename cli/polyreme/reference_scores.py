"""Scores of pairs by any program: a job whose stage names them as its reference waits for them.

A score is the sum of the log-probabilities of an answer's tokens, the end token included, or any other number whose
difference between two answers says how much a model prefers the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyreme_api.batch import PreferenceSet
from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.objects import open_store
from polyreme_trainer.train.reference_scores import Scored, ScoreStore


def write_scores(
    objects_url: str,
    reference: str,
    pairs_digest: str,
    samples: Sequence[int],
    scores: Sequence[Sequence[float]],
) -> None:
    """Write the scores of some pairs; of a pair that is scored twice, one score counts.

    Args:
        objects_url: Object store of the processed data: ``s3://bucket/prefix`` or ``file:///folder``.
        reference: Name of the reference, as in ``objective.reference.name``.
        pairs_digest: Digest of the pairs (``PackedDataset.pairs_digests``).
        samples: Places of the pairs: the last column of ``branches_B4``.
        scores: Of each, the score of its chosen and of its rejected answer.

    Raises:
        InvalidConfigError: If they are not as many finite numbers.
    """
    given = np.asarray(scores, dtype=np.float64)
    if given.shape != (len(samples), 2) or not np.isfinite(given).all():
        raise InvalidConfigError(
            f"scores are of shape {given.shape}, expected two finite numbers for each of the {len(samples)} samples",
            field="scores",
        )
    pairs = PreferenceSet(digest=pairs_digest, augmented=False)
    scored = Scored.of(list(samples), given)
    ScoreStore(open_store(objects_url), reference, [pairs]).commit(0, scored.samples_N, scored)
