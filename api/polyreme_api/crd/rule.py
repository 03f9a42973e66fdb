"""Rule across fields of a resource, in the Common Expression Language, with the sentence that it is refused with."""

from __future__ import annotations

import dataclasses
import re

_VALUE = re.compile(r"\{([^{}]*)\}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule across fields, with a sentence that names the fix."""

    rule: str
    words: str
    plain: str = ""
    """The sentence without values; empty: the words without what is in braces."""
    of_optional: bool = False
    """Whether it holds of every object that has no fields but those that are always there."""
    values_always: bool = False
    """Whether the server can always put the values in: then it gets no second sentence without them."""

    @property
    def message(self) -> str:
        """The sentence without values: for the reference, and where the server can't put them in."""
        return self.plain or re.sub(rf" ?{_VALUE.pattern}", "", self.words)

    def to_object(self) -> dict[str, str]:
        """Return it as an entry of ``x-kubernetes-validations``."""
        message = {} if self.values_always else {"message": self.message}
        spoken = {"messageExpression": _cel_text(self.words)} if _VALUE.search(self.words) else {}
        return {"rule": self.rule, **message, **spoken}


def _cel_text(words: str) -> str:
    """Write a sentence with values as a CEL expression.

    Formatted in one call: the server can't bound the cost of joining texts whose length it does not know.
    """
    text = _VALUE.sub("%s", words.replace("%", "%%"))
    if "'" in text:
        raise ValueError(f"words of a rule hold an apostrophe, which ends a text in CEL: {words}")
    return f"'{text}'.format([{', '.join(_VALUE.findall(words))}])"
