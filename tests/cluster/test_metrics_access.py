"""Who may read the operator's metrics, as a real API server sees it."""

import asyncio
from typing import Any

import aiohttp
from kubernetes import client

from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.metrics_server import AccessReviewer, CachedReviewer, serve
from polyreme_operator.publishing.metrics import Metrics
from polyreme_system.clock import SystemClock
from tests.cluster.kube import api_client, new_namespace, until


def test_a_token_is_let_in_once_its_account_may_get_metrics(kubeconfig: str) -> None:
    async def ask(url: str, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics", headers=headers) as response:
            return response.status

    async def story(allowed: str, denied: str) -> dict[str, int]:
        reviewer = AccessReviewer(from_kubeconfig(kubeconfig))
        cached = CachedReviewer(reviewer, SystemClock())
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = asyncio.ensure_future(
            serve(Metrics(), host="127.0.0.1", port=0, reviewer=cached, is_ready=lambda: True, started=port.set_result)
        )
        try:
            url = f"http://127.0.0.1:{await port}"
            return {name: await ask(url, token) for name, token in (("yes", allowed), ("no", denied), ("who", "x.y.z"))}
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        core: Any = client.CoreV1Api(api)
        roles: Any = client.RbacAuthorizationV1Api(api)
        for name in ("prometheus", "stranger"):
            core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
        rule = {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
        roles.create_cluster_role({"metadata": {"name": namespace}, "rules": [rule]})
        subject = {"kind": "ServiceAccount", "name": "prometheus", "namespace": namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace}
        roles.create_cluster_role_binding(
            {"metadata": {"name": namespace}, "roleRef": reference, "subjects": [subject]}
        )
        try:
            request = {"spec": {"expirationSeconds": 600}}
            tokens = [
                core.create_namespaced_service_account_token(name, namespace, request).status.token
                for name in ("prometheus", "stranger")
            ]
            # The API server's authorizer learns of a new binding by a watch.
            until(lambda: asyncio.run(story(tokens[0], tokens[1]))["yes"] == 200, "the binding counts")
            assert asyncio.run(story(tokens[0], tokens[1])) == {"yes": 200, "no": 403, "who": 401}
        finally:
            roles.delete_cluster_role_binding(namespace)
            roles.delete_cluster_role(namespace)
