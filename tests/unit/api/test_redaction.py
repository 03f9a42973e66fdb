"""What logs hide, and what they show."""

import pytest

from polyreme_api.redaction import HIDDEN, hide


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdef0123456789",
        "password=hunter22 and more",
        '{"token": "abcdef0123456789"}',
        "postgresql://me:hunter22@db/registry",
        "got eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJl.c2lnbmF0dXJl",
        "POLYREME_RUN_TOKEN=abcdef0123456789",
    ],
)
def test_a_secret_is_hidden(text: str) -> None:
    hidden = hide(text)
    assert HIDDEN in hidden
    assert not any(secret in hidden for secret in ("abcdef0123456789", "hunter22", "eyJpc3Mi"))


@pytest.mark.parametrize(
    "text", ["4,096 tokens per second", "create of Secret default/x refused", "token of nobody", "http://host:80/path"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert hide(text) == text


@pytest.mark.parametrize("unit", ["a.", "-", "eyJ-", "://a:b", "token ", "api-key", "x.token-"])
def test_hiding_takes_time_in_proportion_to_the_text(unit: str) -> None:
    """Text of a kind on which a search that tries every beginning to the end would take hours."""
    assert hide(unit * (2**18 // len(unit)))
