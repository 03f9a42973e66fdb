"""The quickstart's own job file, applied by kubectl: real ranks on two nodes of polyreme node, one killed half-way."""

from pathlib import Path

import pytest

from polyreme.commands.quickstart import KILL_RANK, KILL_STEP, SAMPLE
from polyreme.run_files.records import read_records
from tests.cluster.kube import ROOT, api_client, new_namespace
from tests.cluster.laptop import laptop
from tests.cluster.test_identical_losses_on_kubernetes import Kubectl, kill_rank, succeeded, until_trained

PATIENCE_S = 900.0
STEPS = 600


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.soak
def test_the_quickstart_succeeds_on_kubernetes_with_a_rank_killed_half_way(kubeconfig: str, tmp_path: Path) -> None:
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
        kubectl = Kubectl(environment, patience_s=PATIENCE_S)
        assert "trainingjob.polyreme.dev/quickstart created" in kubectl("apply", "-f", str(ROOT / SAMPLE))
        until_trained(tmp_path, namespace, "quickstart", attempt=1, steps=KILL_STEP, patience_s=PATIENCE_S)
        kill_rank(tmp_path, "quickstart", index=KILL_RANK // 2, rank=KILL_RANK)
        status = kubectl.until("quickstart", succeeded)
    assert status["attempt"]["number"] == 2
    assert [record["cause"] for record in status["restartRecords"]] == ["RankKilled"]
    records = read_records(tmp_path / "home/checkpoints" / namespace / "quickstart")
    assert [record.step for record in records.history] == list(range(1, STEPS + 1))
    assert records.history[-1].loss < records.history[0].loss / 3
    assert records.evaluation is not None
    assert records.evaluation["exactMatchRatio"] >= 0.8, records.evaluation
