"""A reference by a program of one's own: reads the pairs of a job, scores both answers of each, writes the scores.

The job's stage says ``objective: {kind: Preference, reference: {name: unigram}}`` and waits in phase Scoring until
every pair has a score. The model here counts words; put another framework's in its place, on as many ranks as it
needs: each reads and writes its share.

Usage: score_pairs.py OBJECTS_URL job.yaml JOB_UID REFERENCE [RANK RANKS]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from polyreme.job_files import read_job
from polyreme.reference_scores import write_scores
from polyreme.torch_dataset import PackedDataset

VOCABULARY_MAX = 1 << 18


def main(objects_url: str, job_file: str, job: str, reference: str, *share: str) -> None:
    """Score all pairs of a job's steps, or the share of one of several ranks."""
    rank, ranks = map(int, share or ("0", "1"))
    spec = read_job(Path(job_file)).spec

    def read() -> PackedDataset:
        return PackedDataset(objects_url, spec, job=job, rank=rank, ranks=ranks)

    digests = read().pairs_digests()
    counts_V = torch.ones(VOCABULARY_MAX)
    for batch in read():
        targets_T = batch["targets_T"]
        counts_V += torch.bincount(targets_T[targets_T >= 0], minlength=VOCABULARY_MAX)
    logp_V = (counts_V / counts_V.sum()).log()

    found: dict[int, dict[int, list[float]]] = {}
    for batch in read():
        for (_, begin, source, sample), end in zip(rows(batch), ends(batch), strict=True):
            targets = batch["targets_T"][begin:end]
            score = float(logp_V[targets[targets >= 0]].sum())
            found.setdefault(source, {}).setdefault(sample, []).append(score)
    for source, scores in found.items():
        digest = digests[source]
        if digest is not None:
            # Of a pair that is read twice, in a later epoch, the first two scores are those of its answers.
            write_scores(objects_url, reference, digest, list(scores), [both[:2] for both in scores.values()])


def rows(batch: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """Document, first token, source and sample of each answer: of a pair the chosen one's, then the rejected one's."""
    return [tuple(row) for row in batch["branches_B4"].tolist()]


def ends(batch: dict[str, Any]) -> list[int]:
    """Where each answer ends: where the next of its document begins, or with its document."""
    branches, offsets = rows(batch), batch["document_offsets"].tolist()
    return [
        follow[1] if follow is not None and follow[0] == row[0] else offsets[row[0] + 1]
        for row, follow in zip(branches, [*branches[1:], None], strict=True)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
