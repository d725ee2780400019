"""A small hub of models on loopback, with the protocol that huggingface_hub speaks."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_a_test"


class Hub:
    """Attributes: ``repositories`` (name → is it private?), ``files`` (of the last commit), ``messages``."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.large: dict[str, bytes] = {}  # by their sums
        self.refused: str | None = None  # part of an address at which nothing may be done
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
                    return self.answer(401, {"error": "Invalid user token."})
                if hub.refused and hub.refused in self.path:
                    return self.answer(403, {"error": "You may not."})
                self.answer(200, hub.post(self.path, body))

            def do_PUT(self) -> None:
                hub.large[self.path.rpartition("/")[2]] = self.rfile.read(
                    int(self.headers["Content-Length"])
                )
                self.answer(200, {})

            def answer(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        """Answer as the hub would."""
        if path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(filter(None, (request.get("organization"), request["name"])))
            is_private = "private" in (
                request.get("visibility"),
                request.get("private") and "private",
            )
            self.repositories.setdefault(name, is_private)
            return {"url": f"{self.url}/{name}", "name": name}
        if path.partition("?")[0].endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = {True: "lfs", False: "regular"}
            files = [
                {"path": n, "uploadMode": kinds[n.endswith(".safetensors")], "shouldIgnore": False}
                for n in names
            ]
            return {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return {"transfer": "basic", "objects": [self._action(o) for o in objects]}
        if path.partition("?")[0].endswith("/commit/main"):
            self._commit([json.loads(line) for line in body.splitlines() if line])
            name = path.removeprefix("/api/models/").partition("/commit")[0]
            return {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"{self.url}/{name}/commit/{'0' * 40}",
            }
        return {}  # of /api/validate-yaml: nothing is wrong

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        address = {"href": f"{self.url}/large/{wanted['oid']}"}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": address}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        self.files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.large[value["oid"]]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.http.shutdown()
        hub.http.server_close()
        thread.join()
