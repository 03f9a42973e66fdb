"""Preferences: what public layouts mean, to the token, as pairs in packs, and what is wrong with a bad one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.report.preview_page import build_preview
from polyreme_api.batch import IGNORED_TARGET
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.data import SourceWeight
from polyreme_api.job.model import Training
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import AppendedChange, MixtureRecord
from polyreme_datahub import hub, lifecycle
from polyreme_datahub.errors import SampleDamagedError
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.engine.client import batch_of
from polyreme_datahub.loader.engine.read_ahead import share_packs
from polyreme_datahub.loader.inspect.preview import Picture, Span, preview
from polyreme_datahub.loader.open import open_packs, open_tokenizer, sleep_really
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.loader.sample.documents import LaidPacks
from polyreme_datahub.loader.sample.mapped_index import MappedIndex
from polyreme_datahub.loader.sample.reader import StoredSample
from polyreme_datahub.operations.dataset_statistics import DatasetStatistics
from polyreme_datahub.tokenizer_file import TokenText
from polyreme_datahub.tokens import TextTokenizer, encode_preference, train_tokenizer
from tests.unit.datahub.jobs import Home, make_spec, picture, released_tokenizer, write_jsonl
from tests.unit.datahub.shards_and_tables import write_parquet
from tests.unit.datahub.test_conversations import shown, turn
from tests.unit.datahub.test_record_forms import CONTAINERS, Library, rule_of

USER, CHOSEN, REJECTED = turn("user", "Q"), turn("assistant", "good"), turn("assistant", "bad")
TURNS = [USER, CHOSEN]
EARLIER = [turn("user", "q"), turn("assistant", "a")]
GPT = {"from": "gpt", "value": "good"}
LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "own": ({"conversations": TURNS, "rejected": "bad"}, TURNS),
    "TRL's texts": ({"prompt": "Q", "chosen": "good", "rejected": "bad"}, TURNS),
    "TRL's turns": ({"prompt": [*EARLIER, USER], "chosen": [CHOSEN], "rejected": [REJECTED]}, [*EARLIER, *TURNS]),
    "TRL's whole": ({"chosen": TURNS, "rejected": [USER, REJECTED]}, TURNS),
    "UltraFeedback's": ({"prompt": "Q", "messages": TURNS, "chosen": TURNS, "rejected": [USER, REJECTED]}, TURNS),
    "Anthropic's": (
        {
            "chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: Q\n\nAssistant: good",
            "rejected": "\n\nHuman: q\n\nAssistant: a\n\nHuman: Q\n\nAssistant: bad",
        },
        [*EARLIER, *TURNS],
    ),
    "ms-swift's": ({"messages": [*EARLIER, *TURNS], "rejected_response": "bad"}, [*EARLIER, *TURNS]),
    "ms-swift's whole": ({"messages": TURNS, "rejected_messages": [USER, REJECTED]}, TURNS),
    "LLaMA-Factory's": (
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": GPT, "rejected": {**GPT, "value": "bad"}},
        TURNS,
    ),
    "LLaMA-Factory's Alpaca": ({"instruction": "Q", "input": "x", "chosen": "good", "rejected": "bad"}, []),
    "RLAIF-V's": ({"question": "Q", "chosen": "good", "rejected": "bad", "ds_name": "v"}, TURNS),
    "answers in JSON": (
        {"prompt": "Q", "chosen": '[{"box": [1, 2, 3, 4]}]', "rejected": '{"role": "none"}'},
        [USER, turn("assistant", '[{"box": [1, 2, 3, 4]}]')],
    ),
    "system": (
        {"system": "S", "prompt": "Q", "chosen": "good", "rejected": "bad"},
        [turn("system", "S"), *TURNS],
    ),
}
LAYOUTS["LLaMA-Factory's Alpaca"][1].extend([turn("user", "Q\nx"), CHOSEN])


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "objects")


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_layout_means_the_same_in_every_container(library: Library, tmp_path: Path, container: str) -> None:
    for layout, (fields, turns) in LAYOUTS.items():
        CONTAINERS[container](tmp_path / container, fields)
        read = library.add(tmp_path / container).read(0)
        rejected = '{"role": "none"}' if layout == "answers in JSON" else "bad"
        assert (read.content["conversations"], read.content["rejected"]) == (turns, rejected), layout
        assert library.looked.startswith("1 record looked at: 1 preference without images"), layout


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "same answers": ({"prompt": "Q", "chosen": "a ", "rejected": "a"}, "are the same, so neither can be preferred"),
    "empty": ({"prompt": "Q", "chosen": "a", "rejected": " "}, "the rejected answer is empty"),
    "empty chosen": ({"prompt": "Q", "chosen": "", "rejected": "b"}, "the chosen answer is empty"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "no prompt, expected chosen and rejected with a prompt"),
    "other prompts": (
        {"chosen": TURNS, "rejected": [turn("user", "R"), REJECTED]},
        "has 2 turns, the rejected one 2, and they differ from turn 1 on; expected the same turns up to the last",
    ),
    "longer": ({"chosen": TURNS, "rejected": [USER, REJECTED, *TURNS]}, "has 2 turns, the rejected one 4"),
    "answered prompt": ({"prompt": TURNS, "chosen": [CHOSEN], "rejected": [REJECTED]}, "ends with a turn of assistant"),
    "unanswered": ({"messages": [USER], "rejected_response": "b"}, "the last turn is of user, expected the chosen"),
    "two turns": ({"prompt": "Q", "chosen": [CHOSEN, CHOSEN], "rejected": "b"}, "expected a text or one turn"),
    "lost image": ({"prompt": "Q", "chosen": "a", "rejected": "b", "image": None}, "its image is null"),
    "missing image": ({"prompt": "<image>Q", "chosen": "a", "rejected": "b"}, "1 <image> marks, 0 images"),
    "image in an answer": ({"prompt": "Q", "chosen": "a", "rejected": "b<image>"}, "an answer shows an image"),
    "a conversation": ({"messages": TURNS}, "no rejected answer, and this version holds preferences"),
}


def test_a_bad_preference_is_one_sentence(library: Library, tmp_path: Path) -> None:
    good = [{"prompt": "Q", "chosen": "a", "rejected": "b"}] * (len(BAD) + 1)
    source = library.lines(tmp_path, *(fields for fields, _ in BAD.values()), *good)
    for at, (name, (_, expected)) in enumerate(BAD.items()):
        rule, message = rule_of(lambda at=at: source.read(at))  # type: ignore[misc]
        assert expected in message, name
        assert rule in {"preference", "no-preference", "image", "images"}, name
    assert f"{len(good)} preferences without images, {len(BAD)} unusable" in library.looked


def test_most_records_decide_what_a_version_holds(library: Library, tmp_path: Path) -> None:
    pair, plain = {"messages": TURNS, "rejected_response": "bad"}, {"messages": TURNS}
    source = library.lines(tmp_path, pair, plain, plain)
    assert "rejected" not in source.read(0).content
    assert library.looked == "3 records looked at: 3 conversations without images; not read: rejected_response"
    source = library.lines(tmp_path, {"prompt": "Q", "chosen": "a", "rejected": "b"}, plain, plain)
    assert "a preference, but this version holds conversations" in rule_of(lambda: source.read(0))[1]


def test_most_rows_decide_where_a_table_has_the_columns_of_both_kinds(library: Library, tmp_path: Path) -> None:
    plain = "3 records looked at: 3 conversations without images; not read: rejected"
    kinds: dict[str, list[Any]] = {
        "3 records looked at: 2 preferences without images, 1 unusable": ["bad", "bad", None],
        plain: ["bad", None, None],
        f"{plain} ": [None, None, None],
        f"{plain}  ": [True, False, True],
    }
    for at, (expected, rejected) in enumerate(kinds.items()):
        rows = {"messages": [TURNS] * 3, "rejected": rejected}
        read = library.add(write_parquet(tmp_path / f"{at}.parquet", rows)).read(0)
        assert library.looked.startswith(expected.strip()), rejected
        assert read.content.get("rejected") == ("bad" if "preferences" in expected else None)


def test_parts_and_columns_name_the_images_of_a_prompt(library: Library, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(8, 8))
    parts = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Q"}]}
    turns = [turn("user", "<image>Q"), CHOSEN]
    for fields in (
        {"prompt": [parts], "chosen": [CHOSEN], "rejected": [REJECTED]},
        {"chosen": [parts, CHOSEN], "rejected": [parts, REJECTED]},
        {"image": "a.png", "question": "<image>Q", "chosen": "good", "rejected": "bad"},
    ):
        read = library.lines(tmp_path, fields).read(0)
        assert (read.content["conversations"], read.blobs) == (turns, [picture(8, 8)])
        assert library.looked == "1 record looked at: 1 preference with images"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(train_tokenizer({"a": 1}, vocabulary=262))


def test_the_last_token_of_the_prompt_is_repeated_and_both_answers_are_learned(tokenizer: TextTokenizer) -> None:
    turns = [turn("user", "<image>q"), turn("assistant", "a"), turn("user", "r"), turn("assistant", "cd")]
    encoded = encode_preference(tokenizer, turns, "e", [2])
    assert shown(tokenizer, encoded) == "U##qAa.UrA[c][d][.]A[e][.]"
    assert encoded["prompt"] == 10


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("home")
    home = Home(folder)
    write_jsonl(folder, [*RECORDS, TOO_LONG], "pairs.jsonl")
    (folder / "a.png").write_bytes(picture(32, 32))
    home.register("pairs", folder / "pairs.jsonl")
    home.register("pairs-heldout", folder / "pairs.jsonl")
    plain = [{"messages": [turn("user", f"q{at}"), turn("assistant", f"a{at}")]} for at in range(9)]
    home.register("plain", write_jsonl(folder, plain, "plain.jsonl"))
    home.process(spec())
    return home


LONG = "".join(chr(0x4E00 + at) for at in range(64))
RECORDS: list[dict[str, Any]] = [
    {
        "id": f"p{at}",
        "messages": [turn("user", f"how many is {at}?"), turn("assistant", "several" * (1 + at % 3))],
        "rejected_response": "no" * (1 + at % 4),
        **({"images": ["a.png"]} if at % 3 == 0 else {}),
    }
    for at in range(11)
]
TOO_LONG = {"id": "long", "prompt": "how?", "chosen": "so", "rejected": LONG}


STAGES = [
    {"name": "tune", "steps": 2, "weights": [{"source": "s0", "weight": 1}]},
    {"name": "prefer", "steps": 98, "objective": {"kind": "Preference"}, "weights": [{"source": "s1", "weight": 1}]},
]


def spec(stages: Sequence[Any] = STAGES, **more: Any) -> TrainingJobSpec:
    made = make_spec(["plain", "pairs"], heldout=["pairs-heldout"], weights=[1, 0], **more)
    training = Training.model_validate({"steps": 100, "packsPerStep": 4, "stages": stages})
    data = made.data.model_copy(update={"long_samples": "Split"})
    return made.model_copy(update={"data": data, "training": training})


def oracle(tokens: Sequence[int], repeat: int, prompt: int) -> tuple[list[int], list[int]]:
    """Targets and positions of a pair, by hand: the index of the repeated token and the length of the prompt."""
    targets = [IGNORED_TARGET] * len(tokens)
    for at in range(len(tokens) - 1):
        if at >= prompt - 1 and at + 1 != repeat:
            targets[at] = tokens[at + 1]
    positions = [*range(repeat), *range(prompt - 1, prompt - 1 + len(tokens) - repeat)]
    return targets, positions


@pytest.mark.parametrize("packs_by", ["Order", "Cost"])
def test_a_pair_is_one_document_of_two_branches(home: Home, packs_by: str) -> None:
    split = StepSplit(data_ranks=3)
    source = open_packs(home.objects, spec(packs_by=packs_by), job="", wait_s=0, sleep=sleep_really, split=split)
    found = 0
    [none, pairs] = source.preference_sets
    assert none is None
    assert pairs is not None
    assert not pairs.augmented
    for step in range(1, 8):
        batch = source.packs(step, first=0, count=6)
        tokens, offsets = np.asarray(batch.tokens_T).tolist(), np.asarray(batch.document_offsets)
        branches = np.asarray(batch.branches_B4)
        assert branches.dtype == np.int64
        rows = branches.reshape(-1, 2, 4)
        np.testing.assert_array_equal(source.pairs(step, first=0, count=6), rows[:, 0, 2:])
        with_branches = {int(row[0, 0]) for row in rows}
        for (document, first, of, sample), (again, second, _, _) in rows.tolist():
            assert (document, of) == (again, 1)
            start, stop = offsets[document : document + 2].tolist()
            prompt = first + 1 - start
            assert tokens[first] == tokens[second]
            targets, positions = oracle(tokens[start:stop], second - start, prompt)
            assert np.asarray(batch.targets_T)[start:stop].tolist() == targets
            assert np.asarray(batch.positions_T)[start:stop].tolist() == positions
            assert tokens[second - 1] == tokens[stop - 1] == source.token_ids.end
            real = [at for at in range(len(offsets) - 1) if at not in batch.padding_documents]
            assert batch.sample_ids[real.index(document)] == f"p{sample}"
            found += 1
        for document in set(range(len(offsets) - 1)) - with_branches:
            start, stop = offsets[document : document + 2].tolist()
            assert np.asarray(batch.positions_T)[start:stop].tolist() == list(range(stop - start))
        shared = share_packs(LaidPacks(batch, [np.asarray(batch.patches_PC)]))
        np.testing.assert_array_equal(batch_of(shared.message, shared.descriptor, pixels=True).branches_B4, branches)
    assert found


def test_the_held_out_pairs_have_branches_and_the_chosen_answer_is_expected(home: Home) -> None:
    held_out = job_packs.open_evaluation(home.objects, spec())
    assert held_out is not None
    asked = [held_out.sample(at) for at in range(len(held_out))]
    assert {one.expected for one in asked} == {"several", "several" * 2, "several" * 3}
    rows = np.concatenate([np.asarray(held_out.pack(at).branches_B4) for at in range(len(held_out.pack_sets))])
    assert sorted(rows[::2, 3].tolist()) == list(range(len(RECORDS)))
    assert set(rows[:, 2].tolist()) == {0}
    [first] = [one for one in asked if one.sample_id == "p0"]
    assert len(np.asarray(first.grids_I2)) == 1


def test_the_digest_names_the_data_and_augmentation_is_seen(home: Home) -> None:
    def sets(**more: Any) -> Any:
        return job_packs.open_source(home.objects, spec(**more)).preference_sets

    [_, plain], [_, augmented] = sets(), sets(stages=[], augment={"color": {"brightnessPercent": 5}})
    assert (plain.digest, plain.augmented, augmented.augmented) == (augmented.digest, False, True)


def test_a_preview_shows_prompt_and_both_answers_without_the_repeated_token(home: Home) -> None:
    source = job_packs.open_source(home.objects, spec())
    text = TokenText(open_tokenizer(home.objects, spec(), job="").content)
    packs = [pack for step in range(3, 7) for pack in preview(source, text, step, first=0, count=4)]
    shown = {one.sample_id: one for pack in packs for one in pack.documents}
    for at, record in enumerate(RECORDS):
        [*prompt, chosen, rejected] = shown[f"p{at}"].parts
        question, answer = (of["content"] for of in record["messages"])
        texts = [part.text for part in (*prompt, chosen, rejected) if isinstance(part, Span)]
        assert texts[-3:] == [question, answer, record["rejected_response"]]
        assert [part.answer for part in (chosen, rejected) if isinstance(part, Span)] == ["chosen", "rejected"]
        assert all(isinstance(part, Picture) or not part.answer for part in prompt)
    page = build_preview("j, step 1", packs[:4], of_packs=4)
    assert page.count('class="rejected">no') == page.count('class="chosen">several') > 0
    assert "both answers begin with the same 0" in page


def test_statistics_count_the_lengths_of_answers_and_what_they_share() -> None:
    answers = [("a b c d", "a b x"), ("yes", "no, not at all")]
    counted = [DatasetStatistics() for _ in answers]
    for one, (chosen, rejected) in zip(counted, answers, strict=True):
        record = {"conversations": [turn("user", "q"), turn("assistant", chosen)], "rejected": rejected}
        one.add(record, {"kind": "images", "images": []})
    counted[0].merge(counted[1:])
    assert DatasetStatistics.from_json(counted[0].to_json()) == counted[0]
    summary = counted[0].summary()
    assert summary["pairs"] == 2
    for name, least, largest in (
        ("chosen_characters", 3, 7),
        ("rejected_characters", 5, 14),
        ("same_first_words_percent", 0, 50),
        ("text_characters", 13, 18),
    ):
        assert (summary[name]["least"], summary[name]["largest"]) == (least, largest), name


def test_what_is_made_of_preferences_holds_preferences(home: Home, tmp_path: Path) -> None:
    urls = (home.registry, home.objects)
    part = lifecycle.subset(*urls, "pairs", "pairs/part", "ordinal < 6")
    recipe = {"version": 1, "operations": ["decode"]}
    hub.ingest("pairs", name="sealed", recipe=recipe, registry_url=urls[0], objects_url=urls[1], workers=1)
    made = make_spec(["pairs/part", "sealed"], early=True, tokenizer=released_tokenizer(tmp_path))
    stage = {"name": "prefer", "steps": 100, "objective": {"kind": "Preference"}}
    training = Training.model_validate({"steps": 100, "packsPerStep": 4, "stages": [stage]})
    made = made.model_copy(update={"training": training})
    home.process(made, "made")
    source = job_packs.open_source(home.objects, made, job="made")
    assert all(source.preference_sets)
    batch = source.packs(1, first=0, count=4)
    rows = np.asarray(batch.branches_B4)
    assert len(rows) == 2 * len(batch.sample_ids) > 0
    assert set(rows[:, 2].tolist()) == {0, 1}
    assert part.records == 6


def test_a_table_with_images_and_turns_is_read_as_preferences(library: Library, tmp_path: Path) -> None:
    image, asked = {"bytes": picture(8, 8), "path": None}, turn("user", "<image>Q")
    columns: dict[str, dict[str, Any]] = {
        "trl": {"images": [[image]], "prompt": [[asked]], "chosen": [[CHOSEN]], "rejected": [[REJECTED]]},
        "rlaif": {"image": [image], "question": ["<image>Q"], "chosen": ["good"], "rejected": ["bad"], "idx": [1]},
        "swift": {"images": [[image]], "messages": [[asked, CHOSEN]], "rejected_response": ["bad"]},
    }
    for name, rows in columns.items():
        read = library.add(write_parquet(tmp_path / f"{name}.parquet", rows)).read(0)
        assert read.content["conversations"] == [asked, CHOSEN], name
        assert (read.content["rejected"], read.blobs) == ("bad", [picture(8, 8)]), name
        assert library.looked.startswith("1 record looked at: 1 preference with images"), name


def test_a_stage_draws_from_records_of_the_kind_that_it_trains_on(home: Home) -> None:
    tune, prefer = STAGES
    for stages, more, expected in (
        (
            [],
            {"schedule": [(3, [0, 1])]},
            "'s1' (pairs) holds preferences and has weight in a run whose objective takes no pairs",
        ),
        (
            [tune, {**prefer, "objective": {}}],
            {},
            "has weight in stage 'prefer' whose objective takes no pairs; give",
        ),
        ([{**tune, "objective": {"kind": "Preference"}}, prefer], {}, "'s0' (plain) has weight in its steps and holds"),
        (
            [tune, prefer],
            {"augment": {"color": {"brightnessPercent": 5}}},
            "turn augmentation off for it (augment: {} in",
        ),
    ):
        with pytest.raises(InvalidConfigError) as refused:
            job_packs.open_source(home.objects, spec(stages, **more))
        assert expected in refused.value.message
        if not more.get("schedule"):
            with pytest.raises(InvalidConfigError) as refused:
                home.process(spec(stages, **more))
            assert expected in refused.value.message
    in_steps = {**prefer, "objective": {"kind": "Preference", "reference": {"scores": "Online"}}}
    job_packs.open_source(home.objects, spec([tune, in_steps], augment={"color": {"brightnessPercent": 5}}))


def test_a_running_job_keeps_the_kind_of_the_version_that_it_began_with(home: Home, tmp_path: Path) -> None:
    plain = [{"messages": [turn("user", f"q{at}"), turn("assistant", f"a{at}")]} for at in range(9)]
    home.register("grown", write_jsonl(tmp_path, plain))
    made = make_spec(["grown"])
    home.process(made, "uid")
    home.register("grown", write_jsonl(tmp_path, RECORDS[1:3]))
    home.process(made, "uid")
    with pytest.raises(InvalidConfigError, match=r"'s0' \(grown\) holds preferences and has weight in a run whose"):
        home.process(made, "another")


def test_an_appended_change_of_other_kind_is_ignored(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    made = spec([])
    change = AppendedChange(from_step=5, step=5, weights=(SourceWeight(source="s1", weight=1),))
    changed = job_packs.open_source(home.objects, made, mixture=MixtureRecord(changes=(change,), read=1))
    assert "weights from step 5 on are ignored: source 's1' (pairs) holds preferences" in caplog.text
    assert not len(np.asarray(changed.packs(6, first=0, count=4).branches_B4))


def test_a_damaged_pair_is_padding_without_branches_and_still_counted(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MappedIndex.read

    def damaged(index: MappedIndex, sample: int, *more: Any, **named: Any) -> StoredSample:
        if index.sample_id(sample) == "p4":
            raise SampleDamagedError("stored data is damaged: p4")
        return read(index, sample, *more, **named)

    monkeypatch.setattr(MappedIndex, "read", damaged)
    source, found = job_packs.open_source(home.objects, spec(on_damage="Placeholder")), 0
    for step in range(3, 9):
        batch, pairs = source.packs(step, first=0, count=4), source.pairs(step, first=0, count=4)
        there = np.asarray(batch.branches_B4)[::2, 3].tolist()
        assert there == [sample for sample in pairs[:, 1].tolist() if sample != 4]
        found += len(pairs) - len(there)
    assert found


def test_a_pair_is_never_cut(home: Home) -> None:
    [letter] = hub.show_dataset(home.registry, home.objects, "pairs").dead_letters
    assert (letter.sample_id, letter.rule) == ("long", "sequence-tokens")
    assert letter.error.endswith(
        "expected at most 64; a prompt with its two answers is never cut; raise data.sequenceTokens"
    )


@given(st.data())
def test_branches_hold_the_prompt_once_and_each_answer(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    word = st.text(alphabet="ab ", min_size=1, max_size=8).filter(str.strip)
    chosen, rejected = data.draw(word), data.draw(word)
    prompt = [turn("user", data.draw(word))]
    both = [encode_preference(tokenizer, [*prompt, turn("assistant", chosen)], rejected, [])]
    both.append(encode_preference(tokenizer, [*prompt, turn("assistant", rejected)], chosen, []))
    answers = [[one["tokens"][a:b] for a, b in one["learned"]] for one in both]
    assert answers[0] == answers[1][::-1]
    for one, (first, second) in zip(both, answers, strict=True):
        n = one["prompt"]
        assert one["tokens"] == [*one["tokens"][:n], *first, one["tokens"][n - 1], *second]
