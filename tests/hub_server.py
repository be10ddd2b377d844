"""A little model hub on 127.0.0.1: the endpoints that fetching a model uses, and a record of what was asked."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    files: ClassVar[dict[str, dict[str, bytes]]]
    asked: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, *, head: bool) -> None:
        path = unquote(urlparse(self.path).path)
        self.asked.append(f"{self.command} {path}")
        for name, files in self.files.items():
            if path.startswith(f"/api/models/{name}/revision/"):
                if path.rsplit("/", 1)[1] not in ("main", COMMIT):
                    return self._send(404, b"{}", head, {"X-Error-Code": "RevisionNotFound"})
                info = {
                    "id": name,
                    "modelId": name,
                    "sha": COMMIT,
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                }
                return self._send(
                    200, json.dumps(info | {"siblings": [{"rfilename": f} for f in files]}).encode(), head
                )
            if path.startswith(f"/api/models/{name}/tree/"):
                tree = [
                    {"type": "file", "path": f, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for f, body in files.items()
                ]
                return self._send(200, json.dumps(tree).encode(), head)
            prefix = f"/{name}/resolve/{COMMIT}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in files:
                body = files[path.removeprefix(prefix)]
                etag = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return self._send(200, body, head, etag)
        if path.startswith("/api/models/gated/"):
            return self._send(403, b"{}", head, {"X-Error-Code": "GatedRepo"})
        return self._send(404, b"{}", head, {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, body: bytes, head: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if not head:
            self.wfile.write(body)


@contextmanager
def hub(files: dict[str, dict[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Serves models (name -> file -> bytes); gives the address and the list of what is asked."""
    handler = type("Handler", (_Handler,), {"files": files, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
