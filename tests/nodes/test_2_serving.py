"""The manifest that serves a model, in pods: it answers about an image through its Service."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.e2e.polyreme_home import PolyremeHome
from tests.kept.folders import FINISHED, VERSIONS, copy_home
from tests.nodes import packages
from tests.nodes.cluster import PATIENCE_S, ROOT, Cluster, Manifest, pod

MANIFEST = ROOT / "manifests/serving/serve.yaml"
SERVED = "serving"
TOKEN = "a-token-of-the-tests-alone"
TOKENS = 16
QUESTION = "Which digits, left to right?"
IMAGE = "docker.io/polyreme/trainer:0.1.0"
FILL = """
import glob, os, shutil
os.mkdir("/models/further")
for path in glob.glob("/given/*"):
    shutil.copy(path, "/models/further")
"""
ASK = """
import json, urllib.error, urllib.request
content = [{{"type": "image_url", "image_url": {{"url": "{page}"}}}}, {{"type": "text", "text": "{question}"}}]
body = json.dumps({{"messages": [{{"role": "user", "content": content}}], "max_tokens": {tokens}}}).encode()
def post(**headers):
    headers |= {{"Content-Type": "application/json"}}
    return urllib.request.urlopen(urllib.request.Request("http://serve:8000/v1/chat/completions", body, headers))
try:
    post()
except urllib.error.HTTPError as error:
    print(error.code)
print(json.dumps(json.load(post(Authorization="Bearer {token}"))["choices"][0]["message"]["content"]))
"""


@pytest.fixture
def namespace(prepared: Cluster) -> Iterator[str]:
    """A namespace of its own, with the packages if images are thin."""
    with prepared.namespace(SERVED) as name:
        if prepared.folder is not None:
            prepared.kubectl.apply(packages.volume(name))
        yield name
    prepared.kubectl("delete", "persistentvolume", f"{packages.CLAIM}-{SERVED}", "--ignore-not-found", "--wait=false")


def export(folder: Path) -> Path:
    """Export the model of a kept run."""
    home = PolyremeHome(copy_home(VERSIONS[0], folder))
    done = home.call("checkpoint", "export", FINISHED, "--to", str(folder / "model"))
    assert done.code == 0, done.said
    return folder / "model"


def mounting(cluster: Cluster, spec: Manifest) -> None:
    """Where images are thin, have a pod mount the packages."""
    if cluster.folder is not None:
        spec.setdefault("volumes", []).extend(packages.VOLUMES)
        spec["containers"][0].setdefault("volumeMounts", []).extend(packages.MOUNTS)


def run_to_end(cluster: Cluster, namespace: str, name: str, program: str, volumes: dict[str, Any]) -> str:
    """Run Python in a pod of the trainer's image to its end, with volumes by their place; return what it printed."""
    made = pod(name, IMAGE, command=["python", "-c", program])
    spec = made["spec"]
    spec["securityContext"]["fsGroup"] = 65532
    spec["volumes"] = [{"name": path.strip("/"), **source} for path, source in volumes.items()]
    spec["containers"][0]["volumeMounts"] = [{"name": path.strip("/"), "mountPath": path} for path in volumes]
    made["metadata"]["namespace"] = namespace
    cluster.kubectl.apply([made])
    cluster.until_pod(name, "Succeeded", namespace=namespace)
    return cluster.kubectl("--namespace", namespace, "logs", name)


def claim(folder: Path) -> list[Manifest]:
    """The export in a ConfigMap, and the claim that is to hold it."""
    files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir() if path.is_file()}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "given"}, "binaryData": files},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "16Mi"}}},
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "serve-token"}, "stringData": {"token": TOKEN}},
    ]


@pytest.mark.slow
def test_the_deployment_answers_about_an_image_through_its_service(
    prepared: Cluster, namespace: str, tmp_path: Path
) -> None:
    folder = export(tmp_path)
    page = io.BytesIO()
    Image.new("RGB", (28, 28), (40, 90, 160)).save(page, "PNG")
    (tmp_path / "page.png").write_bytes(page.getvalue())
    given = claim(folder)
    for each in given:
        each["metadata"]["namespace"] = namespace
    prepared.kubectl.apply(given)
    models = {"persistentVolumeClaim": {"claimName": "models"}}
    run_to_end(prepared, namespace, "fill", FILL, {"/given": {"configMap": {"name": "given"}}, "/models": models})

    deployment, service = yaml.safe_load_all(MANIFEST.read_text())
    spec = deployment["spec"]["template"]["spec"]
    mounting(prepared, spec)
    # The nodes of the tests share two cores and little memory.
    spec["containers"][0]["resources"] = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}
    for each in (deployment, service):
        each["metadata"]["namespace"] = namespace
    prepared.kubectl.apply([deployment, service])
    words = ("rollout", "status", "deployment/serve", f"--timeout={PATIENCE_S:.0f}s")
    prepared.kubectl("--namespace", namespace, *words, timeout_s=PATIENCE_S + 10)

    url = "data:image/png;base64," + base64.b64encode(page.getvalue()).decode()
    program = ASK.format(page=url, question=QUESTION, tokens=TOKENS, token=TOKEN)
    status, answer = run_to_end(prepared, namespace, "asking", program, {}).splitlines()
    assert status == "401", "without a token"
    home = PolyremeHome(tmp_path)
    asking = (QUESTION, "--image", str(tmp_path / "page.png"), "--max-tokens", str(TOKENS), "-o", "json")
    asked = home.call("ask", str(folder), *asking)
    assert asked.code == 0, asked.said
    assert json.loads(answer) == asked.item["answer"]
