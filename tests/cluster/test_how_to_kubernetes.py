"""The how-to page is run as it stands: a real API server, real ranks, kubectl, and nothing else."""

from pathlib import Path

import pytest

from tests.cluster.kube import api_client, new_namespace
from tests.cluster.laptop import laptop
from tests.cluster.pages import blocks, matches, run_block

PAGE = Path(__file__).parents[2] / "docs/how-to/train-on-kubernetes.md"
BLOCK_S = 900.0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_page_does_what_it_says(kubeconfig: str, tmp_path: Path) -> None:
    story = blocks(PAGE)
    assert len(story) >= 7
    with (
        api_client(kubeconfig) as api,
        new_namespace(api) as namespace,
        laptop(
            kubeconfig,
            tmp_path,
            nodes=(f"{namespace}-left", f"{namespace}-right"),
            devices=2,
            namespace=namespace,
            resource="polyreme.dev/device",
        ) as environment,
    ):
        for block in story:
            run_block(block, environment, timeout_s=BLOCK_S)


@pytest.mark.parametrize(
    ("lines", "patterns"),
    [
        (["job x created"], ("job x created",)),
        (["NAME  QUEUE   AGE"], ("NAME ... AGE",)),
        (["a", "b", "c"], ("...", "c")),
        (["a", "c"], ("a", "...", "c")),
    ],
)
def test_lines_that_fit_a_page(lines: list[str], patterns: tuple[str, ...]) -> None:
    assert matches(lines, patterns)


@pytest.mark.parametrize(
    ("lines", "patterns"),
    [
        (["job x created", "more"], ("job x created",)),
        ([], ("job x created",)),
        (["job y created"], ("job x created",)),
        (["something"], ()),
        (["a", "b"], ("a", "...", "c")),
    ],
)
def test_lines_that_do_not_fit_a_page(lines: list[str], patterns: tuple[str, ...]) -> None:
    assert not matches(lines, patterns)
