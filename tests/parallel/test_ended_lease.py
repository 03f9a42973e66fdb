"""Limit of a real rank's training: it begins no step after the time that its launcher set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api.exit_codes import ExitCode
from polyreme_launcher.fence_watch import NS
from polyreme_system.clock import boot_s
from tests.parallel.attempts import until
from tests.parallel.paged_ranks import paged

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_a_rank_ends_at_its_first_step_after_the_right_to_train(start: Any, tmp_path: Path) -> None:
    with paged(start, tmp_path, {"dp": 1}) as ranks:
        ranks.limit(int((boot_s() + 1000) * NS))
        until(lambda: all(state.step > 2 for state in ranks.look()), "the rank trains")
        ranks.limit(int((boot_s() - 1) * NS))
        assert ranks.gang.wait() == [ExitCode.FENCED], ranks.gang.logs()
        assert "no step may begin: the right to train ended" in ranks.gang.logs()
