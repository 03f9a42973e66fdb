"""After all other tests of this folder: every right that the chart gives was used, and none was missing."""

import os

import pytest

from tests.nodes.cluster import Cluster
from tests.nodes.rights import PRODUCTION, REFUSED, UNUSED, given, has_statuses, read_metrics, seen
from tools.cluster.binaries import program_path

REASONS_MAX = 5
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("production")]


def test_queue_topology_and_policy_have_a_status(cluster: Cluster) -> None:
    assert has_statuses(cluster)


def test_an_account_with_the_right_reads_the_metrics_of_operator_and_datahub(cluster: Cluster) -> None:
    assert read_metrics(cluster) == ["200", "200"]


def test_every_right_of_the_chart_is_used_and_none_is_missing(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    assert cluster.folder is not None, "the audit log of a cluster that KUBECONFIG names is out of reach"
    if len({item.path for item in request.session.items}) < 3:
        pytest.fail("run the whole folder: rights are used by its other tests")
    used, refused = seen(cluster.folder)
    rights = {
        str(right) for right in given(program_path("helm", os.environ), [{"agent": {"enabled": True}}, PRODUCTION])
    }
    assert len({*UNUSED.values()}) <= REASONS_MAX
    assert sorted({*map(str, refused)} - REFUSED.keys()) == []
    assert sorted(rights - {*map(str, used)} - UNUSED.keys()) == []
    assert UNUSED.keys() <= rights, "the chart gives no such right: remove the exception"
