"""``kubectl polyreme console`` in Chromium on a real API server: its pages, and a job from form to deletion."""

import json
import re
from collections.abc import Iterator

import pytest

from polyreme.console.job_form import as_yaml
from polyreme.console.server import declared_routes
from polyreme.plugin.console.backend import KubeconfigBackend
from tests.browser.chromium import Window, served
from tests.cluster.kube import api_client, kubectl, new_namespace
from tests.contract.bucket_run import status_of, write_run
from tests.contract.run_sources import job_of
from tools.chromium import driven
from tools.s3.server import BucketServer

JOB, CLONE = "big", "big-2"
Place = tuple[Window, str]


@pytest.fixture(scope="module")
def opened(kubeconfig: str, bucket_server: BucketServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A window with a session, and a namespace with one job that left steps in a bucket."""
    job, bucket = tmp_path_factory.mktemp("job") / "job.yaml", "s3://bucket/browser"
    with api_client(kubeconfig) as api, new_namespace(api) as own, pytest.MonkeyPatch.context() as patch:
        for name, value in bucket_server.environment.items():
            patch.setenv(name, value)
        write_run(bucket)
        job.write_text(as_yaml(job_of(own, JOB)))
        kubectl(kubeconfig, "apply", "-f", str(job))
        status = json.dumps({"status": status_of(bucket)})
        named = ("trainingjobs.polyreme.dev", JOB, "-n", own, "--subresource=status", "--type=merge", "-p", status)
        kubectl(kubeconfig, "patch", *named)
        words = ("console", "--port", "0", "--kubeconfig", kubeconfig, "-n", own)
        with driven() as (browser, axe, expect), served("polyreme.plugin", *words) as console:
            window = Window(browser, axe, expect, origin=console.origin)
            window.page.goto(console.link)
            yield window, own
            window.close()


@pytest.fixture
def place(opened: Place) -> Iterator[Place]:
    """The same window; what it must not have done fails the test."""
    window, _ = opened
    yield opened
    assert window.faults == []


@pytest.mark.parametrize(("width", "colors"), [(1280, "light"), (360, "dark")])
def test_pages_of_a_cluster_are_accessible_and_fit_the_window(place: Place, width: int, colors: str) -> None:
    window, own = place
    for page in (window.page, window.blank):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=colors)
    routes = [route for route in declared_routes(KubeconfigBackend.pages) if route.method == "GET"]
    paths = [route.path.format(namespace=own, name=JOB) for route in routes if not route.path.startswith("/live/")]
    assert "/queues" in paths
    for path in (*paths, f"/submit?from={own}/{JOB}", f"/?namespace={own}&text=none"):
        window.look(path)
        window.expect(window.page.locator("h1")).to_have_count(1)
    window.look(f"/runs/{own}/{JOB}")
    window.expect(window.page.get_by_role("img", name=f"loss over step of {JOB}")).to_be_visible()
    window.look(f"/runs/{own}/{JOB}/logs")
    window.sees("pre", "last words <b>")


def test_a_job_of_a_cluster_is_cloned_checked_suspended_and_deleted(place: Place) -> None:
    window, own = place
    window.go(f"/?namespace={own}")
    window.page.get_by_role("link", name=JOB, exact=False).first.click()
    window.page.get_by_role("link", name="Clone with changes").click()
    window.expect(window.field("metadata.name")).to_have_value(CLONE)
    window.field("training.steps").fill("0")
    window.press("Check")
    window.sees("#result .notice.bad", "training.steps")
    window.field("training.steps").fill("20")
    window.press("Check")
    window.sees("#result", "The API server accepts it (dry run)")
    window.press("Submit")
    window.expect(window.page).to_have_url(re.compile(f"/runs/{own}/{CLONE}$"))
    window.act("Suspend")
    window.sees(".actions summary", "Resume")
    window.act("Delete")
    window.expect(window.page).to_have_url(re.compile("/$"))
    window.go(f"/?namespace={own}")
    window.sees("table.runs td.name", JOB)
    window.expect(window.page.get_by_role("link", name=CLONE, exact=False)).to_have_count(0)
