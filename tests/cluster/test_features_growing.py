"""Elastic jobs that get more workers while they run, when it pays."""

from collections.abc import Iterator

import pytest

from tests.cluster.operators import operating
from tests.cluster.stage import Stage, condition_of, play

COOLED_DOWN_STEP = 15
"""Steps take a fifth of a second each."""


@pytest.fixture(scope="module")
def soon_growing(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Path of the kubeconfig of a cluster whose operator ends attempts to grow after two seconds, not five minutes."""
    options = ("--binding", "NodeAffinity", "--grow-cooldown-seconds", "2")
    with operating(kubeconfig, tmp_path_factory.mktemp("operator"), *options):
        yield kubeconfig


async def cooled_down(stage: Stage, job: str) -> None:
    async def look() -> bool:
        return stage.hollow.said[job].step >= COOLED_DOWN_STEP

    await stage.until(look, f"{job} has run for the cooldown")


def test_a_small_job_grows_when_there_is_room_and_it_pays(soon_growing: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue()
        await stage.job("grows", 4, workers={"minReplicas": 2})
        await stage.until_trains("grows", workers=2)
        await cooled_down(stage, "grows")
        await stage.node("more", devices=2)
        status = await stage.until_trains("grows", attempt=2, workers=4)
        assert condition_of(status, "Admitted")[1] == "Grown"
        assert stage.hollow.said["grows"].resumed_from_step == stage.hollow.stopped_at_step["grows"]
        assert sorted(pod["status"]["phase"] for pod in await stage.pods("grows")) == ["Running"] * 4

    play(soon_growing, story)


def test_growing_that_does_not_pay_is_left(soon_growing: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue()
        # Twenty steps of a fifth of a second are not worth a restart.
        await stage.job("short", 4, workers={"minReplicas": 2}, training={"steps": 20, "packsPerStep": 12})
        await stage.until_trains("short", workers=2)
        await cooled_down(stage, "short")
        await stage.node("more", devices=2)

        async def small() -> bool:
            return bool((await stage.status("short"))["attempt"]["replicas"] == 2)

        await stage.stays(small, "it keeps its size")

    play(soon_growing, story)
