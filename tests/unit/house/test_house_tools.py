"""The Makefile and the small programs that it runs do what they say."""

import json
import os
import re
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest

from polyreme_api.exit_codes import ExitCode
from tools import exit_codes, links, page_form, repo_checks, run_targets, setup_venv, whitespace

ROOT = Path(__file__).parents[3]
CHANGES_MAX = 15
"""Lines of a section of the changelog."""
WORKFLOWS = ROOT / ".github/workflows"
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*")
TARGET = re.compile(r"^([a-z][a-z%-]*):(?!=)", re.MULTILINE)


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Under `make check`, make's own variables would turn this call into a part of that one.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=inherited | environment, check=False, capture_output=True, text=True)


def test_help_lists_every_target() -> None:
    targets = TARGET.findall((ROOT / "Makefile").read_text())
    assert {"quickstart", "test", "check", "lint", "docs", "bench", "setup"} <= set(targets)
    listed = re.findall(r"^make (\S+)", make("help").stdout, re.MULTILINE)
    assert sorted(targets) == sorted(listed)


def test_ci_runs_what_a_developer_runs() -> None:
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "- run: make test\n" in (WORKFLOWS / "ci.yaml").read_text()
    assert "- run: .ci/run\n" in (WORKFLOWS / "nightly.yaml").read_text()


@pytest.mark.parametrize("workflow", sorted(WORKFLOWS.glob("*.yaml")), ids=lambda path: path.stem)
def test_workflows_pin_their_actions_and_call_targets_that_exist(workflow: Path) -> None:
    text = workflow.read_text()
    assert re.search(r"\bnot run\b", text.partition("name:")[0], re.IGNORECASE), "says whether it has run"
    used = re.findall(r"uses: *(.*)", text)
    assert used
    assert [one for one in used if not PINNED.fullmatch(one)] == []
    targets = {target.partition("%")[0] for target in TARGET.findall((ROOT / "Makefile").read_text())}
    called = re.findall(r"(?:run: |^ +)make (?!help)([a-z][a-z-]*)", text, re.MULTILINE)
    assert {name for name in called if name not in targets} == set()


def test_make_says_which_python_it_needs() -> None:
    """An override empties the search, as on a machine that has none; the key makes set-up necessary."""
    result = make("setup", "PYTHON=", "KEY=absent")
    assert result.returncode != 0
    assert "no Python from 3.11 to 3.14" in result.stderr


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    result = make("bench-nonesuch", "DEV=")
    assert result.returncode != 0
    assert "no benchmark nonesuch; there are: " in result.stderr


def test_a_benchmark_finds_the_modules_of_this_repository() -> None:
    """Make sets PYTHONSAFEPATH, so neither a program's folder nor the root is searched."""
    for program in sorted(ROOT.glob("benchmarks/*/run.py")):
        text = program.read_text()
        if re.search(r"^from (benchmarks|tools)\b", text, re.MULTILINE):
            assert "sys.path.insert(0, str(Path(__file__).parents[2]))" in text, program


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("Prepared 134 packages in 41.27s", 41.27),
        ("Prepared 1 package in 13ms", 0.013),
        ("Prepared 90 packages in 2m 05s", 125.0),
        ("Checked 134 packages in 13ms", 0.0),
        ("", 0.0),
    ],
)
def test_the_times_of_a_set_up_are_those_that_uv_says(line: str, seconds: float) -> None:
    assert setup_venv.phase_s(f"Resolved 134 packages in 1ms\n{line}\n", "Prepared") == seconds


def test_a_failed_set_up_leaves_no_stamp(tmp_path: Path) -> None:
    """A lock with a wrong hash stops the set-up; the environment does not count as whole."""
    lock, venv, stamp = tmp_path / "uv.lock.txt", tmp_path / "venv", tmp_path / "venv/.setup/dev-0"
    lock.write_text(f"uv==0.0.0 \\\n    --hash=sha256:{'0' * 64}\n")
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin/python").symlink_to("/bin/false")
    arguments = ["--venv", str(venv), "--uv-lock", str(lock), "--lock", str(lock), "--stamp", str(stamp)]
    assert setup_venv.main(arguments) == 1
    assert not stamp.exists()
    assert not (venv / setup_venv.TIMES_NAME).exists()


def test_a_written_file_is_whole_and_alone(tmp_path: Path) -> None:
    setup_venv.write(tmp_path / "a/b.json", json.dumps({"x": 1}))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]


def test_every_stage_is_counted_and_one_failure_fails_the_whole(tmp_path: Path) -> None:
    report = tmp_path / "unit.xml"
    report.write_text('<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/></testsuites>')
    assert run_targets.counts(report) == {"passed": 2, "failed": 2, "skipped": 1}
    failed = run_targets.Stage(target="unit", status=2, wall_s=1.0, cpu_s=1.5, tests=run_targets.counts(report))
    passed = run_targets.Stage(target="lint", status=0, wall_s=1.0, cpu_s=1.5, tests={})
    assert run_targets.render([passed, failed]).endswith("FAILED: unit")
    assert "2 passed, 2 failed, 1 skipped" in run_targets.render([passed, failed])
    assert run_targets.render([passed]).endswith("all passed")


