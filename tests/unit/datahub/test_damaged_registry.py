"""A registry whose file is damaged is one sentence: which file, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme_api.exit_codes import ExitCode
from polyreme_datahub import hub
from polyreme_datahub.errors import RegistryDamagedError
from tests.unit.datahub.jobs import Home, digits


@pytest.mark.parametrize("garbled", ["header", "pages", "all"])
def test_a_damaged_registry_is_named_with_a_way_out(tmp_path: Path, garbled: str) -> None:
    home = Home(tmp_path)
    home.register("one", digits(1, pages=20))
    path = tmp_path / "registry.sqlite"
    data = bytearray(path.read_bytes())
    begin, end = {"header": (0, 100), "pages": (4096, len(data)), "all": (0, len(data))}[garbled]
    data[begin:end] = bytes(byte ^ 255 for byte in data[begin:end])
    path.write_bytes(bytes(data))
    for leftover in tmp_path.glob("registry.sqlite-*"):
        leftover.unlink()
    with pytest.raises(RegistryDamagedError, match=rf"registry is damaged: {path}: .*; restore it") as raised:
        hub.list_datasets(home.registry)
    assert raised.value.exit_code is ExitCode.ENVIRONMENT
