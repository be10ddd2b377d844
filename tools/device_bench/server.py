"""A served engine under measurement: started, waited for, asked, stopped."""

import http.client
import json
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trimaran.tools.device_bench.children import Child, PartFailed, tail
from trimaran.tools.device_bench.engines import MODEL_NAME, Engine

_LOOK_EVERY_S = 0.05


class Server:
    """Runs inside its `with` block; its lines go to the end of `log`."""

    def __init__(
        self, engine: Engine, model: Path, port: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.engine, self.port = engine, port
        self._command = engine.command(model, port)
        self._log, self._environment = log, environment or engine.environment

    def __enter__(self) -> Self:
        self.child = Child(self._command, self._environment, self._log, self.engine.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.end()

    def wait_ready(self, limit_s: float) -> float:
        """Seconds since the process was started. Raises PartFailed."""
        while (waited_s := time.monotonic() - self.child.began_s) < limit_s:
            self.child.check_lives()
            try:
                with self._open(self.engine.ready_path, limit_s=5):
                    return time.monotonic() - self.child.began_s
            except (OSError, http.client.HTTPException):
                time.sleep(_LOOK_EVERY_S)
        raise PartFailed(f"not ready after {waited_s:.0f} s\n{tail(self._log)}")

    def first_token_s(self, ids: range, limit_s: float) -> float:
        """Ask for a token of a short prompt; seconds from the process's start to its text. Raises PartFailed."""
        body = {"model": MODEL_NAME, "prompt": list(ids), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        try:
            with self._open("/v1/completions", body | {"stream": True}, limit_s=limit_s) as answer:
                for line in answer:
                    bare = line.replace(b" ", b"")
                    if bare.startswith(b'data:{"error"'):
                        raise PartFailed(f"a bad answer: {line.decode(errors='replace')[:300]}")
                    if bare.startswith(b"data:{") and b'"text":""' not in bare:
                        return time.monotonic() - self.child.began_s
        except (OSError, http.client.HTTPException) as error:
            raise PartFailed(f"the first request failed: {error!r}\n{tail(self._log)}") from error
        raise PartFailed(f"no token came\n{tail(self._log)}")

    def info(self) -> Any:
        """Trimaran's account of itself."""
        with self._open("/v1/server_info", limit_s=30) as answer:
            return json.loads(answer.read())

    def _open(self, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        return urllib.request.urlopen(request, timeout=limit_s)
