"""A tokenizer that comes with weights: its tokens by the template, against transformers' own way to the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import NFC, NFD, NFKC, Lowercase, Normalizer, Prepend, Replace, Strip, StripAccents
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from polyreme_api.errors import InvalidConfigError, PolyremeError
from polyreme_datahub.chat_format import OWN_TEMPLATE, ChatTemplate, jinja_of
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.open import open_token_ids, open_tokenizer
from polyreme_datahub.released_tokenizer import read_released
from polyreme_datahub.tokenizer_file import TokenText
from polyreme_datahub.tokens import TextTokenizer, encode_conversation, encode_preference, train_tokenizer
from tests.unit.datahub.jobs import Home, make_spec, picture, write_jsonl

WORDS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How released tokenizers cut words: up to three digits are one, so they have from one to three tokens."""
CHATML = {
    "defaultSystem": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
    "system": {"before": "<|im_start|>system\n", "after": "<|im_end|>\n"},
    "user": {"before": "<|im_start|>user\n", "after": "<|im_end|>\n"},
    "assistant": {"before": "<|im_start|>assistant\n", "after": "<|im_end|>\n"},
    "imageBefore": "<|vision_start|>",
    "image": "<|image_pad|>",
    "imageAfter": "<|vision_end|>",
    "pad": "<|endoftext|>",
}
CHATML_JINJA = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
)
MIDDLE = {
    "opening": "[BOS]",
    "system": {"before": "<|im_system|>system<|im_middle|>", "after": "<|im_end|>"},
    "user": {"before": "<|im_user|>user<|im_middle|>", "after": "<|im_end|>"},
    "assistant": {"before": "<|im_assistant|>assistant<|im_middle|>", "after": "<|im_end|>"},
    "imageBefore": "<|media_start|>image<|media_content|>",
    "image": "<|media_pad|>",
    "imageAfter": "<|media_end|>",
}
MIDDLE_JINJA = (
    "[BOS]{% for m in messages %}{{ '<|im_' + m['role'] + '|>' + m['role'] + '<|im_middle|>' + m['content'] }}"
    "{{ '<|im_end|>' }}{% endfor %}"
)
SPECIALS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "[BOS]"),
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
]
TURNS = [
    {"role": "user", "content": "<image>What's in 1234 images?"},
    {"role": "assistant", "content": "Two cats, 37 dogs."},
    {"role": "user", "content": "And here <image>: über 5?"},
    {"role": "assistant", "content": "None."},
]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as weights come in: up to three digits are cut together, special tokens come after the others."""
    tokenizer = Tokenizer(BPE())
    cut = Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = PreTokenizers([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(
        ["What's in the images? Two cats, dogs. None. user system assistant 12 123 100"] * 9, trainer
    )
    tokenizer.add_special_tokens(SPECIALS)
    folder = tmp_path_factory.mktemp("released")
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def wanted(folder: Path, template: object = CHATML) -> dict[str, str]:
    (folder / "polyreme-template.json").write_text(json.dumps(template))
    return {"location": f"file://{folder}"}


def read(folder: Path, template: object = CHATML, *, embedded: int = 500) -> bytes:
    return read_released(wanted(folder, template)["location"], embedded=embedded)


def opened(folder: Path, template: Mapping[str, Any] = CHATML) -> TextTokenizer:
    return TextTokenizer(read(folder, template))


@pytest.mark.parametrize(("template", "jinja"), [(CHATML, CHATML_JINJA), (MIDDLE, MIDDLE_JINJA)])
@pytest.mark.parametrize("system", [False, True])
def test_tokens_are_those_of_the_chat_template_that_comes_with_weights(
    released: Path, template: Mapping[str, Any], jinja: str, system: bool
) -> None:
    turns = [*([{"role": "system", "content": "Be brief."}] if system else []), *TURNS]
    cells = [3, 1]
    image = [template[name] for name in ("imageBefore", "image", "imageAfter")]
    waiting = iter(cells)
    written = [
        {**turn, "content": turn["content"].replace("<image>", image[0] + image[1] * next(waiting) + image[2])}
        if "<image>" in turn["content"]
        else turn
        for turn in turns
    ]
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(released / "tokenizer.json"))
    text = theirs.apply_chat_template(written, chat_template=jinja, tokenize=False)
    expected = theirs.encode(text, add_special_tokens=False)
    ours = opened(released, template)
    encoded = encode_conversation(ours, turns, cells)
    assert encoded["tokens"] == expected
    learned = [theirs.decode(encoded["tokens"][start:stop]) for start, stop in encoded["learned"]]
    assert learned == ["Two cats, 37 dogs.<|im_end|>", "None.<|im_end|>"]
    assert str(theirs.decode(encoded["tokens"][: encoded["prompt"]])).endswith(template["assistant"]["before"])


@pytest.mark.parametrize("template", [CHATML, MIDDLE])
def test_each_answer_of_a_pair_follows_the_prompt_as_it_would_alone(
    released: Path, template: Mapping[str, Any]
) -> None:
    ours = opened(released, template)
    alone = []
    for answer in ("None.", "Two cats."):
        encoded = encode_conversation(ours, [*TURNS[:-1], {**TURNS[-1], "content": answer}], [3, 1])
        alone.append(encoded["tokens"][: encoded["learned"][-1][1]])
    pair = encode_preference(ours, TURNS, "Two cats.", [3, 1])
    tokens, prompt, (chosen, rejected) = pair["tokens"], pair["prompt"], pair["learned"]
    assert [tokens[:prompt] + tokens[start:stop] for start, stop in (chosen, rejected)] == alone
    assert tokens[rejected[0] - 1] == tokens[prompt - 1]
    assert (chosen[0], chosen[1] + 1, rejected[1]) == (prompt, rejected[0], len(tokens))


def test_a_prompt_that_ends_with_an_image_can_not_be_shared(released: Path) -> None:
    bare = {**CHATML, "imageAfter": "", "user": {"before": "", "after": ""}, "assistant": {"after": "<|im_end|>"}}
    turns = [{"role": "user", "content": "Here: <image>"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(BadRecordError, match="an image ends the prompt; write text after it, or name what begins an"):
        encode_preference(opened(released, bare), turns, "b", [2])


@pytest.mark.parametrize(
    "form", [OWN_TEMPLATE, ChatTemplate.model_validate(CHATML), ChatTemplate.model_validate(MIDDLE)]
)
@pytest.mark.parametrize("system", [False, True])
def test_the_template_that_is_exported_makes_the_tokens_that_were_trained_on(
    released: Path, form: ChatTemplate, system: bool
) -> None:
    if form == OWN_TEMPLATE:
        file = train_tokenizer({"What's in 1234 images?": 9}, vocabulary=400)
        ours = TextTokenizer(file)
    else:
        file, ours = (released / "tokenizer.json").read_bytes(), opened(released, form.model_dump(by_alias=True))
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(file.decode()))
    turns = [*([{"role": "system", "content": "Be brief."}] if system else []), *TURNS]
    parts: list[Any] = [
        {
            **turn,
            "content": [
                part
                for at, text in enumerate(turn["content"].split("<image>"))
                for part in [*([{"type": "image"}] if at else []), {"type": "text", "text": text}]
            ]
            if "<image>" in turn["content"]
            else turn["content"],
        }
        for turn in turns
    ]
    text = theirs.apply_chat_template(parts, chat_template=jinja_of(form), tokenize=False)
    encoded = encode_conversation(ours, turns, [1, 1])
    assert theirs.encode(text, add_special_tokens=False) == encoded["tokens"]
    asked = theirs.apply_chat_template(
        parts[:-1], chat_template=jinja_of(form), tokenize=False, add_generation_prompt=True
    )
    assert theirs.encode(asked, add_special_tokens=False) == encoded["tokens"][: encoded["prompt"]]


def test_a_special_token_in_a_text_is_text(released: Path) -> None:
    turns = [{"role": "user", "content": "<|im_end|><|image_pad|>"}, {"role": "assistant", "content": "a"}]
    tokenizer = opened(released)
    tokens = encode_conversation(tokenizer, turns, [])["tokens"]
    assert tokens.count(tokenizer.format.media) == 0
    # Those of the default system turn, the question and the answer.
    assert tokens.count(tokenizer.format.end) == 3


def test_a_job_trains_on_it_from_images_to_text(released: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture(28, 28))
    rows = [
        {
            "id": str(at),
            "images": ["a.png"],
            "conversations": [
                {"role": "user", "content": "<image>What?"},
                {"role": "assistant", "content": f"Two {at} über"},
            ],
        }
        for at in range(3)
    ]
    home = Home(tmp_path / "home")
    home.register("mine", write_jsonl(folder, rows))
    spec = make_spec(["mine"], sequence_tokens=256, packs_per_step=1, tokenizer=wanted(released))
    home.process(spec, job="one")
    source = job_packs.open_source(home.objects, spec, job="one")
    batch = source.packs(1, first=0, count=1)
    tokens, targets = np.asarray(batch.tokens_T), np.asarray(batch.targets_T)
    assert (
        int((tokens == source.token_ids.media).sum()) == int((np.asarray(batch.grids_I2).prod(axis=1) // 4).sum()) > 0
    )
    file = open_tokenizer(home.objects, spec, job="one").content
    assert file == (released / "tokenizer.json").read_bytes(), "what an export writes beside its weights"
    answers = TokenText(file).decode(targets[targets >= 0].tolist()).split("Two ")
    assert set(answers[1:]) == {"0 über", "1 über", "2 über"}
    # The job keeps what it began with, whatever becomes of the folder; for another job another template is other data.
    state = source.state(1)
    moved = released.rename(tmp_path / "moved")
    try:
        home.process(spec, job="one")
        job_packs.open_source(home.objects, spec, job="one").check_state(state)
    finally:
        moved.rename(released)
    template = {**CHATML, "defaultSystem": ""}
    other = make_spec(["mine"], sequence_tokens=256, packs_per_step=1, tokenizer=wanted(released, template))
    home.process(other, job="one")
    job_packs.open_source(home.objects, other, job="one").check_state(state)
    home.process(other, job="another")
    with pytest.raises(PolyremeError, match="belongs to other data"):
        job_packs.open_source(home.objects, other, job="another").check_state(state)


def test_augmentation_never_changes_a_length_where_digits_are_joined(released: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture(56, 56))
    rows = [
        {
            "id": str(at),
            "images": ["a.png"],
            "boxes": [{"image": 0, "box": [10 + at, 12, 40, 30 + at]}],
            "conversations": [
                {"role": "user", "content": "<image>What?"},
                {"role": "assistant", "content": "dogs <box:0>"},
            ],
        }
        for at in range(8)
    ]
    home = Home(tmp_path / "home")
    home.register("mine", write_jsonl(folder, rows))
    lengths: dict[str, int] = {}
    seen: set[tuple[str, bytes]] = set()
    for augment in (None, {"crop": {"minAreaPercent": 30}, "mirror": {}}):
        tokenizer = wanted(released)
        spec = make_spec(["mine"], sequence_tokens=128, packs_per_step=1, augment=augment, tokenizer=tokenizer)
        home.process(spec)
        source = job_packs.open_source(home.objects, spec)
        for step in range(1, 9):
            batch = source.packs(step, first=0, count=1)
            bounds, tokens = np.asarray(batch.document_offsets), np.asarray(batch.tokens_T)
            for name, start, stop in zip(batch.sample_ids, bounds, bounds[1:], strict=False):
                assert lengths.setdefault(name, stop - start) == stop - start
                seen.add((name, tokens[start:stop].tobytes()))
        assert open_token_ids(home.objects, spec, job="") == source.token_ids
    assert len(seen) > len(rows), "some boxes moved"


def changed(**fields: Any) -> dict[str, Any]:
    return {**CHATML, **fields}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (changed(image="<|no|>"), "image of polyreme-template.json is '<|no|>', expected a special token"),
        (changed(imageBefore="<|begin|>"), "imageBefore of polyreme-template.json is '<|begin|>'"),
        (changed(pad="pad"), "pad of polyreme-template.json is 'pad'"),
        (changed(user={"before": "<|user|>"}), "user.before of polyreme-template.json is '<|user|>'"),
        (changed(assistant={"after": "x"}), "assistant.after of polyreme-template.json is 'x', expected a text that"),
        (
            changed(opening="<|image_pad|>"),
            "image of polyreme-template.json is '<|image_pad|>', expected a token that no",
        ),
        (changed(sytem={}), "unknown field: sytem, did you mean 'system'?"),
        ({"image": "<|image_pad|>"}, "field missing: system is required (and 2 more)"),
        ([], "chat template can't be read"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(released: Path, template: object, message: str) -> None:
    with pytest.raises(InvalidConfigError) as error:
        read(released, template)
    assert message in error.value.message
    assert error.value.field == "spec.data.tokenizer.location"


def test_a_file_that_does_not_fit_is_refused(released: Path, tmp_path: Path) -> None:
    def refused(content: bytes | None, message: str, *, embedded: int = 500) -> None:
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").unlink(missing_ok=True)
        if content is not None:
            (folder / "tokenizer.json").write_bytes(content)
        with pytest.raises(InvalidConfigError, match=message) as error:
            read(folder, embedded=embedded)
        assert error.value.field == "spec.data.tokenizer.location"

    whole = (released / "tokenizer.json").read_bytes()
    refused(None, "there is no tokenizer.json in file:///")
    refused(whole[:-10], "is no tokenizer of Hugging Face's")
    refused(b"[]", "is no tokenizer of Hugging Face's")
    refused(whole, "has ids up to 320, the model embeds 300 tokens", embedded=300)
    pieces = json.loads(Tokenizer(WordPiece({"[UNK]": 0}, unk_token="[UNK]")).to_str())
    refused(json.dumps(pieces).encode(), "its model is WordPiece")
    lacking = json.loads(whole)
    del lacking["model"]["vocab"]["a"]
    refused(json.dumps(lacking).encode(), "lacks 1 of 256 bytes")
    damaged = json.loads(whole)
    damaged["model"]["merges"] = [["a", "never"]]
    refused(json.dumps(damaged).encode(), "tokenizer can't be read")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_bytes(whole)
    with pytest.raises(InvalidConfigError, match=r"there is no polyreme-template\.json"):
        read_released(f"file://{tmp_path}/bare", embedded=500)
    with pytest.raises(InvalidConfigError, match="location is '/bare', expected file:///folder or s3://bucket/prefix"):
        read_released("/bare", embedded=500)


@pytest.mark.parametrize(
    "normalizer",
    [
        *(NFKC(), NFD(), Lowercase(), Strip(), StripAccents(), Prepend(" "), Replace("cat", "dog")),
        Normalizers([NFC(), NFKC()]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_tokenizer_that_changes_text_is_refused(released: Path, tmp_path: Path, normalizer: Normalizer) -> None:
    tokenizer = Tokenizer.from_file(str(released / "tokenizer.json"))
    tokenizer.normalizer = normalizer
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    with pytest.raises(InvalidConfigError, match="changes text: normalizer of tokenizer"):
        read(tmp_path)


@pytest.mark.parametrize(
    "cut",
    [WhitespaceSplit(), Split(Regex(r"\s+"), "removed"), ByteLevel(add_prefix_space=True, use_regex=False)],
    ids=["WhitespaceSplit", "Split", "ByteLevel"],
)
def test_a_tokenizer_that_drops_or_adds_characters_is_refused(
    released: Path, tmp_path: Path, cut: PreTokenizer
) -> None:
    tokenizer = Tokenizer.from_file(str(released / "tokenizer.json"))
    tokenizer.pre_tokenizer = PreTokenizers([cut, ByteLevel(add_prefix_space=False, use_regex=False)])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    with pytest.raises(InvalidConfigError, match=r"tokenizer changes text: tokenizer.json in file://.* makes ' ?"):
        read(tmp_path)


@pytest.mark.parametrize("normalizer", [NFC(), Normalizers([])], ids=["Qwen", "DeepSeek-V3"])
def test_a_tokenizer_that_only_joins_letters_with_their_accents_is_read(
    released: Path, tmp_path: Path, normalizer: Normalizer
) -> None:
    tokenizer = Tokenizer.from_file(str(released / "tokenizer.json"))
    tokenizer.normalizer = normalizer
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    assert opened(tmp_path).size == tokenizer.get_vocab_size()


def test_an_exported_tokenizer_is_one_to_continue_with(tmp_path: Path) -> None:
    """The files of an export, which has the template of a tokenizer that a job trained."""
    content = train_tokenizer({"What's in 1234 images?": 9, "Two cats, 37 dogs.": 5}, vocabulary=400)
    (tmp_path / "tokenizer.json").write_bytes(content)
    trained, continued = TextTokenizer(content), opened(tmp_path, OWN_TEMPLATE.model_dump(by_alias=True))
    assert encode_conversation(continued, TURNS, [3, 1]) == encode_conversation(trained, TURNS, [3, 1])
    assert continued.format == trained.format
