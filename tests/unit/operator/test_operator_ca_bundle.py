"""Authorities and pull Secrets of the installation reach the workers of every job, whatever its namespace holds."""

import base64
from pathlib import Path
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_operator.options import parse
from polyreme_operator.reconcile.ca_bundle import BEGIN, BYTES_MAX, KEY, CaBundle
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import CreatePod
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, snapshot
from tests.unit.operator.operator_stories import NAMESPACE, Story, play
from tests.unit.operator.test_operator_children import train

FIRST, SECOND = (CaBundle(f"{BEGIN}\n{text}\n-----END CERTIFICATE-----\n") for text in ("one", "two"))
FILE = "/etc/polyreme/ca/ca.crt"


def created(defaults: PodDefaults, template: dict[str, Any], mode: str = "Launcher") -> dict[str, Any]:
    """The spec of a worker's pod."""
    workers = {"replicas": 2, "devices": 1, "template": {"spec": template}, "runtime": {"mode": mode}}
    owner = admitted(job(workers=workers), replicas=0)
    name = labels.job_object_name(owner.name, owner.uid)
    authorities = () if defaults.ca_bundle is None else (defaults.ca_bundle.object_name(name),)
    children = frozenset({"Service", "Secret", *authorities})
    decision = reconcile(snapshot(owner, lease=lease(owner, attempt=9), children=children), NOW_S, defaults=defaults)
    spec, *_ = (action.manifest["spec"] for action in decision.actions if isinstance(action, CreatePod))
    return dict(spec)


@pytest.mark.parametrize("mode", ["Launcher", "Environment"])
def test_every_workers_container_mounts_the_authorities_and_the_templates_variables_come_first(mode: str) -> None:
    own = {"name": "AWS_CA_BUNDLE", "value": "/mine"}
    template = {"containers": [{"name": "a", "image": "i", "env": [own]}, {"name": "b", "image": "i"}]}
    spec = created(PodDefaults(ca_bundle=FIRST), template, mode)
    first, second = spec["containers"]
    assert [entry for entry in first["env"] if entry["name"] in {"SSL_CERT_FILE", "AWS_CA_BUNDLE"}] == [
        {"name": "SSL_CERT_FILE", "value": FILE},
        own,
    ]
    (mount,) = (each for each in first["volumeMounts"] if each["mountPath"] == FILE.rpartition("/")[0])
    (volume,) = (each for each in spec["volumes"] if each["name"] == mount["name"])
    assert mount["readOnly"]
    assert set(volume) == {"name", "secret"}
    assert "volumeMounts" not in second


def test_without_authorities_nothing_is_mounted() -> None:
    spec = created(PodDefaults(), {})
    assert FILE not in str(spec)
    assert "imagePullSecrets" not in spec


@pytest.mark.parametrize(
    ("template", "secrets"),
    [
        ({}, [{"name": "registry"}]),
        ({"imagePullSecrets": [{"name": "mine"}]}, [{"name": "mine"}]),
        ({"containers": [{"name": "a", "image": "team/own"}]}, None),
    ],
    ids=["the installation's image", "Secrets of its own", "an image of its own"],
)
def test_a_worker_with_the_installations_image_names_its_pull_secrets(template: dict[str, Any], secrets: Any) -> None:
    """Otherwise those of the pod's account hold, which a pod that names any does not have."""
    assert created(PodDefaults(pull_secrets=("registry",)), template).get("imagePullSecrets") == secrets


def test_pods_of_a_later_attempt_mount_what_the_operator_was_given_later() -> None:
    def settings(bundle: CaBundle) -> Settings:
        return Settings(defaults=PodDefaults(launcher_rbac=True, ca_bundle=bundle))

    def mounted(story: Story) -> list[str]:
        """The certificates of each pod's volume."""
        contents = []
        for pod in story.objects("Pod"):
            (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "polyreme-ca")
            secrets = {each["metadata"]["name"]: each for each in story.objects("Secret")}
            data = secrets[volume["secret"]["secretName"]]["data"]
            contents.append(base64.b64decode(data[KEY]).decode())
        return contents

    async def told(story: Story) -> None:
        story.node()
        uid = story.job("j")
        async with story.operator():
            await train(story, uid, 10.0)
            assert mounted(story) == [FIRST.pem]
        story.change(settings(SECOND))
        async with story.operator():
            await train(story, uid, 10.0)
            assert mounted(story) == [FIRST.pem]
            story.delete("Pod", story.objects("Pod")[0]["metadata"]["name"])
            await train(story, uid, 30.0)
            assert mounted(story) == [SECOND.pem]
            assert story.status("j")["attempt"]["number"] == 2
        own = [secret["metadata"] for secret in story.objects("Secret") if secret["metadata"]["namespace"] == NAMESPACE]
        owners = {each["ownerReferences"][0]["uid"] for each in own}
        assert owners == {uid}

    play(told, settings(FIRST))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no certificates: expected PEM text with -----BEGIN CERTIFICATE-----"),
        (f"{BEGIN}\n-----BEGIN PRIVATE KEY-----\nhush-hush\n", "holds a private key, which every worker could read"),
        (BEGIN + "x" * BYTES_MAX, f"bytes of certificates, at most {BYTES_MAX} fit into a Secret"),
        (None, "can't be read"),
    ],
    ids=["no certificate", "a private key", "too long", "no file"],
)
def test_a_wrong_file_of_authorities_is_refused(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as caught:
        parse(["--worker-ca-file", str(path)], {})
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "--worker-ca-file" in shown
    assert said in shown
    assert "hush-hush" not in shown


def test_authorities_and_pull_secrets_are_named_by_options_or_variables(tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    path.write_text(FIRST.pem)
    variables = {"POLYREME_OPERATOR_WORKER_CA_FILE": str(path), "POLYREME_OPERATOR_WORKER_PULL_SECRET": "one two"}
    assert parse([], {}).settings.defaults.ca_bundle is None
    for arguments, environment in (
        (["--worker-ca-file", str(path), "--worker-pull-secret=one", "--worker-pull-secret=two"], {}),
        ([], variables),
    ):
        defaults = parse(arguments, environment).settings.defaults
        assert defaults.ca_bundle == FIRST
        assert defaults.pull_secrets == ("one", "two")
