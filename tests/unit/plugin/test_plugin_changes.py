"""How the plugin changes a job that others change too, and what it says to the shell."""

import asyncio
import io
from typing import Any

import pytest

from polyreme.plugin import change
from polyreme.plugin.completion import answers
from polyreme.plugin.main import COMMANDS, app, invoke
from polyreme.plugin.printing import bar, show
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.exit_codes import ExitCode
from polyreme_cluster.port import ConflictError, Manifest, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from tests.unit.plugin.plugin_scenes import NOW_S, condition, job

REF = ObjectRef(kind="TrainingJob", namespace="team", name="big")


class Busy(EmbeddedCluster):
    """A cluster in which another client changes the job right before each of the first patches."""

    def __init__(self, meddles: int) -> None:
        super().__init__(Store(new_uid=lambda: "u", now_s=lambda: NOW_S))
        self.meddles = meddles

    async def patch(self, ref: ObjectRef, merge_patch: Manifest, **options: Any) -> Manifest:
        if self.meddles > 0:
            self.meddles -= 1
            await super().patch(ref, {"metadata": {"labels": {"meddled": str(self.meddles)}}})
        return await super().patch(ref, merge_patch, **options)


def made(meddles: int = 0, **fields: Any) -> Busy:
    cluster = Busy(meddles)
    manifest = job("big", **fields)
    status = manifest.pop("status")
    manifest["metadata"] = {"name": "big", "namespace": "team"}
    asyncio.run(cluster.create(manifest))
    if status:
        asyncio.run(EmbeddedCluster.patch(cluster, REF, {"status": status}, subresource="status"))
    return cluster


def spec_of(cluster: Busy) -> dict[str, Any]:
    spec: dict[str, Any] = asyncio.run(cluster.get(REF))["spec"]
    return spec


def test_a_conflicting_change_is_recomputed_on_the_new_version() -> None:
    cluster = made(meddles=change.TRIES_MAX - 1)
    _, changed = asyncio.run(change.change(cluster, "team", "big", change.suspend))
    assert changed
    assert spec_of(cluster)["suspend"] is True


def test_it_gives_up_when_others_never_stop() -> None:
    with pytest.raises(ConflictError):
        asyncio.run(change.change(made(meddles=99), "team", "big", change.suspend))


def test_nothing_is_sent_when_it_is_so_already() -> None:
    cluster = made(suspend=True)
    before = asyncio.run(cluster.get(REF))["metadata"]["resourceVersion"]
    _, changed = asyncio.run(change.change(cluster, "team", "big", change.suspend))
    assert not changed
    assert asyncio.run(cluster.get(REF))["metadata"]["resourceVersion"] == before


@pytest.mark.parametrize("wanted", [change.suspend, change.resume, change.scale_to(3)])
def test_a_finished_job_is_left_alone(wanted: Any) -> None:
    cluster = made(status={"conditions": [condition("Failed", "RunFailed")]})
    with pytest.raises(RefusedError, match="has finished"):
        asyncio.run(change.change(cluster, "team", "big", wanted))


def test_a_paused_job_is_resumed_by_a_change_alone() -> None:
    paused = {**condition("Suspended", "LossSpikes"), "observedGeneration": 1}
    cluster = made(status={"conditions": [paused]})
    with pytest.raises(RefusedError, match="team/big is paused since its loss spiked again after rollbacks"):
        asyncio.run(change.change(cluster, "team", "big", change.resume))
    for wanted, suspended in ((change.suspend, True), (change.resume, False)):
        asyncio.run(change.change(cluster, "team", "big", wanted))
        assert spec_of(cluster)["suspend"] is suspended


def test_scale_stays_within_the_bounds_of_the_job() -> None:
    cluster = made(workers={"replicas": 2, "minReplicas": 2, "maxReplicas": 4})
    for replicas in (1, 5):
        with pytest.raises(InvalidConfigError, match="expected 2 to 4"):
            asyncio.run(change.change(cluster, "team", "big", change.scale_to(replicas)))
    asyncio.run(change.change(cluster, "team", "big", change.scale_to(4)))
    assert spec_of(cluster)["workers"]["replicas"] == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["to"], ["topology", "top"]),
        (["get", "-o", "j"], ["json"]),
        (["topology", "--le"], ["--level"]),
        (["nothing", "x"], []),
    ],
)
def test_words_are_completed(words: list[str], expected: list[str]) -> None:
    assert answers(words, app) == expected


def test_completion_says_nothing_where_there_is_no_cluster(tmp_path: Any) -> None:
    assert answers(["why", "--kubeconfig", str(tmp_path / "none"), ""], app) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_only_on_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain, piped = Terminal(), Terminal(), io.StringIO()
    show(bar(1, 2, width=4), stream=coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    show(bar(1, 2, width=4), stream=plain)
    show(bar(1, 2, width=4), stream=piped)
    assert "\x1b[32m" in coloured.getvalue()
    assert "\x1b[32m" not in plain.getvalue()
    assert piped.getvalue() == "[##..]\n"


def test_every_verb_has_a_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert invoke([command.name, "--help"]) == ExitCode.OK
        assert f"kubectl polyreme {command.name}" in " ".join(capsys.readouterr().out.split())


def test_a_wrong_option_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["get", "--nothing"]) == ExitCode.USAGE
    assert "see kubectl polyreme get --help" in capsys.readouterr().err
