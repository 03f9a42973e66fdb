"""An authority that no client knows, and a certificate of a server that it signed; made by openssl."""

import subprocess
from pathlib import Path

from tools.cluster.servers import Certificate

DAYS = "2"
OPENSSL_S_MAX = 30.0


def issue(folder: Path, address: str) -> tuple[Path, Certificate]:
    """Return the file of a new authority's certificate, and one that it signed for an IP address."""
    folder.mkdir(parents=True, exist_ok=True)
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(folder, "req", "-x509", *new_key, "-keyout=ca.key", "-out=ca.crt", "-days", DAYS, "-subj=/CN=authority")
    _openssl(folder, "req", *new_key, "-keyout=server.key", "-out=server.csr", "-subj=/CN=server")
    (folder / "extensions").write_text(f"subjectAltName=IP:{address}\nbasicConstraints=CA:FALSE\n")
    signed = ("-in=server.csr", "-out=server.crt", "-CA=ca.crt", "-CAkey=ca.key", "-CAcreateserial", "-days", DAYS)
    _openssl(folder, "x509", "-req", *signed, "-extfile=extensions")
    return folder / "ca.crt", Certificate(path=folder / "server.crt", key=folder / "server.key")


def _openssl(folder: Path, *words: str) -> None:
    split = [
        part for word in words for part in (word.split("=", 1) if word.startswith("-") and "=" in word else [word])
    ]
    done = subprocess.run(
        ["openssl", *split], cwd=folder, capture_output=True, text=True, check=False, timeout=OPENSSL_S_MAX
    )
    assert done.returncode == 0, done.stderr
