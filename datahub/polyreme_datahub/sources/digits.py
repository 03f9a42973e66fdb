"""Pages of handwritten digits, made from the 1,797 scans that scikit-learn brings along (UCI, 8 x 8 pixels).

scikit-learn is found but never imported: that costs seconds, and the scans are one compressed table. Training pages
and held-out pages use different scans, whatever their other parameters. Each page is a pure function of (parameters,
ordinal).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import itertools
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.index.sample_bytes import REJECTED
from polyreme_datahub.sources.records import PREFERENCE_RULES, RULES_FIELD
from polyreme_datahub.sources.types import RawRecord

KIND = "digits"
QUESTION = "Which digits, left to right?"
SCANS = 1797
SCANS_TRAINED = 1500
SCAN_PX = 8
SPLIT_SEED = "polyreme digits split 1"
DIGITS_MAX = 16
CELL_PX = 28
MARGIN_PX = 1
JITTER_PX = 2
ROWS_MAX = 2
BLANKS_MAX = 1
PAGES_MAX = 10_000_000
TRAIN_PAGES = 1500
HELDOUT_PAGES = 300
SAMPLE_SEED = 11
DIGITS, WORDS, PREFERRED = "digits", "words", "preferred"
"""How a page is answered: ``73``, ``seven three``, or both with the words preferred."""
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def sample_sources() -> dict[str, dict[str, Any]]:
    """Describe the datasets that polyreme brings along, by name."""
    named = {}
    for digits in range(1, 5):
        named[f"sample/digits-{digits}"] = describe(digits=digits, pages=TRAIN_PAGES, seed=SAMPLE_SEED, heldout=False)
        named[f"sample/digits-{digits}-heldout"] = describe(
            digits=digits, pages=HELDOUT_PAGES, seed=SAMPLE_SEED, heldout=True
        )
    for answers, heldout in itertools.product((WORDS, PREFERRED), (False, True)):
        pages = HELDOUT_PAGES if heldout else TRAIN_PAGES
        named[f"sample/digits-1-{answers}{'-heldout' * heldout}"] = describe(
            digits=1, pages=pages, seed=SAMPLE_SEED, heldout=heldout, answers=answers
        )
    return named


def describe(*, digits: int, pages: int, seed: int, heldout: bool, answers: str = DIGITS) -> dict[str, Any]:
    """Describe a source of pages with ``digits`` digits each.

    Raises:
        SourceInvalidError: If a number lies outside its bounds.
    """
    if not 1 <= digits <= DIGITS_MAX:
        raise SourceInvalidError(f"digits per page is {digits}, expected 1 to {DIGITS_MAX}", field="digits")
    if not 1 <= pages <= PAGES_MAX:
        raise SourceInvalidError(f"number of pages is {pages}, expected 1 to {PAGES_MAX}", field="pages")
    rules = {RULES_FIELD: PREFERENCE_RULES} if answers == PREFERRED else {}
    more = {} if answers == DIGITS else {"answers": answers, **rules}
    return {"kind": KIND, "form": 1, "digits": digits, "pages": pages, "seed": seed, "heldout": heldout, **more}


class DigitsSource:
    """Pages of one description."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._digits = int(description["digits"])
        self._pages = int(description["pages"])
        self._seed = int(description["seed"])
        self._heldout = bool(description["heldout"])
        self._answers = str(description.get("answers", DIGITS))
        self._pool = scans_of(heldout=self._heldout)

    def record_id(self, ordinal: int) -> str:
        """Name a page by its parameters, so that equal names mean equal pages."""
        kind = ("h" if self._heldout else "t") + ("" if self._answers == DIGITS else self._answers[0])
        return f"digits-{self._digits}{kind}-s{self._seed}-{ordinal:06d}"

    def read(self, ordinal: int) -> RawRecord:
        """Lay a page out."""
        if not 0 <= ordinal < self._pages:
            raise BadRecordError(f"no page {ordinal}: the source has {self._pages}", rule="ordinal")
        sample_id = self.record_id(ordinal)
        generator = random.Random(f"{self._digits}:{self._seed}:{self._heldout}:{ordinal}")
        rows = generator.randint(1, ROWS_MAX)
        row = generator.randrange(rows)
        column, placed = 0, []
        pixels, labels = load_scans()
        for _ in range(self._digits):
            column += generator.randint(0, BLANKS_MAX)
            scan = generator.choice(self._pool)
            down, right = generator.randint(0, JITTER_PX), generator.randint(0, JITTER_PX)
            placed.append(
                {
                    "scan": scan,
                    "pixels": pixels[scan].tobytes().hex(),
                    "top": row * CELL_PX + MARGIN_PX + down,
                    "left": column * CELL_PX + MARGIN_PX + right,
                }
            )
            column += 1
        seen = [int(labels[digit["scan"]]) for digit in placed]
        digits, words = "".join(map(str, seen)), " ".join(DIGIT_WORDS[digit] for digit in seen)
        answer = digits if self._answers == DIGITS else words
        content = {
            "id": sample_id,
            "kind": KIND,
            "height": rows * CELL_PX,
            "width": column * CELL_PX,
            "digits": placed,
            "conversations": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}],
        }
        if self._answers == PREFERRED:
            content[REJECTED] = digits
        return RawRecord(sample_id=sample_id, content=content, blobs=())


@cache
def scans_of(*, heldout: bool) -> tuple[int, ...]:
    """Numbers of the scans of one side of the fixed split."""
    order = list(range(SCANS))
    random.Random(SPLIT_SEED).shuffle(order)
    return tuple(order[SCANS_TRAINED:] if heldout else order[:SCANS_TRAINED])


@cache
def load_scans() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return ink [scans, 8, 8] from 0 to 16, and the digit of each scan.

    Raises:
        SourceInvalidError: If scikit-learn is not installed or carries another table.
    """
    path = scans_path()
    table = np.array([line.split(b",") for line in gzip.decompress(path.read_bytes()).split()], dtype=np.float32)
    if table.shape != (SCANS, SCAN_PX * SCAN_PX + 1):
        raise SourceInvalidError(
            f"digits table has shape {table.shape}, expected ({SCANS}, 65); install scikit-learn>=1.6"
        )
    ink = table[:, :-1].astype(np.uint8).reshape(SCANS, SCAN_PX, SCAN_PX)
    return ink, table[:, -1].astype(np.uint8)


def scans_path() -> Path:
    """Find the table without importing scikit-learn.

    Raises:
        SourceInvalidError: If scikit-learn is not installed.
    """
    found = importlib.util.find_spec("sklearn")
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    for place in places:
        path = place / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise SourceInvalidError(
        "sample/digits needs scikit-learn's table of scans: not installed; pip install '.[run]' in the checkout"
    )


def scans_digest() -> str:
    """Digest of the table, part of a version's identity."""
    return hashlib.sha256(scans_path().read_bytes()).hexdigest()
