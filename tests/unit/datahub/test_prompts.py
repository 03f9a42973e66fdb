"""Prompts of questions: those of held-out samples, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from polyreme_api.batch import EvaluationSample
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.loader.job_packs import open_evaluation
from polyreme_datahub.prompts import PromptReader, rules_of_job
from tests.unit.datahub.jobs import Home, make_spec, picture, released_tokenizer, write_jsonl

Asked = tuple[dict[str, EvaluationSample], PromptReader]
pytestmark = pytest.mark.slow

IMAGES = {
    "small.png": picture(30, 44),
    "shrunk.jpg": picture(900, 310, kind="JPEG", seed=1),
    "turned.jpg": picture(64, 200, kind="JPEG", orientation=6, seed=2),
}


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


SAMPLES: dict[str, tuple[list[str], list[dict[str, str]]]] = {
    "none": ([], turns("What is 5?", "It is five.")),
    "small": (["small.png"], turns("What is it?", "Noise.")),
    "shrunk": (["shrunk.jpg"], turns("What is it?", "Noise.")),
    "marked": (["turned.jpg", "small.png"], turns("Is <image> as\n<image>?", "No.")),
    "turns": (["turned.jpg"], turns("Look:", "Yes?", "What is it?", "Noise.")),
    "system": (["small.png"], [{"role": "system", "content": "Be brief."}, *turns("What is it?", "Noise.")]),
}


@pytest.fixture(scope="module", params=["trained", "released"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Held-out samples of a job, and what makes prompts for its model."""
    folder, home = tmp_path_factory.mktemp("own"), Home(tmp_path_factory.mktemp("home"))
    for name, data in IMAGES.items():
        (folder / name).write_bytes(data)
    rows = [{"id": name, "images": images, "conversations": said} for name, (images, said) in SAMPLES.items()]
    home.register("own", write_jsonl(folder, rows))
    home.register("held", write_jsonl(folder, rows[::-1], "held.jsonl"))
    own = request.param == "trained"
    tokenizer = None if own else released_tokenizer(tmp_path_factory.mktemp("released"))
    spec = make_spec(
        ["own"], heldout=["held"], sequence_tokens=120, vocabulary=320 if own else 512, tokenizer=tokenizer
    )
    home.process(spec)
    source = open_evaluation(home.objects, spec)
    assert source is not None
    with PromptReader(rules_of_job(home.objects, spec, job="", sees=True)) as reader:
        yield {sample.sample_id: sample for sample in map(source.sample, range(len(source)))}, reader


@pytest.mark.parametrize("name", SAMPLES)
def test_a_question_is_the_prompt_of_its_held_out_sample(asked: Asked, name: str) -> None:
    samples, reader = asked
    images, said = SAMPLES[name]
    prompt = reader.read(said[:-1], [IMAGES[image] for image in images])
    assert list(prompt.prompt_tokens) == list(samples[name].prompt_tokens)
    np.testing.assert_array_equal(prompt.patches_PC, samples[name].patches_PC)
    np.testing.assert_array_equal(prompt.grids_I2, samples[name].grids_I2)


@pytest.mark.parametrize(
    ("said", "images", "sentence"),
    [
        (turns(""), [], "nothing is asked: the last turn is empty"),
        (turns("a", "b"), [], "nothing is asked: the last turn is of assistant"),
        ([], [], "expected a list of 1 to 256 turns"),
        ([{"role": "tool", "content": "a"}], [], "with role one of system, user, assistant"),
        (turns("<image>"), [], "1 <image> marks, 0 images"),
        (turns("a"), [b"hello"], "not an image"),
        (turns("a"), [IMAGES["shrunk.jpg"][:900]], "image is truncated"),
        (turns("a"), [IMAGES["shrunk.jpg"]] * 3, "of 3 images, expected fewer than 120"),
        (turns("a" * 500), [], "prompt is too long: 50[0-9] tokens, expected fewer than 120"),
        (turns("a" * 8000), [], "prompt is too long: 8000 characters, expected at most 64 for each of the 120"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    asked: Asked, said: list[dict[str, str]], images: list[bytes], sentence: str
) -> None:
    _, reader = asked
    with pytest.raises(BadRecordError, match=sentence):
        reader.read(said, images)
