"""A worker count that is refused never ends a job: the one in force is admitted again, also by another replica."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from polyreme_api.labels import API_VERSION, LABEL_JOB_UID
from polyreme_cluster.port import InvalidObjectError, Manifest, NotFoundError, ObjectRef, PortError
from tests.unit.operator.operator_scenes import DEVICE
from tests.unit.operator.operator_stories import Story, play

NO_LAYOUT = 99
"""Workers for which 12 packs are too few."""
IN_FORCE = 2


class Jobs:
    """Users, kubelets and launchers of a story."""

    def __init__(self, story: Story) -> None:
        self.story, self.uids = story, dict[str, str]()

    def make(self, name: str, replicas: int = IN_FORCE, **spec: object) -> None:
        elastic = spec.pop("elastic", None)
        self.uids[name] = self.story.job(name, replicas=replicas, elastic=elastic, **spec)  # type: ignore[arg-type]

    def edit(self, name: str, **spec: object) -> None:
        self.story.store.patch(self.story.ref(name), {"spec": spec})

    def scale(self, name: str, replicas: int) -> None:
        self.edit(name, workers={"replicas": replicas})

    async def run(self, seconds: float) -> None:
        """Let launchers train, and stop where they are asked to."""
        for at in range(int(seconds * 2)):
            await asyncio.sleep(0.5)
            self.story.runs()
            for name, uid in self.uids.items():
                attempt = self.story.status(name).get("attempt")
                if attempt is None or not self.story.admitted(name) or self._running(uid) < attempt["replicas"]:
                    continue
                outcome = {"outcome": "Stopped"} if attempt["desired"] == "Stop" else {}
                try:
                    self.story.reports(name, uid, step=10 + at, **outcome)
                except NotFoundError:
                    continue  # no Lease yet

    def _running(self, uid: str) -> int:
        pods = [pod["metadata"] for pod in self.story.objects("Pod") if pod["status"]["phase"] == "Running"]
        return sum(metadata["labels"][LABEL_JOB_UID] == uid for metadata in pods)

    def size(self, name: str) -> int:
        """Workers with which a job trains; 0 if it does not."""
        trains = self.story.condition(name, "Running")[0] == "True"
        return int(self.story.status(name)["attempt"]["replicas"]) if trains else 0

    def refusal(self, name: str) -> str:
        held, reason, message = self.story.condition(name, "ResizeRefused")
        assert (held, reason) in {("", ""), ("True", "NoFit")}
        return message

    def has_failed(self, name: str) -> bool:
        return self.story.condition(name, "Failed")[0] == "True"


async def suspend_and_resume(jobs: Jobs) -> None:
    jobs.edit("big", suspend=True)
    await jobs.run(5)
    assert jobs.story.condition("big", "Suspended")[0] == "True"
    jobs.edit("big", suspend=False)


async def preempt(jobs: Jobs) -> None:
    await jobs.run(60)  # no job is preempted in the first minute
    jobs.make("urgent", 4, priority=1000)
    await jobs.run(8)
    assert jobs.size("urgent") == 4
    assert not jobs.story.admitted("big")
    jobs.edit("urgent", suspend=True)
    await jobs.run(5)


async def drain(jobs: Jobs) -> None:
    queue = ObjectRef(kind="TrainingQueue", name="default")
    jobs.story.store.create({"apiVersion": API_VERSION, "kind": "TrainingQueue", "metadata": {"name": "default"}})
    jobs.story.store.patch(queue, {"spec": {"stopPolicy": "HoldAndDrain"}})
    await jobs.run(5)
    assert not jobs.story.admitted("big")
    jobs.story.store.patch(queue, {"spec": {"stopPolicy": "None"}})


Pause = Callable[[Jobs], Awaitable[None]]


@pytest.mark.parametrize("pause", [suspend_and_resume, preempt, drain], ids=lambda pause: pause.__name__)
@pytest.mark.parametrize("elastic", [None, (1, 100)], ids=["of one size", "elastic"])
def test_a_job_is_admitted_again_with_the_count_in_force_when_the_new_one_has_no_layout(
    pause: Pause, elastic: tuple[int, int] | None
) -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        jobs = Jobs(story)
        jobs.make("big", elastic=elastic, minRuntimeSeconds=0)
        async with story.operator():
            await jobs.run(5)
            assert jobs.size("big") == IN_FORCE
            jobs.scale("big", NO_LAYOUT)
            await jobs.run(3)
            message = jobs.refusal("big")
            assert message.startswith("spec.workers.replicas 99 is refused, 2 workers stay in force: ")
            assert "packsPerStep 12 leaves ranks of dp 99 without a pack" in message
            assert jobs.size("big") == IN_FORCE
        # Another operator knows only what the status says.
        async with story.operator():
            await pause(jobs)
        async with story.operator():
            await jobs.run(8)
            assert jobs.size("big") == IN_FORCE
            assert jobs.refusal("big") == message
            jobs.scale("big", 4)
            await jobs.run(8)
            assert jobs.size("big") == 4
            assert jobs.refusal("big") == ""

    play(told)


def test_a_count_without_room_is_asked_for_again_while_the_job_trains_with_the_one_in_force() -> None:
    async def told(story: Story) -> None:
        story.node(devices=3)
        jobs = Jobs(story)
        jobs.make("big")
        async with story.operator():
            await jobs.run(5)
            jobs.scale("big", 4)
            await jobs.run(3)
            expected = "spec.workers.replicas 4 is refused, 2 workers stay in force: needs 2 devices; room for 1"
            expected = f"{expected} on 1 node"
            assert jobs.refusal("big") == expected
            await suspend_and_resume(jobs)
        async with story.operator():
            await jobs.run(8)
            assert jobs.size("big") == IN_FORCE
            assert jobs.refusal("big") == expected
            story.node("n1", devices=1)
            await jobs.run(8)
            assert jobs.size("big") == 4
            assert jobs.refusal("big") == ""

    play(told)


@pytest.mark.parametrize(("replicas", "refused"), [(NO_LAYOUT, True), (4, False)], ids=["no layout", "no room"])
def test_a_count_that_is_set_while_the_job_is_suspended_is_refused_at_once_if_it_has_no_layout(
    replicas: int, refused: bool
) -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        jobs = Jobs(story)
        jobs.make("big")
        async with story.operator():
            await jobs.run(5)
            jobs.edit("big", suspend=True)
            await jobs.run(5)
            jobs.scale("big", replicas)
            await jobs.run(3)
            assert bool(jobs.refusal("big")) is refused
            jobs.edit("big", suspend=False)
            await jobs.run(8)
            # A count that fits no node, also if all are empty, is refused as well.
            assert jobs.size("big") == IN_FORCE
            assert f"spec.workers.replicas {replicas} is refused" in jobs.refusal("big")
            jobs.scale("big", IN_FORCE)
            await jobs.run(3)
            assert jobs.refusal("big") == ""
            assert jobs.size("big") == IN_FORCE

    play(told)


def test_a_count_that_only_others_take_the_room_of_is_waited_for() -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        jobs = Jobs(story)
        jobs.make("big")
        async with story.operator():
            await jobs.run(5)
            jobs.edit("big", suspend=True)
            await jobs.run(5)
            jobs.make("other", 2)
            await jobs.run(5)
            jobs.scale("big", 4)
            jobs.edit("big", suspend=False)
            await jobs.run(5)
            assert story.condition("big", "Queued")[:2] == ("True", "WaitingForCapacity")
            assert jobs.refusal("big") == ""
            jobs.edit("other", suspend=True)
            await jobs.run(8)
            assert jobs.size("big") == 4

    play(told)


def test_a_job_that_never_ran_waits_with_the_count_that_had_a_layout() -> None:
    async def told(story: Story) -> None:
        jobs = Jobs(story)
        jobs.make("big")
        async with story.operator():
            await jobs.run(3)
            jobs.scale("big", NO_LAYOUT)
            await jobs.run(3)
            assert "spec.workers.replicas 99 is refused, 2 workers stay in force" in jobs.refusal("big")
        async with story.operator():
            story.node(devices=2)
            await jobs.run(5)
            assert jobs.size("big") == IN_FORCE

    play(told)


@pytest.mark.parametrize("suspended", [False, True], ids=["queued", "suspended at first"])
def test_a_new_job_whose_first_count_has_no_layout_fails(suspended: bool) -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        jobs = Jobs(story)
        jobs.make("big", NO_LAYOUT, suspend=suspended)
        async with story.operator():
            await jobs.run(3)
            jobs.edit("big", suspend=False)
            await jobs.run(3)
            assert story.condition("big", "Failed")[:2] == ("True", "Misconfigured")

    play(told)


@pytest.mark.parametrize("allowed", [0, 5])
def test_a_count_whose_pods_the_api_server_refuses_gives_way_to_the_one_in_force(allowed: int) -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        jobs = Jobs(story)

        def full(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
            if (verb, ref.kind) != ("create", "Pod") or len(story.objects("Pod")) < IN_FORCE:
                return None
            return InvalidObjectError(f"create of {ref} refused: exceeded quota of {DEVICE}")

        story.cluster.refuses = full
        jobs.make("big", failurePolicy={"maxRestarts": allowed, "backoff": {"initialSeconds": 1}})
        async with story.operator():
            await jobs.run(5)
            jobs.scale("big", 4)
            await jobs.run(30)
            assert not jobs.has_failed("big")
            assert jobs.size("big") == IN_FORCE
            assert "spec.workers.replicas 4 is refused, 2 workers stay in force: " in jobs.refusal("big")
            attempts = story.status("big")["attempt"]["number"]
            await jobs.run(120)
            assert story.status("big")["attempt"]["number"] == attempts, "it is not stopped for the same refusal again"
            story.cluster.refuses = lambda verb, ref, body: None
            jobs.scale("big", 3)
            await jobs.run(8)
            assert jobs.size("big") == 3

    play(told)
