"""What each role may do by `kubectl polyreme`, as its page says: with real tokens on a real API server."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.exit_codes import ExitCode
from polyreme_api.incident import NodeIncidentSpec
from polyreme_api.times import rfc3339
from polyreme_cluster.port import ObjectRef
from polyreme_operator.health.incidents import Incident
from polyreme_operator.health.record import HEALTH
from tests.cluster.kube import ROOT, kubectl
from tests.cluster.stage import Stage, play

PAGE = ROOT / "docs/how-to/kubectl-plugin.md"
ROLE = re.compile(r"`([^`]+)`")
CLUSTER_ROLES = frozenset({"polyreme-cluster-viewer", "polyreme-node-editor"})
LEFT_OUT = re.compile(r": you may not list [a-z]+")
REFUSED = re.compile(r"you may not list [a-z, ]+; ask for|403 Forbidden")


def table() -> dict[str, dict[str, str]]:
    """Return what the page says: by roles, by verb, yes, partly or no."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    start = next(at for at, line in enumerate(lines) if "polyreme-cluster-viewer" in line)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    rows = [row for row in rows if len(row) == len(rows[0])]
    heads = [" ".join(ROLE.findall(cell)) for cell in rows[0][1:]]
    return {head: {row[0].strip("`"): row[at] for row in rows[2:]} for at, head in enumerate(heads, start=1)}


def account(kubeconfig: str, namespace: str, name: str, roles: str, folder: Path) -> str:
    """Make an account with roles, and return a kubeconfig of it."""
    subject = f"--serviceaccount={namespace}:{name}"
    kubectl(kubeconfig, "create", "serviceaccount", name, "-n", namespace)
    for role in roles.split():
        if role in CLUSTER_ROLES:
            bound = f"{namespace}-{name}-{role}"
            kubectl(kubeconfig, "create", "clusterrolebinding", bound, f"--clusterrole={role}", subject)
        else:
            kubectl(kubeconfig, "create", "rolebinding", name, "-n", namespace, f"--clusterrole={role}", subject)
    content: dict[str, Any] = yaml.safe_load(kubectl(kubeconfig, "config", "view", "--raw", "--minify", "--flatten"))
    token = kubectl(kubeconfig, "create", "token", name, "-n", namespace).strip()
    content["users"][0]["user"] = {"token": token}
    content["contexts"][0]["context"]["namespace"] = namespace
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def calls(stage: Stage, spare: str, incident: str) -> Mapping[str, tuple[str, ...]]:
    """Return what is typed for each verb; a job of its own is there to be changed."""
    return {
        "get": ("get",),
        "describe": ("describe", "big"),
        "why": ("why", "next"),
        "top": ("top",),
        "usage": ("usage",),
        "logs": ("logs", "big"),
        "queue": ("queue",),
        "topology": ("topology",),
        "nodes": ("nodes", "--all"),
        "incidents": ("incidents",),
        "incident": ("incident", incident),
        "resume": ("resume", held(spare)),
        "scale": ("scale", spare, "--replicas", "2"),
        "suspend": ("suspend", spare, "--wait", "--timeout", "45"),
        "cancel": ("cancel", spare, "--yes", "--wait", "--timeout", "45"),
        "quarantine": ("quarantine", stage.name("n"), "--reason", "new cable"),
        "release": ("release", stage.name("out"), "--reason", "replaced"),
    }


def held(spare: str) -> str:
    """Return the name of the job that is resumed."""
    return f"{spare}-0"


@pytest.mark.slow
def test_each_role_may_do_what_the_page_says(operated: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = table()
    assert len(expected) == 5

    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.node("out")
        assert await stage.polyreme("quarantine", stage.name("out"), "--reason", "new cable") == 0
        await stage.queue(nominal=2)
        await stage.job("big", 2)
        await stage.until_trains("big")
        await stage.job("next", 2)
        await stage.until_waits("next", "ExceedsQuota")
        spec = NodeIncidentSpec(node=stage.name("n"), since=rfc3339(1_800_000_000.0), hardware="m")
        made = Incident(name=stage.name("i"), spec=spec).manifest()
        await stage.create(made)
        wrong, said, config, spare = [], dict[str, str](), "", ""
        for number, (roles, verbs) in enumerate(expected.items()):
            spare = f"spare-{number}"
            config = account(operated, stage.namespace, spare, roles, tmp_path)
            await stage.job(spare, 1)
            await stage.job(held(spare), 1, suspend=True)
            typed = calls(stage, spare, made["metadata"]["name"])
            assert set(typed) == set(verbs), "the page has a row for every verb"
            for verb, arguments in typed.items():
                capsys.readouterr()
                code = await stage.polyreme(*arguments, kubeconfig=config)
                output = capsys.readouterr()
                said[f"{roles} {verb}"] = output.out + output.err
                found = "no" if REFUSED.search(output.err) else "partly" if LEFT_OUT.search(output.err) else "yes"
                # KWOK's nodes have no kubelet that would hand out a log.
                fits = code == (ExitCode.REFUSED if found == "no" else ExitCode.OK) or verb == "logs"
                if found != verbs[verb] or not fits:
                    wrong.append(f"{roles} {verb}: {found}, code {code}, expected {verbs[verb]}\n{output.err}")
        assert not wrong, "\n".join(wrong)
        assert "\nplace" not in said["view why"]
        assert "1 of " in said["view polyreme-cluster-viewer why"]
        (line,) = [line for line in said["view polyreme-cluster-viewer queue"].splitlines() if stage.name("q") in line]
        assert line.split()[1:4] == [stage.resource, "2", "2"]
        node = await stage.cluster.get(ObjectRef(kind="Node", name=stage.name("n")))
        assert f"person/system:serviceaccount:{stage.namespace}:{spare}" in node["metadata"]["annotations"][HEALTH]
        assert await stage.polyreme("get", "-A", kubeconfig=config) == ExitCode.REFUSED
        assert "you may not list trainingjobs in all namespaces" in capsys.readouterr().err

    play(operated, story)