def test_the_page_of_exit_codes_is_what_the_code_says() -> None:
    page = ROOT / "docs/reference/exit-codes.md"
    assert page.read_text() == exit_codes.render(), "run make docs"


def test_every_exit_code_has_processes_a_meaning_and_a_remedy() -> None:
    assert [code for code in ExitCode if not (code.processes and code.meaning and code.remedy)] == []


def test_every_link_in_the_documents_leads_somewhere() -> None:
    pages = links.pages(ROOT)
    assert pages
    assert [offence for page in pages for offence in links.broken_links(page)] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# A `code` heading\n`[a](z)` [no](b.md) [none](#another) [fine](#a-code-heading) [far](https://host/x)\n```\n[code](c.md)\n```\n"
    )
    assert [offence.rpartition(" ")[2] for offence in links.broken_links(page)] == ["b.md", "#another"]


def test_no_page_has_a_wall_of_text_or_a_broken_line() -> None:
    found = {page: list(page_form.faults(page.read_text(encoding="utf-8"))) for page in links.pages(ROOT)}
    assert {str(page.relative_to(ROOT)): faults for page, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("# T\n\n" + "word " * 121, "3: a paragraph of 121 words, at most 120"),
        ("- " + "word " * 120, "1: a paragraph of 121 words, at most 120"),
        (
            "## A heading  Its paragraph " + "word " * 20,
            "1: a heading of 128 characters: is its paragraph on the same line?",
        ),
        ("- The one. - **The other**", "1: two bullets in one line"),
        ("a short line\n" + "long " * 21, "1: the line breaks early"),
    ],
)
def test_a_page_out_of_form_is_found(page: str, fault: str) -> None:
    assert list(page_form.faults(page)) == [fault]


def test_code_tables_and_short_paragraphs_are_in_form() -> None:
    words = "word " * 121
    assert list(page_form.faults(f"# T\n\n```\n{words}\n```\n\n    {words}\n\n| {words} |\n\nOne.\nTwo.\n")) == []


def test_the_changelog_has_one_line_a_change_and_short_sections() -> None:
    _, *sections = re.split(r"^##+ (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    changes = {head: body.strip().splitlines() for head, body in zip(sections[::2], sections[1::2], strict=True)}
    assert {head: len(lines) for head, lines in changes.items() if len(lines) > CHANGES_MAX} == {}
    loose = [line for lines in changes.values() for line in lines if line.startswith("  ")]
    assert loose == [], "a change is one line; details go into a page"


def test_each_command_is_declared_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {
        "polyreme": "polyreme.main:main",
        "polyreme-operator": "polyreme_operator.main:main",
        "polyreme-datahub": "polyreme_datahub_service.main:main",
        "kubectl-polyreme": "polyreme.plugin.main:main",
        "kubectl_complete-polyreme": "polyreme.plugin.completion:main",
    }


def test_no_file_makes_a_diff_stumble() -> None:
    # A patch marks an unchanged empty line by one space; kept files are as their version or library wrote them.
    texts = {
        path: text
        for path, text in repo_checks.tracked_texts(ROOT).items()
        if path.suffix != ".patch" and not str(path).startswith(("tests/kept/v", "tests/unit/datahub/written/"))
    }
    found = {str(path): whitespace.offences(text.encode()) for path, text in texts.items()}
    assert {path: offences for path, offences in found.items() if offences} == {}


@pytest.mark.parametrize(
    "content", [b"a \n", b"a", b"a\n\n", b"<<<<<<< ours\n", b"a\r\n", b"a" * 524288 + b"\n", b"\0" * 524289]
)
def test_stray_whitespace_and_large_files_are_found(content: bytes) -> None:
    assert whitespace.offences(content) != []


@pytest.mark.parametrize("content", [b"", b"a\n", b"\0 \n", b"  a\n"], ids=["empty", "line", "binary", "indented"])
def test_a_clean_file_is_left_alone(content: bytes) -> None:
    assert whitespace.offences(content) == []


def test_commit_hooks_are_local() -> None:
    """A hook from elsewhere is a download that no lock covers."""
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (\S+)", config) == ["local"]
    for tool in re.findall(r"entry: \.venv/bin/(\S+)", config):
        assert tool in {"python", "ruff", "lint-imports", "mypy"}


def test_a_long_download_says_how_far_it_has_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ended = tmp_path / "io", threading.Event()
    sizes = iter([0, 700 << 20, 700 << 20, 1500 << 20])

    def wait(_: float) -> bool:
        size = next(sizes, None)
        if size is not None:
            file.write_text(f"rchar: 5\nwchar: {size}\n")
        return size is None

    monkeypatch.setattr(ended, "wait", wait)
    setup_venv.show_progress(file, ended)
    said = [f"{size} MiB downloaded and unpacked so far" for size in ("700", "1,500")]
    assert capsys.readouterr().err.splitlines() == said
    assert setup_venv.written_mib(Path("/proc/self/io")) >= 0
    assert setup_venv.written_mib(tmp_path / "none") == 0
