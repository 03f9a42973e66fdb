"""The same texts train the same tokenizer, whatever the threads, the processes and the order of the texts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRAIN = """
import hashlib, random, sys
from polyreme_datahub.tokens import train_tokenizer
generator = random.Random(5)
# Few letters, and every word twice: nearly every pair of symbols is as frequent as others.
texts = ["".join(generator.choices("abcdef ", k=40)) for _ in range(400)]
generator = random.Random(sys.argv[2])
generator.shuffle(texts)
data = train_tokenizer({text: 2 for text in texts}, vocabulary=int(sys.argv[1]))
print(hashlib.sha256(data).hexdigest())
"""


def train(vocabulary: int, *, threads: int, parallel: bool, shuffle: int) -> str:
    environment = {
        **os.environ,
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if parallel else "false",
    }
    call = [sys.executable, "-c", TRAIN, str(vocabulary), str(shuffle)]
    return subprocess.run(call, env=environment, capture_output=True, text=True, cwd=ROOT, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [600, 5000])
def test_threads_and_order_change_no_byte(vocabulary: int) -> None:
    one = train(vocabulary, threads=1, parallel=False, shuffle=1)
    assert len(one.strip()) == 64
    assert {train(vocabulary, threads=threads, parallel=True, shuffle=threads) for threads in (1, 2, 8)} == {one}
