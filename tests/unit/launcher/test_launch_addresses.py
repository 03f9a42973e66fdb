"""A leader and its ranks' rendezvous are reached by IPv4 and by IPv6, as a headless Service resolves to either."""

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from polyreme_api.environment import PodEnvironment
from polyreme_launcher.leader_agent import LeaderAgent, leader_listener
from polyreme_launcher.peers import FollowerLink
from polyreme_launcher.protocol.handshake import FollowerIdentity
from polyreme_launcher.resume import ResumeFixer
from polyreme_planner.layout import Layout
from polyreme_system.addresses import listen
from polyreme_system.clock import SystemClock
from polyreme_trainer.parallel.world import RankSettings, open_world
from tests.unit.launcher.launch_scenes import pod_environment
from tools.cluster.servers import free_ports

HOSTS = ["127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])]
"""A kernel without IPv6 has no other one."""
CONNECTED_S_MAX = 20.0


def pod(folder: Path, port: int) -> PodEnvironment:
    """What a pod of a cluster tells its leader; the API server does not answer."""
    address = f"j-00000.default.svc:{port}"
    return pod_environment(folder, leader_address=address, api_url="http://127.0.0.1:9")


@pytest.mark.parametrize("host", HOSTS)
async def test_a_follower_reaches_the_leader_by_either_family(host: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    secret, clock, connected = secrets.token_bytes(32), SystemClock(), asyncio.Event()
    own = pod(tmp_path, port)
    leader = LeaderAgent(
        pod=own,
        secret=secret,
        clock=clock,
        resume=ResumeFixer(own, by=own.pod, objects_url=None, clock=clock),
        to_own_follower=lambda _: None,
        on_fail=lambda error: pytest.fail(str(error)),
        serve_checks=lambda *_: None,
    )
    link = FollowerLink(
        address=f"{host}:{port}",
        identity=FollowerIdentity(job_uid=own.job_uid, index=1, replacement=0, secret=secret),
        clock=clock,
        on_connected=connected.set,
        on_lost=lambda: None,
        on_message=lambda _: None,
    )
    await leader.start(leader_listener(own, inherited=None))
    task = asyncio.create_task(link.run())
    async with asyncio.timeout(CONNECTED_S_MAX):
        await connected.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await leader.close()


@pytest.mark.parametrize("host", HOSTS)
def test_ranks_meet_by_either_family(host: str) -> None:
    with contextlib.closing(listen("", 0, backlog=8)) as listener:
        settings = RankSettings(
            rank=0,
            world=1,
            attempt=1,
            master_address=host.strip("[]"),
            master_port=listener.getsockname()[1],
            master_fd=listener.detach(),
        )
        with open_world(settings, Layout()) as world:
            assert dist.get_world_size(world.meshes.control_group) == 1
