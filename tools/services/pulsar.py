"""A standalone Pulsar (broker, bookie and metadata in one JVM) from the jars that Maven fetches, once per user."""

import base64
import hmac
import http
import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from tools.build_cache import BuildError, built, cache_folder, say
from tools.cluster.servers import LOOPBACK, Certificate, Server, Servers, free_ports, http_status

POM = Path(__file__).parent / "maven/pom.xml"
LOGGING = Path(__file__).parent / "log4j2.properties"
ROLE = "polyreme"
KEY_BYTES = 32
GIVEN = "PULSAR_JARS"
"""Variable that names a folder of jars instead."""
USUAL_S = 25
PROGRESS_FILES = 100
READY_S_MAX = 120.0
HEALTH_S_MAX = 10.0
PARTITIONS = 2
"""Of each topic that is made by its first use."""
TTL_S = 600
"""Time that a message waits for a consumer: what is still due is sent again."""
LOG_LINES_SHOWN = 15
CONFIGURATION = {
    "clusterName": "standalone",
    "managedLedgerDefaultEnsembleSize": 1,
    "managedLedgerDefaultWriteQuorum": 1,
    "managedLedgerDefaultAckQuorum": 1,
    "systemTopicEnabled": "true",
    "topicLevelPoliciesEnabled": "true",
    "loadBalancerEnabled": "false",
    "brokerDeleteInactiveTopicsEnabled": "false",
    "allowAutoTopicCreation": "true",
    "allowAutoTopicCreationType": "partitioned",
    "defaultNumPartitions": PARTITIONS,
    "ttlDurationDefaultInSeconds": TTL_S,
}
# Java 17 closes what Netty, RocksDB and the metrics read.
OPENED = (
    "java.base/java.nio",
    "java.base/java.util.zip",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.platform",
    "java.base/sun.net",
    "java.management/sun.management",
    "jdk.management/com.sun.management.internal",
)


class Pulsar:
    """One server; started again in the same folder, it has the same ports and the messages that it had.

    Args:
        folder: Folder of the services.
        servers: Those of that folder.
        host: Address that it listens on, where it asks for a token; by default loopback, without one.
        certificate: With one it also listens on a port with TLS, which its URL names.
    """

    def __init__(
        self, folder: Path, servers: Servers, *, host: str | None = None, certificate: Certificate | None = None
    ) -> None:
        self._folder, self._servers, self._certificate = folder / "pulsar", servers, certificate
        self._host, self._key = host or LOOPBACK, secrets.token_bytes(KEY_BYTES) if host else None
        self._ports = free_ports(4, host=self._host)
        self._server: Server | None = None

    def start(self) -> None:
        """Start it."""
        jars = jars_folder(os.environ)
        self._folder.mkdir(parents=True, exist_ok=True)
        broker, web, bookie, tls = self._ports
        settings = {**CONFIGURATION, "brokerServicePort": broker, "webServicePort": web}
        settings |= {"bindAddress": self._host, "advertisedAddress": self._host}
        if self._key is not None:
            settings |= _token_settings(self._key)
        if self._certificate is not None:
            files = {"tlsCertificateFilePath": self._certificate.path, "tlsKeyFilePath": self._certificate.key}
            settings |= {"brokerServicePortTls": tls, **{name: str(path) for name, path in files.items()}}
        configuration = self._folder / "standalone.conf"
        configuration.touch(mode=0o600)
        configuration.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self._server = self._servers.start(
            "pulsar",
            [
                _java(),
                "-Xmx768m",
                "-XX:MaxDirectMemorySize=512m",
                *(f"--add-opens={package}=ALL-UNNAMED" for package in OPENED),
                f"-Dlog4j2.configurationFile={LOGGING}",
                "-cp",
                f"{jars}/*",
                "org.apache.pulsar.PulsarStandaloneStarter",
                f"--config={configuration}",
                f"--metadata-dir={self._folder / 'metadata'}",
                f"--bookkeeper-dir={self._folder / 'bookkeeper'}",
                f"--bookkeeper-port={bookie}",
                "--no-functions-worker",
                "--no-stream-storage",
            ],
        )

    def wait(self) -> dict[str, str]:
        """Wait until the broker passes its own health check; return the variables that a client finds it by."""
        assert self._server is not None
        self._servers.wait(self._server, self._is_healthy, what="Pulsar's health", timeout_s=READY_S_MAX)
        url = f"pulsar+ssl://{self._host}:{self._ports[3]}" if self._certificate else self.plain_url
        variables = {"POLYREME_TOPICS_URL": url}
        return variables if self._key is None else {**variables, "POLYREME_TOPICS_TOKEN": _token(self._key)}

    @property
    def plain_url(self) -> str:
        """Where it listens without TLS."""
        return f"pulsar://{self._host}:{self._ports[0]}"

    def _is_healthy(self) -> bool:
        headers = {} if self._key is None else {"Authorization": f"Bearer {_token(self._key)}"}
        path = "/admin/v2/brokers/health"
        status = http_status(self._ports[1], path, host=self._host, headers=headers, timeout_s=HEALTH_S_MAX)
        return status == http.HTTPStatus.OK


def _token(key: bytes) -> str:
    """Return a JSON Web Token for our role, signed with HMAC-SHA256."""
    parts = [_base64(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, {"sub": ROLE})]
    signed = ".".join(parts)
    return f"{signed}.{_base64(hmac.digest(key, signed.encode(), 'sha256'))}"


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _token_settings(key: bytes) -> dict[str, str]:
    return {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken",
        "tokenSecretKey": f"data:;base64,{base64.b64encode(key).decode()}",
        "superUserRoles": ROLE,
        "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
        "brokerClientAuthenticationParameters": f"token:{_token(key)}",
    }


def jars_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the server's jars, and fetch them if they are nowhere yet.

    Raises:
        BuildError: If Maven is missing, or fails.
    """
    if given := environment.get(GIVEN):
        return Path(given)
    jars = cache_folder(environment, "pulsar", [POM.read_bytes()]) / "jars"
    return built(jars, lambda: _fetch(jars, environment))


def _fetch(jars: Path, environment: Mapping[str, str]) -> None:
    maven = shutil.which("mvn", path=environment.get("PATH", ""))
    if maven is None:
        raise BuildError(f"no mvn on PATH to fetch Pulsar: install Maven, or name a folder of its jars by {GIVEN}")
    say(f"fetching Pulsar into {jars.parent}, once: about {USUAL_S} s, 235 MB")
    started_s, partial = time.monotonic(), jars.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [maven, "--batch-mode", "--strict-checksums", f"--file={POM}", "dependency:copy-dependencies"]
    process = subprocess.Popen(
        [*command, "-DincludeScope=runtime", f"-DoutputDirectory={partial}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, files = deque[str](maxlen=LOG_LINES_SHOWN), 0
    with process:
        for line in process.stdout or ():
            lines.append(line)
            files += "Downloaded" in line
            if files % PROGRESS_FILES == 0 and "Downloaded" in line:
                say(f"fetched {files} files")
    if process.returncode != 0:
        raise BuildError(f"mvn exited with {process.returncode}; it ended with\n{''.join(lines)}")
    partial.rename(jars)
    say(f"fetched {len(list(jars.iterdir()))} jars in {time.monotonic() - started_s:.0f} s")


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else None)
    if java is None:
        raise BuildError("no java on PATH to run Pulsar: install a Java runtime, version 17 or newer")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    if (version := re.search(r'version "(\d+)', said)) is None or int(version[1]) < 17:
        raise BuildError(f"{java} is {said.partition(chr(10))[0]}: Pulsar needs Java 17 or newer")
    return java
