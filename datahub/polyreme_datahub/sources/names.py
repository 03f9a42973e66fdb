"""Names of files inside records: relative to the dataset's root, inside it, and never anything to fetch."""

from __future__ import annotations

import os
import re

FETCHED = re.compile(r"(https?|ftps?|s3|gs|file|data|blob):", re.IGNORECASE)
NAME_CHARACTERS_MAX = 4096


def refusal(name: str) -> str:
    """Return why a file of this name is never read; empty if it may be.

    A record comes from outside, so that no name in it may cause a request or leave the dataset.
    """
    if not name:
        return "the name is empty; name a file relative to the dataset's folder"
    if "\0" in name:
        return "the name has a NUL character"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"the name has {len(name)} characters, expected at most {NAME_CHARACTERS_MAX}"
    if any("\ud800" <= character < "\udc80" or "\udcff" < character <= "\udfff" for character in name):
        return "the name has a lone surrogate, which no file's name has"
    if (scheme := FETCHED.match(name)) or "://" in name:
        kind = f"a {scheme.group(1).lower()}: URL" if scheme else "a URL"
        return f"it is {kind}, and URLs are never fetched; put the file into the dataset's folder and name it there"
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[\\/]", name):
        return "the path is absolute; write it relative to the dataset's folder"
    if ".." in name.split("/"):
        return "the path has a '..' part; name the file by its path below the dataset's folder"
    return ""


def shown(name: str) -> str:
    """Write a file's name, which may be any bytes, as text."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
