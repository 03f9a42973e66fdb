"""The whole export loads in transformers without code of its own, and answers as our model does."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polyreme_api.batch import TokenIds, TokenizerFile
from polyreme_datahub.chat_format import OWN_TEMPLATE, jinja_of
from polyreme_datahub.loader.sample.image_patches import image_patches
from polyreme_datahub.operations.fit_pages import ComposeParameters
from polyreme_datahub.tokens import TextTokenizer, encode_conversation, train_tokenizer
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.serve.answers import answers, settings_for
from polyreme_trainer.serve.engine import Engine
from tests.exports import export_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TOKENS = TokenIds(media=2, end=1, pad=0)
TOKENIZER = train_tokenizer({"Which digits are these? 0123456789": 9}, vocabulary=300)
SIZES = ComposeParameters(patch_px=14, merge=2, image_tokens_max=20)
QUESTION = "Which digits are these?"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A question about an image, as the datahub writes it."""

    prompt_tokens: list[int]
    patches_PC: Any
    grids_I2: Any


def page(number: int, mode: str = "L") -> Image.Image:
    """A page larger than its tokens allow, not of whole tokens."""
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 256, (150 + 8 * number, 190, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def ours(image: Image.Image) -> Prompt:
    patches, grid = image_patches(image, SIZES)
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "1"}]
    encoded = encode_conversation(TextTokenizer(TOKENIZER), turns, [grid[0] * grid[1] // 4])
    return Prompt(encoded["tokens"][: encoded["prompt"]], patches, np.array([grid]))


@pytest.fixture(scope="module")
def model() -> KimiVL:
    model = build_model(KIMI_VL_NANO, seed=5, media_token=TOKENS.media)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and name.startswith("language_model.model.layers"):
                parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def exported(model: KimiVL, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "model"
    file = TokenizerFile(
        content=TOKENIZER,
        chat_template=jinja_of(OWN_TEMPLATE),
        template=OWN_TEMPLATE.model_dump_json(by_alias=True).encode(),
        image_tokens_max=SIZES.image_tokens_max,
        pixel_version=2,
    )
    export_model(model.state_dict(), KIMI_VL_NANO, folder, tokens=TOKENS, tokenizer=file)
    return folder


@pytest.fixture(scope="module")
def processor(exported: Path) -> Any:
    from transformers import AutoProcessor

    import polyreme_processor  # noqa: F401

    return AutoProcessor.from_pretrained(exported)


def test_files_say_how_a_question_with_images_becomes_tokens(exported: Path) -> None:
    files = {name: json.loads((exported / f"{name}.json").read_text()) for name in ("preprocessor_config",)}
    assert files["preprocessor_config"] == {
        "processor_class": "PolyremeProcessor",
        "image_processor_type": "PolyremeImageProcessor",
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "in_token_limit": 80,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_token": "<|media|>",
        "pixel_version": 2,
    }
    for folder in (exported, exported / "text"):
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation == {"do_sample": False, "eos_token_id": 1, "pad_token_id": 0}
        assert json.loads((folder / "polyreme-template.json").read_text())["image"] == "<|media|>"
    assert not (exported / "text" / "preprocessor_config.json").exists(), "the text part takes no images"


def test_the_processor_makes_the_tokens_and_pixels_of_training(processor: Any) -> None:
    images = [page(0), page(1, "RGB"), page(2, "RGBA")]
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    text = processor.apply_chat_template(message, add_generation_prompt=True)
    inputs = processor(images=images, text=[text] * 3, return_tensors="np", padding=False)
    wanted = [ours(image) for image in images]
    assert [list(tokens) for tokens in inputs["input_ids"]] == [prompt.prompt_tokens for prompt in wanted]
    assert inputs["image_grid_hws"].tolist() == [prompt.grids_I2[0].tolist() for prompt in wanted]
    pixels = np.concatenate([prompt.patches_PC for prompt in wanted]).astype(np.float32)
    assert np.array_equal(inputs["pixel_values"].reshape(len(pixels), -1), (pixels - 127.5) / 127.5)
    buffer = io.BytesIO()
    images[0].save(buffer, "PNG")
    again = [processor.image_processor(one)["pixel_values"] for one in (buffer.getvalue(), np.asarray(images[0]))]
    assert all(np.array_equal(one, inputs["pixel_values"][: len(one)]) for one in again)
    with pytest.raises(ValueError, match=r"1 of '<\|media\|>' in 1 texts, 2 images; write the token once for each"):
        processor(images=images[:2], text=text)


def test_transformers_answers_as_our_model(model: KimiVL, exported: Path, processor: Any) -> None:
    from transformers import AutoModelForImageTextToText

    loaded: Any = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    theirs, report = loaded
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for number in range(3):
        prompt = ours(page(number))
        text = f"<|user|><|media|>{QUESTION}<|assistant|>"
        inputs = processor(images=[page(number)], text=text, return_tensors="pt")
        length = len(prompt.prompt_tokens)
        tokens = torch.tensor(prompt.prompt_tokens)
        grids = [(int(rows), int(columns)) for rows, columns in prompt.grids_I2]
        with torch.no_grad():
            hidden = model(tokens, torch.arange(length), [0, length], torch.tensor(prompt.patches_PC), grids).hidden_TD
            expected, scores = model.logits(hidden), theirs(**inputs).logits[0]
        assert (expected - scores).abs().max() < 1e-3, "an untrained model enlarges what rounding leaves"
        assert expected.std() > 0.1
        engine = Engine(model, settings_for(model, tokens_max=64, rows_max=1))
        ((_, _, made),) = answers(engine, [prompt], stop_token=TOKENS.end, new_tokens_max=6)
        assert theirs.generate(**inputs, max_new_tokens=6)[0, length:].tolist() == [one.token for one in made]
