"""The Python names that users may import are those of docs/reference/python.md, and documented code uses no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools import python_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/python.md"
OURS = re.compile(r"polyreme(_[a-z_]+)?(\.|$)")


def test_the_page_lists_the_public_names_with_their_parameters() -> None:
    assert PAGE.read_text(encoding="utf-8") == python_page.render(), "a public name has changed; run make docs"


def test_code_in_pages_imports_public_names_only() -> None:
    seen = 0
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and OURS.match(node.module or ""):
                    for name in node.names:
                        seen += 1
                        assert is_public(node.module or "", name.name), f"{path}: {node.module} {name.name}"
    assert seen


def is_public(module: str, name: str) -> bool:
    """Whether a name is listed, or is a listed module."""
    return name in python_page.PUBLIC.get(module, ("", ()))[1] or f"{module}.{name}" in python_page.PUBLIC
