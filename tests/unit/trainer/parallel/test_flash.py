"""Which flash kernels a device gets, by what is installed beside torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls

from polyreme_trainer.parallel.flash import NEWEST, OWN, PACKAGE, flash_kernels, use_newest_flash


@pytest.mark.parametrize(
    ("capability", "installed", "known", "chosen"),
    [
        ((9, 0), True, ["FA3", "FA4"], NEWEST),
        ((9, 0), False, ["FA3"], OWN),
        ((9, 0), True, [], OWN),
        ((8, 0), True, ["FA3"], OWN),
        ((10, 0), True, ["FA3"], OWN),
    ],
)
def test_the_newest_kernels_run_on_hopper_where_they_are_installed(
    capability: tuple[int, int], installed: bool, known: list[str], chosen: str
) -> None:
    assert flash_kernels(capability, installed=lambda package: installed, known=known) == chosen


def test_this_torch_knows_them_and_a_package_without_kernels_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NEWEST in list_flash_attention_impls()
    assert use_newest_flash((9, 0)) == OWN, "the package is not installed here"
    (tmp_path / f"{PACKAGE}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="does not expose FA3 forward kernels"):
        use_newest_flash((9, 0))
    sys.modules.pop(PACKAGE)
    assert current_flash_attention_impl() is None
