"""Renders charts/polyreme with Helm: manifests/, for clusters without Helm, and what tests compare renderings with."""

import os
import re
import subprocess
import textwrap
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import yaml

from tools.cluster.binaries import client_path

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/polyreme"
RELEASE = "polyreme"
NAMESPACE = "polyreme-system"
TIMEOUT_S = 120.0
VALUES = CHART / "ci/manifests.yaml"
MANIFESTS = Path("manifests")
EXAMPLES = tuple(sorted(path for path in (CHART / "ci").glob("*.yaml") if path != VALUES))
GOLDEN = Path("tests/golden/chart")
FILES = {
    "namespace.yaml": ("namespace",),
    "rbac.yaml": ("rbac",),
    "operator.yaml": ("operator",),
    "datahub.yaml": ("datahub-rbac", "s3", "datahub"),
    "devices.yaml": ("devices",),
    "networkpolicies.yaml": ("networkpolicies",),
    "agent/agent.yaml": ("agent",),
}
"""Each file of manifests/, and the templates that it is made of."""
HEADER = "# Generated from charts/polyreme by `make manifests`; do not edit.\n"
SECRETS = """#
# The S3 server and its clients share credentials, in a Secret of this namespace and one of each namespace of jobs:
#
#   pair="--from-literal=AWS_ACCESS_KEY_ID=polyreme --from-literal=AWS_SECRET_ACCESS_KEY=$(openssl rand -hex 20)"
#   kubectl -n polyreme-system create secret generic polyreme-s3 $pair
#   kubectl -n default create secret generic polyreme-object-store $pair

"""
_SOURCE = re.compile(r"^# Source: polyreme/templates/([\w-]+)\.yaml\n", re.MULTILINE)


class HelmError(Exception):
    """Helm failed; the message is what it said."""


def helm(*arguments: str | Path, kubeconfig: str | None = None) -> str:
    """Run Helm, and return what it prints.

    Raises:
        BuildError: If there is no Helm.
        HelmError: If it fails.
    """
    environment = {**os.environ, "KUBECONFIG": kubeconfig or os.devnull}
    command = [client_path("helm", os.environ), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment, cwd=ROOT
    )
    if done.returncode != 0:
        raise HelmError(done.stderr.strip())
    return done.stdout


def rendered(*values: Path, settings: Sequence[str] = (), templates: Sequence[str] = ()) -> str:
    """Return the chart's objects, with some values files and settings (``--set``); of some templates, or of all."""
    options: list[str | Path] = [word for path in values for word in ("--values", path)]
    options += [word for setting in settings for word in ("--set", setting)]
    options += [word for name in templates for word in ("--show-only", f"templates/{name}.yaml")]
    return helm("template", RELEASE, CHART, "--namespace", NAMESPACE, *options)


def outputs() -> dict[Path, str]:
    """Return all that is written from the chart, by its path in the repository."""
    usual = set(_documents(rendered(VALUES)))
    return {**manifests(), **{golden_path(path): golden(path, usual) for path in EXAMPLES}}


def golden_path(values: Path) -> Path:
    """Return the path of what the chart renders with a values file."""
    return GOLDEN / values.name


def golden(values: Path, usual: AbstractSet[str]) -> str:
    """Render the chart with a values file, without CRDs, and without the objects that manifests/ has, too."""
    documents = _documents(rendered(values, settings=["crds.install=false"]))
    others = sorted(_name(document) for document in documents if document in usual)
    header = "\n".join(
        textwrap.wrap(
            f"# And as in manifests/: {', '.join(others)}.", 118, subsequent_indent="# ", break_on_hyphens=False
        )
    )
    text = "\n---\n".join(document for document in documents if document not in usual)
    return f"{HEADER}{header}\n{text}\n"


def _documents(text: str) -> list[str]:
    return [document.strip("\n") for document in f"\n{text}".split("\n---\n") if document.strip()]


def _name(document: str) -> str:
    content = yaml.safe_load(document)
    return f"{content['kind']} {content['metadata']['name']}"


def manifests() -> dict[Path, str]:
    """Return the files of manifests/ that come from the chart, by their path in the repository."""
    documents: dict[str, list[str]] = {}
    for document in _documents(rendered(VALUES, settings=["agent.enabled=true"])):
        found = _SOURCE.search(document)
        if found is None:
            raise HelmError(f"a document of no template: {document[:80]!r}")
        documents.setdefault(found[1], []).append(document[found.end() :].strip("\n"))
    texts = {}
    for name, templates in FILES.items():
        parts = [document for template in templates for document in documents.pop(template)]
        header = HEADER + (SECRETS if name == "datahub.yaml" else "")
        texts[MANIFESTS / name] = header + "\n---\n".join(parts) + "\n"
    if documents:
        raise HelmError(f"templates that no file of manifests/ holds: {', '.join(documents)}")
    return texts
