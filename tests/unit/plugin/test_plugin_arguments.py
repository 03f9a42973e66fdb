"""Where options of the plugin may stand."""

from __future__ import annotations

import pytest

from polyreme.plugin.main import verb_first


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("-n team get", "get -n team"),
        ("--namespace=team --context big why patient", "why --namespace=team --context big patient"),
        ("get -n team -o json", "get -n team -o json"),
        ("--help", "--help"),
        ("-n team", ""),
        ("-n", ""),
        ("", ""),
    ],
)
def test_options_of_kubectl_may_stand_before_the_verb(given: str, taken: str) -> None:
    assert verb_first(given.split()) == taken.split()
