"""A console of all users in a browser: a token that is spent, a cluster that goes away, a job that is resized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import LOST, Window
from tests.browser.served_console import SPACE, ServedConsole, console_of_all_users

Driver = tuple[Any, str, Any]


@pytest.fixture
def users(driver: Driver) -> Iterator[tuple[ServedConsole, Window]]:
    """A console of all users, and a window of one who has logged in; the cluster has one job."""
    browser, axe, expect = driver
    with console_of_all_users() as console:
        console.add("first")
        window = Window(browser, axe, expect, origin=console.origin)
        window.refused_is_expected = True
        window.go("/")
        log_in(window.page, console.token)
        window.sees("table.runs td.name", "first")
        yield console, window
        window.close()
    assert window.faults == []


def log_in(page: Any, token: str) -> None:
    page.get_by_label("Token of the Kubernetes API").fill(token)
    page.get_by_role("button", name="Log in").click()


def test_an_open_page_leads_to_a_login_when_its_token_is_spent_and_continues_with_the_new_one(
    users: tuple[ServedConsole, Window],
) -> None:
    console, window = users
    window.mark()
    console.spend_tokens()
    console.add("second")
    window.sees(LOST, "This session has ended")
    with window.context.expect_page() as tab:
        window.page.locator(LOST).get_by_role("link", name="login").click()
    log_in(tab.value, console.token)
    window.sees("table.runs td.name", "second")
    window.expect(window.page.locator(LOST)).to_be_empty()
    window.is_not_reloaded()


def test_an_open_page_says_that_the_cluster_is_away_and_continues_when_it_is_back(
    users: tuple[ServedConsole, Window],
) -> None:
    console, window = users
    window.mark()
    console.go_away()
    window.sees(".notice.bad", "the cluster does not answer")
    console.come_back()
    console.add("second")
    window.sees("table.runs td.name", "second")
    window.is_not_reloaded()


def test_a_job_is_resized_and_its_page_follows(users: tuple[ServedConsole, Window]) -> None:
    console, window = users
    window.go(f"/runs/{SPACE}/first")
    window.page.locator(".actions summary").filter(has_text="Scale").click()
    window.page.get_by_label("Workers").fill("3")
    window.press("Scale")
    window.expect(window.page.locator(".actions pre").filter(has_text="--replicas 3")).to_have_count(1)
    assert console.workers("first") == 3
    window.mark()
    console.scale("first", 4)
    window.expect(window.page.locator(".actions pre").filter(has_text="--replicas 4")).to_have_count(1)
    window.is_not_reloaded()


def test_a_dry_run_that_the_api_server_refuses_is_shown_beside_the_plan(users: tuple[ServedConsole, Window]) -> None:
    """The planner accepts the job; that there is one of its name, only the API server knows."""
    console, window = users
    window.go(f"/submit?from={SPACE}/first")
    window.field("metadata.name").fill("first")
    window.press("Check")
    window.sees("#result .notice.bad", "exists")
    window.sees("#result pre", "memory per rank")
    window.examine()
    assert console.workers("first") == 1
