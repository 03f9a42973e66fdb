"""The Kubernetes adapter against a real API server, by the contract suite that the embedded store passes."""

import pytest

from tests.cluster.kube import open_kubernetes
from tests.contract.test_port_binding import *  # noqa: F403 - the suite itself
from tests.contract.test_port_objects import *  # noqa: F403 - the suite itself
from tests.contract.test_port_watch import *  # noqa: F403 - the suite itself

pytestmark = pytest.mark.parametrize("opener", [open_kubernetes], ids=["kubernetes"])
