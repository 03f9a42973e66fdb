"""An MLflow server for tests, as strict as the real one: limits of a request, names, values that never change."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAME = re.compile(r"^[/\w.\- :]{1,250}$")
LIMITS = {"metrics": 1000, "params": 100, "tags": 100}
Fault = Callable[["FakeMlflow", str, dict[str, Any]], tuple[int, Any] | None]


class RefusedError(Exception):
    def __init__(self, code: str, status: int = 400) -> None:
        super().__init__(code)
        self.code, self.status = code, status


class FakeMlflow:
    """What is stored, and what was asked."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.headers: list[str] = []
        self.fault: Fault = lambda server, path, body: None
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append(path)
        if (failed := self.fault(self, path, body)) is not None:
            return failed
        try:
            return 200, getattr(self, path.replace("/", "_").replace("-", "_"))(body)
        except RefusedError as refused:
            return refused.status, {"error_code": refused.code, "message": "a rule"}

    def experiments_get_by_name(self, body: dict[str, Any]) -> Any:
        if body["experiment_name"] not in self.experiments:
            raise RefusedError("RESOURCE_DOES_NOT_EXIST", 404)
        return {"experiment": {"experiment_id": self.experiments[body["experiment_name"]]}}

    def experiments_create(self, body: dict[str, Any]) -> Any:
        if body["name"] in self.experiments:
            raise RefusedError("RESOURCE_ALREADY_EXISTS")
        self.experiments[body["name"]] = str(len(self.experiments) + 1)
        return {"experiment_id": self.experiments[body["name"]]}

    def runs_search(self, body: dict[str, Any]) -> Any:
        key, value = re.fullmatch(r"tags\.`(.*)` = '(.*)'", body["filter"]).groups()  # type: ignore[union-attr]
        return {"runs": [self._shown(run) for run in self.runs.values() if run["tags"].get(key) == value]}

    def runs_create(self, body: dict[str, Any]) -> Any:
        run: dict[str, Any] = {
            "info": {"run_id": f"r{len(self.runs)}", "status": "RUNNING", "start_time": body["start_time"]},
            "tags": {tag["key"]: tag["value"] for tag in body["tags"]},
            "params": {},
            "metrics": [],
        }
        self.runs[run["info"]["run_id"]] = run
        return {"run": self._shown(run)}

    def runs_get(self, body: dict[str, Any]) -> Any:
        return {"run": self._shown(self.runs[body["run_id"]])}

    def runs_update(self, body: dict[str, Any]) -> Any:
        self.runs[body.pop("run_id")]["info"].update(body)
        return {}

    def runs_log_batch(self, body: dict[str, Any]) -> Any:
        run = self.runs[body["run_id"]]
        for kind, limit in LIMITS.items():
            rows = body.get(kind, [])
            if len(rows) > limit or not all(NAME.match(row["key"]) for row in rows):
                raise RefusedError("INVALID_PARAMETER_VALUE")
        for row in body.get("params", ()):
            if len(row["value"]) > 500 or run["params"].setdefault(row["key"], row["value"]) != row["value"]:
                raise RefusedError("INVALID_PARAMETER_VALUE")
        run["tags"].update({row["key"]: row["value"] for row in body.get("tags", ())})
        for row in body.get("metrics", ()):
            assert isinstance(row["timestamp"], int)
            assert isinstance(row["step"], int)
            run["metrics"].append(row)
        return {}

    @staticmethod
    def _shown(run: dict[str, Any]) -> Any:
        latest: dict[str, Any] = {}
        for row in run["metrics"]:
            if row["step"] >= latest.get(row["key"], row)["step"]:
                latest[row["key"]] = row
        pairs = {kind: [{"key": k, "value": v} for k, v in run[kind].items()] for kind in ("params", "tags")}
        return {"info": run["info"], "data": {"metrics": list(latest.values()), **pairs}}

    def history(self, name: str) -> list[tuple[int, Any]]:
        """Steps and values of a metric of the only run, doubled ones included."""
        (run,) = self.runs.values()
        return [(row["step"], row["value"]) for row in run["metrics"] if row["key"] == name]


@contextlib.contextmanager
def served() -> Iterator[FakeMlflow]:
    """Serve on a port of this machine."""
    server = FakeMlflow()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any]) -> None:
            server.headers.append(self.headers.get("Authorization", ""))
            status, said = server.answer(urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/"), body)
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if isinstance(said, bytes) else "application/json")
                if status == 302:
                    self.send_header("Location", "/api/2.0/mlflow/elsewhere")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{listener.server_port}"
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
