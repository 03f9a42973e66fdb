"""Worker counts that change: fewer rather than wait, more when it pays, another by kubectl scale; or a refusal."""

import pytest

from polyreme_api.exit_codes import ExitCode
from polyreme_cluster.port import ObjectRef
from tests.cluster.stage import Stage, condition_of, play


def test_an_elastic_job_starts_smaller_rather_than_wait(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=3)
        await stage.queue()
        await stage.job("rigid", 4)
        await stage.until_waits("rigid", "WaitingForCapacity", "needs 4 devices; room for 3")
        await stage.job("elastic", 4, workers={"minReplicas": 2}, priority=1)
        status = await stage.until_trains("elastic", workers=3)
        assert condition_of(status, "Admitted")[2] == "3 workers on 1 node; 4 workers requested"
        assert (status["layout"].split()[0], status["ready"]) == ("dp3", "3/3")
        assert len(await stage.pods("elastic")) == 3

    play(operated, story)


def test_an_elastic_job_waits_for_its_least_size(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=1)
        await stage.queue()
        await stage.job("elastic", 4, workers={"minReplicas": 2})
        await stage.until_waits("elastic", "WaitingForCapacity", "needs 4 devices; room for 1")
        await stage.node("more", devices=1)
        await stage.until_trains("elastic", workers=2)

    play(operated, story)


@pytest.mark.parametrize("elastic", [False, True])
def test_scale_works_while_running_down_and_up(operated: str, elastic: bool) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        await stage.queue(nominal=4)
        bounds = {"minReplicas": 1, "maxReplicas": 4} if elastic else {}
        await stage.job("scaled", 4, workers=bounds)
        await stage.until_trains("scaled", workers=4)
        before = {pod["metadata"]["uid"] for pod in await stage.pods("scaled")}
        await stage.kubectl("scale", "tj/scaled", "--replicas=2")
        status = await stage.until_trains("scaled", attempt=2, workers=2)
        assert condition_of(status, "Admitted")[1] == "Shrunk"
        step = stage.hollow.stopped_at_step["scaled"]
        assert stage.hollow.said["scaled"].resumed_from_step == step

        async def two() -> bool:
            return len(await stage.pods("scaled")) == 2

        await stage.until(two, "two pods are left")
        assert {pod["metadata"]["uid"] for pod in await stage.pods("scaled")} <= before, "who stays keeps its pod"
        queue = await stage.until_queue("q", lambda seen: (seen.get("usage") or [{}])[0].get("used") == 2, "two used")
        assert queue["admitted"] == 1
        await stage.kubectl("scale", "tj/scaled", "--replicas=4")
        status = await stage.until_trains("scaled", attempt=3, workers=4)
        assert condition_of(status, "Admitted")[1] == "Grown"
        assert not status.get("restarts")

    play(operated, story)


def test_scale_works_while_waiting(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue()
        await stage.job("waits", 4)
        await stage.until_waits("waits", "WaitingForCapacity", "needs 4 devices; room for 2")
        await stage.kubectl("scale", "tj/waits", "--replicas=2")
        status = await stage.until_trains("waits", attempt=1, workers=2)
        assert condition_of(status, "Admitted")[2] == "2 workers on 1 node"

    play(operated, story)


@pytest.mark.parametrize(
    ("replicas", "words"),
    [(6, "needs"), (5, "packsPerStep 12 leaves ranks of dp 5 without a pack")],
    ids=["no room", "no layout"],
)
def test_a_size_that_is_refused_ends_no_job_and_the_verb_says_so(
    operated: str, replicas: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        await stage.queue()
        await stage.job("stays", 2, parallelism={"mode": "Explicit", "dp": 2})
        await stage.until_trains("stays")
        assert await stage.polyreme("scale", "stays", "--replicas", str(replicas)) == ExitCode.REFUSED
        said = capsys.readouterr().err
        assert f"spec.workers.replicas {replicas} is refused, 2 workers stay in force" in said
        assert words in said
        status = await stage.status("stays")
        assert (status["attempt"]["number"], status["attempt"]["desired"]) == (1, "Run")
        assert condition_of(status, "Running")[0] == "True"
        assert condition_of(status, "ResizeRefused")[:2] == ("True", "NoFit")
        assert await stage.polyreme("suspend", "stays", "--wait", "--timeout", "45") == 0
        assert await stage.polyreme("resume", "stays", "--wait", "--timeout", "45") == 0
        assert "runs with 2 workers" in capsys.readouterr().err
        status = await stage.until_trains("stays", attempt=2, workers=2)
        assert words in condition_of(status, "ResizeRefused")[2]
        assert await stage.polyreme("scale", "stays", "--replicas", "4", "--wait", "--timeout", "45") == 0
        status = await stage.until_trains("stays", attempt=3, workers=4)
        assert status["layout"] == "dp4"
        assert condition_of(status, "ResizeRefused")[0] == ""

    play(operated, story)


def test_bounds_of_scale_are_the_servers_to_refuse(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.queue(stopPolicy="Hold")
        await stage.job("bound", 2, workers={"maxReplicas": 3})
        with pytest.raises(AssertionError, match="maxReplicas"):
            await stage.kubectl("scale", "tj/bound", "--replicas=4")
        job = await stage.cluster.get(ObjectRef(kind="TrainingJob", namespace=stage.namespace, name="bound"))
        assert job["spec"]["workers"]["replicas"] == 2

    play(operated, story)
