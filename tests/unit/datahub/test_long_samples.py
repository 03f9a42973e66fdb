"""Samples that are longer than a pack: refused, truncated, or cut into pieces; no image is ever cut."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.batch import IGNORED_TARGET
from polyreme_api.errors import RefusedError
from polyreme_datahub.index.pieces import SPLIT, TRUNCATE, pieces_of
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.open import open_tokenizer
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.tokenizer_file import TokenText
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl

pytestmark = pytest.mark.slow

PACK = 64
WORDS = " ".join(f"word{number}" for number in range(60))
STEPS = 12
WHOLE = make_spec(["long"], sequence_tokens=1024, packs_per_step=2)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Twelve short samples, a long text, and a long one with an image in each of three turns."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.png").write_bytes(picture(56, 84, seed=ord(name)))
    short = [record(f"short{at}") for at in range(12)]
    text = {"id": "text", "conversations": turns([("Tell me.", WORDS)])}
    asked = [(f"<image>What is {name}?", f"It is {name}. {' '.join(WORDS.split()[:20])}") for name in "abc"]
    album = {"id": "album", "images": ["a.png", "b.png", "c.png"], "conversations": turns(asked)}
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    home.register("long", write_jsonl(folder, [*short, text, album]))
    return home


def turns(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for pair in pairs
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]


def spec_of(policy: str, **more: Any) -> Any:
    spec = make_spec(["long"], sequence_tokens=PACK, packs_per_step=2, **more)
    return spec.model_copy(update={"data": spec.data.model_copy(update={"long_samples": policy})})


def opened(home: Home, spec: Any) -> PackedSource:
    home.process(spec, "uid")
    return job_packs.open_source(home.objects, spec, job="uid")


def documents(source: PackedSource, steps: int = STEPS) -> list[tuple[str, tuple[int, ...], int, int]]:
    """Name, tokens, learned tokens and images of each document of the first steps."""
    found = []
    for step in range(1, steps + 1):
        for pack in range(source.packs_in(step)):
            batch = source.packs(step, first=pack, count=1)
            offsets = np.asarray(batch.document_offsets).tolist()
            tokens_T, targets_T = np.asarray(batch.tokens_T), np.asarray(batch.targets_T)
            assert tokens_T.size == source.pack_tokens_in(step)
            media = np.count_nonzero(tokens_T == source.token_ids.media)
            assert media * 4 == len(np.asarray(batch.patches_PC)), "each media token has its patches"
            for name, start, stop in zip(batch.sample_ids, offsets, offsets[1:], strict=False):
                cut = slice(start, stop)
                learned = int(np.count_nonzero(targets_T[cut] != IGNORED_TARGET))
                images = int(np.count_nonzero(tokens_T[cut] == source.token_ids.media))
                found.append((name, tuple(tokens_T[cut].tolist()), learned, images))
    return found


def test_long_samples_are_dead_letters_unless_a_policy_cuts_them(home: Home) -> None:
    report = home.process(spec_of("Refuse"), "uid")
    assert sorted(letter.sample_id for letter in report.datasets[0].dead_letters) == ["album", "text"]
    assert all("set data.longSamples" in letter.error for letter in report.datasets[0].dead_letters)
    assert report.datasets[0].samples == 12


def test_a_report_has_the_letters_of_its_own_job_and_no_others(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyreme_datahub.registry.results.ROWS_MAX", 1)
    longer = make_spec(["long"], sequence_tokens=2048)
    reports = [
        home.process(spec).datasets[0] for spec in (spec_of("Refuse"), longer, spec_of("Split"), spec_of("Refuse"))
    ]
    assert [len(report.dead_letters) for report in reports] == [2, 0, 0, 2]
    assert [report.samples for report in reports[:2]] == [12, 14]
    assert [(stage.hits + stage.misses, stage.dead) for report in reports for stage in report.operations[-1:]] == [
        (12, 2),
        (14, 0),
        (14, 0),
        (12, 2),
    ]


def test_truncated_samples_are_their_first_tokens_and_whole_images(home: Home) -> None:
    full = {name: tokens for name, tokens, _, _ in documents(opened(home, WHOLE))}
    seen = {
        name: (tokens, learned, media) for name, tokens, learned, media in documents(opened(home, spec_of("Truncate")))
    }
    assert len(seen) == 14
    for name in ("text", "album"):
        tokens, learned, media = seen[name]
        assert tokens == full[name][: len(tokens)]
        assert PACK // 2 < len(tokens) <= PACK < len(full[name])
        assert learned > 0
        assert media % 6 == 0
    assert len(seen["text"][0]) == PACK


def test_the_pieces_of_a_sample_are_all_of_it_in_every_epoch(home: Home) -> None:
    (uncut,) = opened(home, WHOLE)._indexes
    source = opened(home, spec_of("Split"))
    (index,) = source._indexes
    for name in ("text", "album"):
        pieces = index.find(name)
        assert len(pieces) > 1
        read = [index.read(sample) for sample in pieces]
        whole = uncut.read(uncut.find(name)[0])
        for field in ("tokens_T", "learned_T", "grids_I2", "patches_P"):
            joined = np.concatenate([getattr(stored, field) for stored in read])
            np.testing.assert_array_equal(joined, getattr(whole, field))
        assert len(whole.grids_I2) == (3 if name == "album" else 0)
    counts = Counter(name for name, *_ in documents(source))
    assert counts["text"] >= len(index.find("text"))
    turns_of = [turn for step in range(1, STEPS + 1) for turn in source.turns(source.find("text"), step)]
    assert len(turns_of) == counts["text"], "a trace names the steps of all pieces"


def test_pieces_with_augmentation_have_the_planned_lengths(home: Home) -> None:
    augment = {"crop": {"minAreaPercent": 60}, "mirror": {"probability": "0.5"}, "color": {}}
    plain = documents(opened(home, spec_of("Split")))
    changed = documents(opened(home, spec_of("Split", augment=augment)))
    assert [each[:2] for each in plain] == [each[:2] for each in changed]


def test_another_policy_is_other_data(home: Home) -> None:
    state = opened(home, spec_of("Split")).state(3)
    with pytest.raises(RefusedError, match="loader state belongs to other data"):
        opened(home, spec_of("Truncate")).check_state(state)


def test_a_long_sample_whose_beginning_teaches_nothing_is_a_dead_letter(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    late = {"id": "late", "conversations": turns([(WORDS, "Yes.")])}
    home.register("long", write_jsonl(tmp_path / "data", [record("short"), late]))
    (letter,) = home.process(spec_of("Truncate"), "uid").datasets[0].dead_letters
    assert "no piece of it has an answer to learn" in letter.error
    text = TokenText(open_tokenizer(home.objects, spec_of("Truncate"), job="uid").content)
    pieces = {tokens for name, tokens, _, _ in documents(opened(home, spec_of("Split")), 4) if name == "late"}
    assert ["Yes." in text.decode(list(tokens)) for tokens in pieces] == [True], "only the piece with the answer"


@given(st.data())
def test_pieces_cover_a_sample_and_cut_no_image(data: st.DataObject) -> None:
    most = data.draw(st.integers(4, 30), label="tokens of a piece")
    parts = data.draw(st.lists(st.tuples(st.booleans(), st.integers(1, most)), min_size=1, max_size=12), label="parts")
    spans, end = [], 0
    for is_image, length in parts:
        if is_image:
            spans.append([end, end + length])
        end += length
    learned = np.array(data.draw(st.lists(st.integers(0, 1), min_size=end, max_size=end), label="learned"), np.uint8)
    everything = np.ones_like(learned)
    pieces = pieces_of(everything, spans, tokens_max=most, policy=SPLIT)
    assert all(piece.stop - piece.start <= most for piece in pieces)
    images = [image for piece in pieces for image in piece.images]
    assert images == sorted(set(images))
    for piece in pieces:
        assert all(piece.start <= spans[image][0] and spans[image][1] <= piece.stop for image in piece.images)
        cut = [first for first, last in spans if first < piece.stop < last or first < piece.start < last]
        assert not cut, "no image is cut"
    covered = sum(piece.stop - piece.start for piece in pieces)
    assert end - covered <= len(parts) + 1, "what is left out are pieces of one token"
    first = pieces_of(learned, spans, tokens_max=most, policy=TRUNCATE)
    assert first == [piece for piece in pieces_of(learned, spans, tokens_max=most, policy=SPLIT) if piece.start == 0]
