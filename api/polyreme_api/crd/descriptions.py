"""Descriptions of fields, from the texts below them in their types' sources.

Pydantic would read every source at each start of a process (``use_attribute_docstrings``), for schemas that no process
but a generator writes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema


class DescribedSchema(GenerateJsonSchema):
    """Pydantic's generator, with a description of each field that has a text."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        """Translate a model."""
        written = super().model_schema(schema)
        model: type[BaseModel] = schema["cls"]
        texts: dict[str, str] = {}
        for kind in reversed(model.__mro__):
            if issubclass(kind, BaseModel) and kind is not BaseModel:
                texts |= field_texts(kind)
        for name, info in model.model_fields.items():
            if name in texts:
                written["properties"][info.alias or name].setdefault("description", texts[name])
        return written


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field that the type itself declares."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
