"""The report as a whole: what it shows, what it escapes, and runs that did not get far."""

from __future__ import annotations

import base64
import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from polyreme.report import ReportData, build_report, write_report
from polyreme.report.charts import CELLS_MAX
from polyreme.report.data import AnsweredPage, AttemptRow, ExpertLoads, Figures, LayerLoad, TrainedStage
from polyreme.report.page import PAGES_MAX, shown_pages
from polyreme.report.style import STYLE
from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.job.accounting import Accounting, TimeCell
from polyreme_api.mixture import Rejection
from polyreme_api.progress import ALL_SETS, StepRecord
from tests.unit.report.samples import START_S, png, record, two_kills

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'&\x00\u202e\ud800"
VOID = {"meta", "img", "br", "input", "hr", "link"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and says whether every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def empty(**changes: object) -> ReportData:
    data = ReportData(
        title="a",
        outcome="Failed",
        reason="the disk is full",
        written_s=START_S,
        figures=Figures(wall_s=0.0, attempts=0),
    )
    return dataclasses.replace(data, **changes)  # type: ignore[arg-type]


def test_a_run_with_two_kills_shows_its_story() -> None:
    reader = read(build_report(two_kills()))
    for words in (
        "after two kills", "Succeeded", "91.2 %", "219 of 240 pages", "800", "48 trained twice", "1 min 26 s", "74 %",
        "7,950", "resumed after 200", "resumed after 550", "RankKilled", "PodLost", "one 1 · two 1 · three 1 · four 2",
        "torn, never loaded", "no PNG: truncated", "dp4 ep2", "kimi-vl-nano", "torch", "2.13.0", "expected 333",
        "one 1 · two 1 · three 1 (samples of 12 steps skipped)",
    ):  # fmt: skip
        assert words in reader.text, words


def test_the_name_is_printed_once_at_the_head_and_the_smoothed_line_is_labelled() -> None:
    reader = read(build_report(two_kills()))
    assert reader.text.partition("Loss")[0].replace("quickstart: Succeeded", "").count("quickstart") == 1
    assert "smoothed: mean of 13 steps before and after" in reader.text


def test_spikes_are_listed_with_what_followed() -> None:
    run = two_kills()
    assert "<h3>Spikes</h3>" not in build_report(run)
    skipped = run.steps[20].model_copy(update={"loss": 9.25, "spike_limit": 3.5, "skipped": True})
    rejection = Rejection(
        attempt=1, spike_step=150, after_step=20, from_step=129, skip_steps=64, why=f"spike in step 150: {HOSTILE}"
    )
    page = build_report(dataclasses.replace(run, steps=[*run.steps[:20], skipped], rejections=[rejection]))
    table = page.partition("<h3>Spikes</h3>")[2].partition("</table>")[0]
    assert "loss 9.25, gradient norm 0, limit 3.5</td><td>skipped" in table
    assert "rolled back; data of steps 129 to 192 skipped" in table
    assert HOSTILE not in table


def test_a_step_that_was_computed_again_is_listed_with_what_was_found() -> None:
    run = two_kills()
    found = {"update_norm": 40.5, "recomputed": "computed again, rank 2 (worker-1) had another result"}
    page = build_report(dataclasses.replace(run, steps=[*run.steps[:20], run.steps[20].model_copy(update=found)]))
    table = page.partition("<h3>Spikes</h3>")[2].partition("</table>")[0]
    assert "update norm 40.5</td><td>computed again, rank 2 (worker-1) had another result; trained on" in table


def test_device_time_is_a_table_with_both_ratios() -> None:
    spent = (("Productive", "", 60_000), ("Hang", "Hung", 20_000), ("Queued", "Starting", 40_000))
    cells = [TimeCell(what=what, why=why, device_milliseconds=ms) for what, why, ms in spent]
    page = build_report(dataclasses.replace(two_kills(), accounting=Accounting(cells=cells)))
    assert "goodput 75 %, ETTR 50 %" in page
    assert re.search(r"<td>Hang</td><td>Hung</td><td[^>]*>20 s</td><td[^>]*>16.7 %</td>", page)
    assert "Device time" not in build_report(two_kills())


def test_the_report_needs_nothing_outside_itself() -> None:
    html = build_report(two_kills())
    reader = read(html)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(reader.tags)
    references = [value or "" for name, value in reader.attributes if name in {"src", "href", "xlink:href", "action"}]
    assert references
    assert all(value.startswith("data:image/png;base64,") for value in references)
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html.replace("&#x27;", "'")


def test_light_and_dark_come_from_the_reader_and_small_screens_are_thought_of() -> None:
    html = build_report(two_kills())
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_hostile_text_is_escaped_everywhere() -> None:
    data = two_kills()
    hostile = dataclasses.replace(
        data,
        title=HOSTILE,
        outcome=HOSTILE,
        reason=HOSTILE,
        job_yaml=HOSTILE,
        attempts=[dataclasses.replace(row, scope=HOSTILE, cause=HOSTILE, message=HOSTILE) for row in data.attempts],
        mixture=[dataclasses.replace(change, weights={HOSTILE: 1}) for change in data.mixture],
        stages=[dataclasses.replace(row, dataset=HOSTILE, stage=HOSTILE) for row in data.stages],
        dead_letters=[
            dataclasses.replace(row, dataset=HOSTILE, stage=HOSTILE, record=HOSTILE, error=HOSTILE)
            for row in data.dead_letters
        ],
        held_out=[dataclasses.replace(row, name=HOSTILE) for row in data.held_out],
        pages=[
            dataclasses.replace(page, question=HOSTILE, expected=HOSTILE, answer=HOSTILE, set_name=HOSTILE)
            for page in data.pages
        ],
        checkpoints=[dataclasses.replace(row, name=HOSTILE) for row in data.checkpoints],
        environment={HOSTILE: HOSTILE},
        time_shares=[dataclasses.replace(part, name=HOSTILE) for part in data.time_shares],
    )
    html = build_report(hostile)
    reader = read(html)
    assert "script" not in reader.tags
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert reader.tags.count("img") == PAGES_MAX
    assert "alert(1)" in reader.text
    assert not set("\x00\u202e\ud800") & set(html)
    html.encode("utf-8")


def test_a_picture_that_is_no_png_is_not_embedded() -> None:
    page = AnsweredPage(png=b"<svg onload=alert(1)>", question="q", expected="1", answer="1", right=True)
    reader = read(build_report(empty(pages=[page])))
    assert "img" not in reader.tags
    assert "no picture" in reader.text


def test_a_run_that_never_started_says_why() -> None:
    reader = read(build_report(empty()))
    assert "the disk is full" in reader.text
    assert "No step was trained." in reader.text
    assert "svg" not in reader.tags


def test_a_run_that_failed_before_its_first_step_shows_its_attempt() -> None:
    attempt = AttemptRow(
        number=1, scope="Start", started_s=START_S, ended_s=START_S + 4, cause="EnvironmentFailed", message="disk full"
    )
    reader = read(build_report(empty(attempts=[attempt], figures=Figures(wall_s=4.0, attempts=1))))
    assert "EnvironmentFailed" in reader.text
    assert "starting, 4.0 s" in reader.text


def test_a_single_step_is_a_picture_too() -> None:
    reader = read(build_report(empty(steps=[record(1, 1, at_s=1, loss=2.5)])))
    assert "polyline" in reader.tags


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_marked_and_breaks_no_picture(loss: float) -> None:
    steps = [record(1, 1, at_s=1, loss=2.5), record(1, 2, at_s=2, loss=loss), record(1, 3, at_s=3, loss=2.0)]
    html = build_report(empty(steps=steps))
    assert f"step 2: loss {loss}" in read(html).text
    assert not re.search(r'points="[^"]*(nan|inf)', html)


def test_only_losses_that_are_no_numbers_draw_nothing() -> None:
    assert "polyline" not in read(build_report(empty(steps=[record(1, 1, at_s=1, loss=math.nan)]))).tags


def test_a_loss_below_zero_is_drawn_on_a_plain_scale() -> None:
    reader = read(build_report(empty(steps=[record(1, step, at_s=step, loss=1 - step) for step in range(1, 5)])))
    assert "loss, log scale" not in reader.text


@pytest.mark.slow
def test_a_long_run_stays_a_small_file() -> None:
    steps = [
        StepRecord(attempt=1, step=step, loss=1 + (step % 97) / 97, tokens=1, step_s=1, ended_at_s=START_S + step)
        for step in range(1, 30_001)
    ]
    assert len(build_report(empty(steps=steps))) < 200_000


def test_wrong_answers_come_first_and_leave_room_for_right_ones() -> None:
    wrong = [AnsweredPage(png=b"", question="", expected="1", answer="2", right=False)] * 100
    right = [AnsweredPage(png=b"", question="", expected="1", answer="1", right=True)] * 100
    shown = shown_pages([*right, *wrong])
    assert [page.right for page in shown] == [False] * (PAGES_MAX // 2) + [True] * (PAGES_MAX // 2)
    assert shown_pages(right[:3]) == right[:3]


def test_many_stages_are_folded_under_a_sentence() -> None:
    reader = read(build_report(empty(stages=[two_kills().stages[1]] * 40)))
    assert "1 dataset: 60,000 results computed, 59,920 reused from earlier runs, 0 dead letters." in reader.text
    assert "40 stages" in reader.text
    assert reader.tags.count("details") == 1


def test_a_report_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    first = write_report(folder, empty())
    assert first == folder / "report.html"
    second = write_report(folder, empty(reason="another"))
    assert "another" in second.read_text(encoding="utf-8")
    assert [path.name for path in folder.iterdir()] == ["report.html"]


def test_a_folder_that_cannot_be_written_is_an_error_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("a file")
    with pytest.raises(EnvironmentFailedError, match="report not written"):
        write_report(tmp_path / "report", empty())


def test_pictures_are_embedded_byte_for_byte() -> None:
    picture = png(28, 1)
    page = AnsweredPage(png=picture, question="q", expected="1", answer="1", right=True)

    assert base64.b64encode(picture).decode() in build_report(empty(pages=[page]))


def test_stages_of_training_and_the_held_out_loss_are_drawn() -> None:
    steps = [
        record(1, step, at_s=step, loss=3.0 / step).model_copy(
            update={"held_out": {ALL_SETS: 4.0 / step, "set": 4.0 / step} if step % 2 == 0 else {}}
        )
        for step in range(1, 9)
    ]
    stages = [
        TrainedStage(name="align", first_step=1, last_step=3, trains=["Tower", "Projector"]),
        TrainedStage(name="joint", first_step=4, last_step=8, trains=[]),
    ]
    html = build_report(empty(steps=steps, steps_planned=8, training_stages=stages))
    page = read(html)
    assert "Trained in stages (align, steps 1 to 3, Tower and Projector alone; joint, steps 4 to 8)." in page.text
    assert "stage joint from step 4" in page.text
    assert html.count('class="held-out"') == 1 + 4, "a line and its dots"
    assert "held out" in page.text
    assert "stages" not in read(build_report(empty(steps=steps))).text


def test_the_load_of_each_expert_is_a_cell_with_its_figures() -> None:
    layers = [
        LayerLoad(layer=1, load=(10, 10, 10, 10), dropped=0, entropy=1.25),
        LayerLoad(layer=2, load=(0, 0, 10, 30), dropped=4, entropy=0.5),
    ]
    html = build_report(empty(experts=ExpertLoads(first_step=11, last_step=20, layers=layers)))
    page = read(html)
    assert "Steps 11 to 20, 2 layers: busiest expert: 200 % above the average of its layer" in page.text
    assert "entropy of the scores 0.50 to 1.25 nats; 4 rows dropped." in page.text
    assert "layer 2, expert 3: 30 rows, 3.00 of the mean" in page.text
    assert [html.count(f'class="cell h{heat}"') for heat in (0, 4, 8)] == [2, 5, 1]
    many = ExpertLoads(first_step=1, last_step=2, layers=[dataclasses.replace(layers[0], load=(1,) * (CELLS_MAX + 1))])
    assert 'class="cell' not in build_report(empty(experts=many)), "told in words alone"
    assert "Experts" not in read(build_report(empty())).text


class Scrolled(HTMLParser):
    """Collects what may scroll, and table heads with their text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.scrolled: list[dict[str, str | None]] = []
        self.heads: list[str] = []
        self._head = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        classes = (given.get("class") or "").split()
        if tag == "pre" or (tag == "div" and {"chart", "table"} & set(classes)):
            self.scrolled.append(given)
        if tag == "th":
            self.heads.append("")
        self._head = tag == "th"

    def handle_data(self, data: str) -> None:
        if self._head:
            self.heads[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._head = self._head and tag != "th"


def test_what_scrolls_is_reached_by_the_keyboard_and_every_head_has_words() -> None:
    """As axe's rules scrollable-region-focusable and empty-table-header ask."""
    data = dataclasses.replace(two_kills(), environment={"torch": "2.13.0"})
    reader = Scrolled()
    reader.feed(build_report(data))
    assert len(reader.scrolled) > 8
    assert [each for each in reader.scrolled if each.get("tabindex") != "0"] == []
    assert [each for each in reader.scrolled if "class" in each and not each.get("aria-label")] == []
    assert len(reader.heads) > 20
    assert "" not in [head.strip() for head in reader.heads]


def test_words_in_tables_are_not_broken_letter_by_letter() -> None:
    """``overflow-wrap: anywhere`` lets a narrow screen shrink a column to one letter; tables scroll instead."""
    rules = dict(re.findall(r"^([^{}@\n]+) \{([^{}]*)\}", STYLE, re.MULTILINE))
    assert "overflow-wrap: break-word" in rules["th, td"]
    assert "overflow-wrap: break-word" in rules["td code"]
