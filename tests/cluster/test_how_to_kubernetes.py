"""The how-to page is run as written: a real API server, real ranks, kubectl, and nothing else."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.kube import ROOT, api_client, kubectl, new_namespace
from tests.cluster.laptop import laptop
from tests.cluster.pages import blocks, matches, run_block

PAGE = ROOT / "docs/how-to/train-on-kubernetes.md"
README = ROOT / "README.md"
BLOCK_S = 900.0
CREATED_BY_OTHERS = "polyreme-system"
"""The operator's namespace: other tests make it too, and a laptop's cluster does not have it."""


def test_the_readme_and_the_page_have_the_same_laptop() -> None:
    assert on_a_laptop(README) == on_a_laptop(PAGE)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_page_does_what_it_says(kubeconfig: str, tmp_path: Path) -> None:
    story = blocks(PAGE)
    assert len(story) >= 7
    apply, _, operator = on_a_laptop(PAGE)
    if not os.environ.get("KUBECONFIG"):
        kubectl(kubeconfig, "delete", "namespace", CREATED_BY_OTHERS, "--ignore-not-found", "--wait")
    kubectl(kubeconfig, *(str(ROOT / word) if word.startswith("manifests/") else word for word in apply))
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
            operator_options=operator[: operator.index("--checkpoint-root")],
        ) as environment,
    ):
        for block in story:
            run_block(block, environment, timeout_s=BLOCK_S)


def on_a_laptop(page: Path) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """Return the arguments of kubectl, of ``polyreme node`` and of the operator that a page starts a laptop with."""
    lines = page.read_text().splitlines()
    begins = next(number for number, line in enumerate(lines) if "$(make cluster-up)" in line)
    up, node, operator = (line.strip() for line in lines[begins : begins + 3])
    _, _, apply = up.partition("; kubectl ")
    assert node.startswith("polyreme node ")
    assert operator.startswith("polyreme-operator ")
    return shlex.split(apply), shlex.split(node)[2:], shlex.split(operator)[1:]


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
