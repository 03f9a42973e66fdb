"""Access to a server: for this machine alone, or for clients with its token."""

from __future__ import annotations

import hmac
from pathlib import Path

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_system.addresses import is_loopback, split_address

TOKEN_CHARACTERS_MIN = 16
_BEARER = "bearer "


class Access:
    """The rule of a server.

    Args:
        token: What clients must bring; None: the server listens on loopback, and trusts this machine.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def refusal(self, *, authorization: str, host: str) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None: the request is fine.

        Args:
            authorization: Header of that name.
            host: Header of that name: without a token, a page of a browser may not reach this server under a name of
                its own (DNS rebinding).
        """
        if self._token is None:
            if is_local(_host_of(host)):
                return None
            return 403, f"forbidden: the request names host {host[:64]!r}, expected a name of this machine's loopback"
        given = authorization[len(_BEARER) :].strip().encode(errors="replace")
        if authorization[: len(_BEARER)].lower() == _BEARER and hmac.compare_digest(given, self._token):
            return None
        return 401, "unauthorized: expected the header Authorization: Bearer with the token of this server"


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    return host == "localhost" or is_loopback(host)


def _host_of(header: str) -> str:
    try:
        return split_address(header)[0]
    except ValueError:
        return header.removeprefix("[").removesuffix("]")


def read_token(
    file: Path | None, variable: str | None = None, *, name: str = "", characters_min: int = TOKEN_CHARACTERS_MIN
) -> str | None:
    """Return the token of a file, or of an environment variable.

    Args:
        file: A file that holds it.
        variable: Value of the variable.
        name: Of the variable, for messages.
        characters_min: Of a shorter one, nothing is taken.

    Raises:
        NotFoundError: If there is no such file.
        InvalidConfigError: If it can't be read, or the token is too short or has characters that no header holds.
    """
    if file is None and variable is None:
        return None
    if file is not None:
        try:
            variable, place = file.read_text(encoding="utf-8"), str(file)
        except FileNotFoundError as error:
            raise NotFoundError(f"no token file {file}", field="--token-file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfigError(f"token file can't be read: {file}: {error}", field="--token-file") from error
    else:
        place = name
    token = (variable or "").strip()
    if len(token) < characters_min or not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidConfigError(
            f"token of {place} has {len(token)} characters, expected at least {characters_min} printable ASCII "
            "characters without spaces",
            field=place,
        )
    return token


def check_address(host: str, token: str | None, *, name: str) -> None:
    """Refuse to listen where others reach the server, without a token.

    Raises:
        InvalidConfigError: Naming the ways out.
    """
    if token is None and not is_local(host):
        raise InvalidConfigError(
            f"server would answer anyone: {host or 'every address'} is not loopback and there is no token; set "
            f"--token-file or {name}, or listen on 127.0.0.1",
            field="--host",
        )
