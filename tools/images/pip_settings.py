"""This machine's configuration of pip, as files that a build may read and an image never holds."""

import configparser
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MOUNTED_CERTIFICATES = "/run/secrets/certificates"
KEPT = frozenset({"index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries"})
"""Folders of packages are left out: a build sees no folder of this machine."""
CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def secrets(folder: Path, environment: Mapping[str, str]) -> dict[str, Path]:
    """Write pip's settings, and the certificates that they name, into a folder; return them by their ids in a build."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={**environment, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    settings = parse(listed)
    found: dict[str, Path] = {}
    certificates = settings.pop("cert", None) or next(filter(None, map(environment.get, CERTIFICATES)), None)
    kept = {name: value for name, value in settings.items() if name in KEPT}
    if certificates and Path(certificates).is_file():
        found["certificates"] = folder / "certificates"
        found["certificates"].write_bytes(Path(certificates).read_bytes())
        kept["cert"] = MOUNTED_CERTIFICATES
    if kept:
        configuration = configparser.RawConfigParser()
        configuration["global"] = kept
        found["pip"] = folder / "pip.conf"
        with found["pip"].open("w") as file:
            configuration.write(file)
    return found


def parse(listed: str) -> dict[str, str]:
    """Read what ``pip config list`` prints; variables go before files, as in pip itself."""
    settings: dict[str, tuple[bool, str]] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        variable = section == ":env:"
        if variable or not settings.get(name, (False, ""))[0]:
            settings[name] = (variable, value.strip("'"))
    return {name: value for name, (_, value) in settings.items()}
