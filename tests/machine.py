"""What tests of images and nodes need of this machine."""

import os
from collections.abc import Iterable

import pytest

from tools import debian
from tools.cluster.nodes.probe import refusal


def require(programs: Iterable[str]) -> None:
    """Have some programs of the distribution; skip where the machine refuses a system call, which is quoted.

    Raises:
        BuildError: If a program is missing and can't be installed: that is no reason to skip.
    """
    # Who is not root is refused a system call before any program is called.
    if os.geteuid() != 0 and (refused := refusal()):
        pytest.skip(f"this machine refuses {refused}")
    debian.install(programs)
    if refused := refusal():
        pytest.skip(f"this machine refuses {refused}")
