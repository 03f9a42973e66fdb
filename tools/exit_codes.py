"""Write docs/reference/exit-codes.md from the enumeration that the code uses."""

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "api/polyreme_api/errors.py"
HEAD = """# Exit codes

Of every `polyreme` command and process. Generated from `api/polyreme_api/errors.py` by `make docs`.

| code | name | meaning | errors |
|---|---|---|---|
"""


def render(source: str) -> str:
    """Render the page from the source text: members, their docstrings, and the errors that carry each."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    codes = next(node for node in classes if node.name == "ExitCode")
    errors: dict[str, list[str]] = {}
    inherited = {"PolyremeError": "INTERNAL"}
    for node in classes:
        if node.name != codes.name:
            parents = [base.id for base in node.bases if isinstance(base, ast.Name)]
            own = next((_code(statement) for statement in node.body if _code(statement)), None)
            code = own or next((inherited[parent] for parent in parents if parent in inherited), None)
            if code is not None:
                inherited[node.name] = code
                errors.setdefault(code, []).append(f"`{node.name}`")
    rows = []
    for index, statement in enumerate(codes.body):
        match statement:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Constant(value=int(value))):
                meaning = _docstring(codes.body[index + 1 : index + 2])
                rows.append(f"| {value} | `{name}` | {meaning} | {', '.join(errors.get(name, []))} |")
    return HEAD + "\n".join(rows) + "\n"


def _code(statement: ast.stmt) -> str | None:
    match statement:
        case ast.Assign(targets=[ast.Name("exit_code")], value=ast.Attribute(attr=code)):
            return code
        case ast.AnnAssign(target=ast.Name("exit_code"), value=ast.Attribute(attr=code)):
            return code
        case _:
            return None


def _docstring(following: list[ast.stmt]) -> str:
    match following:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return " ".join(text.split()).replace("``", "`")
        case _:
            return ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(SOURCE.read_text()))
