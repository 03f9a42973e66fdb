"""Which tokens of a conversation are learned, to the token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme_api.batch import IGNORED_TARGET
from polyreme_datahub.loader import job_packs
from polyreme_datahub.tokens import TextTokenizer, encode_conversation, train_tokenizer
from tests.unit.datahub.jobs import Home, make_spec, picture, write_jsonl

Turns = Sequence[Mapping[str, str]]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(train_tokenizer({"a": 1}, vocabulary=262))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def shown(tokenizer: TextTokenizer, encoded: Mapping[str, Any]) -> str:
    """Write tokens as text: specials as one letter, learned tokens in brackets."""
    form = tokenizer.format
    names = {form.media: "#", form.end: ".", **{ids[0]: role[0].upper() for role, ids in form.before.items()}}
    learned = {at for start, stop in encoded["learned"] for at in range(start, stop)}
    parts = [names.get(token) or tokenizer.decode([token]) for token in encoded["tokens"]]
    return "".join(f"[{part}]" if at in learned else part for at, part in enumerate(parts))


@pytest.mark.parametrize(
    ("turns", "cells", "expected"),
    [
        ([turn("user", "ab"), turn("assistant", "c")], [], "UabA[c][.]"),
        ([turn("system", "s"), turn("user", "ab"), turn("assistant", "c")], [2], "SsU##abA[c][.]"),
        ([turn("user", "a<image>b<image>"), turn("assistant", "c")], [2, 1], "Ua##b#A[c][.]"),
        (
            [turn("user", "a"), turn("assistant", "bc"), turn("user", "d"), turn("assistant", "e")],
            [1],
            "U#aA[b][c][.]UdA[e][.]",
        ),
        ([turn("user", "a"), turn("assistant", "b<image>c")], [3], "UaA[b]###[c][.]"),
        ([turn("assistant", "b")], [2], "A##[b][.]"),
        ([turn("user", "<|end|>"), turn("assistant", "a"), turn("user", "z")], [], "U<|end|>A[a][.]Uz"),
    ],
)
def test_only_answers_are_learned_and_never_their_images(
    tokenizer: TextTokenizer, turns: Turns, cells: Sequence[int], expected: str
) -> None:
    assert shown(tokenizer, encode_conversation(tokenizer, turns, cells)) == expected


def test_the_prompt_is_all_before_the_last_answer(tokenizer: TextTokenizer) -> None:
    turns = [turn("user", "a"), turn("assistant", "b"), turn("user", "c <image>"), turn("assistant", "d")]
    encoded = encode_conversation(tokenizer, turns, [2])
    assert (
        shown(tokenizer, {**encoded, "tokens": encoded["tokens"][: encoded["prompt"]], "learned": []}) == "UaAb.Uc ##A"
    )
    assert (encoded["question"], encoded["expected"]) == ("c", "d")


@pytest.mark.slow
def test_text_only_and_many_images_reach_the_trainer_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, size in (("a", (28, 28)), ("b", (56, 28))):
        (folder / f"{name}.png").write_bytes(picture(*size))
    rows = [
        {"id": "text", "conversations": [turn("user", "qq"), turn("assistant", "zz")]},
        {
            "id": "two",
            "images": ["a.png", "b.png"],
            "conversations": [
                turn("user", "<image>q<image>"),
                turn("assistant", "z"),
                turn("user", "r"),
                turn("assistant", "y"),
            ],
        },
    ]
    home = Home(tmp_path / "home")
    home.register("mine", write_jsonl(folder, rows))
    job = make_spec(["mine"], vocabulary=300, packs_per_step=1)
    home.process(job)
    source = job_packs.open_source(home.objects, job)
    seen: dict[str, str] = {}
    for step in range(1, 4):
        batch = source.packs(step, first=0, count=1)
        tokens, targets = np.asarray(batch.tokens_T), np.asarray(batch.targets_T)
        assert batch.unmasked_tokens == int((targets != IGNORED_TARGET).sum())
        learned = np.flatnonzero(targets != IGNORED_TARGET)
        assert np.array_equal(targets[learned], tokens[learned + 1])
        bounds = np.asarray(batch.document_offsets)
        for name, start, stop in zip(batch.sample_ids, bounds, bounds[1:], strict=False):
            inside = learned[(learned >= start) & (learned < stop)]
            seen[name] = f"{stop - start}:{(inside - start).tolist()}"
        media = int((tokens == source.token_ids.media).sum())
        assert media == int((np.asarray(batch.grids_I2).prod(axis=1) // 4).sum())
    # U q q A z z .   and   U # q ## A z . U r A y .
    assert seen == {"text": "7:[3, 4, 5]", "two": "13:[5, 6, 10, 11]"}
