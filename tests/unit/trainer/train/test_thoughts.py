"""Held-out answers of a model that thinks: what is compared is what follows the thought."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polyreme_api.batch import THOUGHT_END
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import parse_job
from polyreme_datahub.tokenizer_file import TokenText, byte_characters
from polyreme_trainer.train.evaluation import _page
from tests.parallel.pages import END, Questions
from tests.unit.api.jobs import job_with


class Spoken(Questions):
    """Tokens are characters."""

    def text(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("said", "thinks", "answer", "match"),
    [
        ("<think>a hook</think> 0", True, "0", True),
        ("<think>0", True, "<think>0", False),
        ("0", True, "0", True),
        ("a</think>0", False, "a</think>0", False),
    ],
)
def test_what_follows_a_thought_is_compared(said: str, thinks: bool, answer: str, match: bool) -> None:
    source = Spoken(1)
    page = _page(source, source.sample(0), [*map(ord, said), END], END, thinks=thinks)
    assert (page["answer"], page["match"]) == (answer, match)
    assert page.get("thought", "") == ("<think>a hook</think>" if "hook" in said else "")


def test_the_tag_has_tokens_in_any_vocabulary_of_bytes() -> None:
    vocabulary = {of: at for at, of in byte_characters().items()} | {"</": 300, "think": 301, "ink>": 302}
    text = TokenText(json.dumps({"added_tokens": [], "model": {"vocab": vocabulary}}).encode())
    assert text.encode(THOUGHT_END) == [300, 301, ord(">")]
    assert text.decode(text.encode("é</think> ∑")) == "é</think> ∑"


def test_a_budget_leaves_room_for_an_answer() -> None:
    held_out = {"sets": [{"name": "a", "dataset": "held/a"}], "answerTokensMax": 8, "thinkingTokensMax": 8}
    with pytest.raises(InvalidConfigError, match="thinkingTokensMax 8 leaves no token of answerTokensMax 8 for the"):
        parse_job(job_with({"spec.evaluation": held_out}))
