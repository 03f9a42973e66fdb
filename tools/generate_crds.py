"""Write what is generated from the API's types: the CRDs and the pages of their fields (``--check`` only compares)."""

import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

from polyreme_api.crd.definitions import DEFINITIONS, Definition, crd
from polyreme_api.crd.pod_template import KEEPS_UNKNOWN
from tools.reference_pages import reference_page

ROOT = Path(__file__).parent.parent
CRDS = Path("charts/polyreme/files/crds")
"""The only copy: `manifests/` has links to it, for kubectl."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
VERSION_ANNOTATION = "polyreme.dev/crd-version"
DIGEST_ANNOTATION = "polyreme.dev/crd-digest"
DIGEST_CHARACTERS = 16
PAGES = Path("docs/reference")
NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?")
HEADER = "# Generated from api/polyreme_api by tools/generate_crds.py; do not edit.\n"


def main(arguments: list[str]) -> int:
    """Write the files; with ``--check``, 1 when one is stale."""
    stale = [path for path, text in outputs().items() if not _is_fresh(ROOT / path, text)]
    if "--check" in arguments:
        for path in stale:
            print(f"stale: {path}; run make docs", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(outputs()[path], encoding="utf-8")
        print(path)
    return 0


def outputs() -> dict[Path, str]:
    """Return the text of every generated file, by its path in the repository."""
    texts: dict[Path, str] = {}
    for definition in DEFINITIONS:
        manifest = crd(definition)
        texts[crd_path(definition)] = crd_yaml(annotated(manifest))
        texts[page_path(definition)] = reference_page(manifest)
    return texts


def crd_path(definition: Definition) -> Path:
    """Return where the CRD of a kind lies."""
    return CRDS / f"polyreme.dev_{definition.plural}.yaml"


def page_path(definition: Definition) -> Path:
    """Return where the page of a kind's fields lies."""
    return PAGES / f"{definition.kind.lower()}.md"


def annotated(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add what the chart decides by: the version, a digest of the content, and that Helm and Argo CD keep it.

    Argo CD applies it first, and by the server: a copy of it in an annotation could be too long.
    """
    content = json.dumps(manifest, sort_keys=True).encode()
    annotations = {
        VERSION_ANNOTATION: VERSION,
        DIGEST_ANNOTATION: hashlib.sha256(content).hexdigest()[:DIGEST_CHARACTERS],
        "helm.sh/resource-policy": "keep",
        "argocd.argoproj.io/sync-options": "Prune=false,ServerSideApply=true",
        "argocd.argoproj.io/sync-wave": "-1",
    }
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


def crd_yaml(manifest: dict[str, object]) -> str:
    """Write the CRD as YAML, keys in the order in which they were made."""
    return HEADER + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Never an anchor; text that YAML 1.2 takes for a number (``1e-8``, text in 1.1) is quoted."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def _quote_numbers(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if NUMBER.fullmatch(text) else None)


def _compact(dumper: _Dumper, schema: dict[str, object]) -> yaml.MappingNode:
    """Write the fields of a pod template, a thousand of them, in lines and not in columns."""
    return dumper.represent_mapping("tag:yaml.org,2002:map", schema, flow_style=KEEPS_UNKNOWN in schema or None)


_Dumper.add_representer(str, _quote_numbers)
_Dumper.add_representer(dict, _compact)


def _is_fresh(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
