"""Starts a real frontend process as the supervisor does, with the test as supervisor."""

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trimaran.ipc.configuration import FrontendConfiguration
from trimaran.ipc.control import Begin, Listening, ModelKnown, Refused
from trimaran.ipc.process import child_arguments, create_control_link


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class FrontendProcess:
    """One frontend; `told` collects what it says on the control link."""

    def __init__(self, core_address: str, model: Path | None, **options: Any) -> None:
        self.port = options.pop("port", None) or free_port()
        configuration = FrontendConfiguration(
            index=options.pop("index", 0),
            num_frontends=1,
            incarnation=1,
            core_address=core_address,
            host="127.0.0.1",
            port=self.port,
            served_model_name=options.pop("served_model_name", "test-model"),
            **options,
        )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.link, theirs = create_control_link()
        self._death, self._death_write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trimaran.frontend.http.process", *child_arguments(theirs.fileno(), self._death)],
            pass_fds=(theirs.fileno(), self._death),
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            stderr=self._log,
        )
        theirs.close()
        os.close(self._death)
        self.told: list[Any] = []
        self.link.send(Begin(configuration))
        self.hear(Listening, 10)
        if model is not None:
            self.link.send(ModelKnown(str(model), str(model)))

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def hear(self, kind: type, timeout_s: float) -> Any:
        """The next control message of that kind."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {kind.__name__} within {timeout_s} s; told {self.told}"
            if not select.select([self.link._socket], [], [], left_s)[0]:
                continue
            message, _ = self.link.receive()
            self.told.append(message)
            if isinstance(message, kind):
                return message
            assert not isinstance(message, Refused), message.text

    def wait_ready(self) -> "FrontendProcess":
        """Until /ready says so."""
        import httpx

        deadline_s = time.monotonic() + 10
        while httpx.get(f"{self.url}/ready").status_code != 200:
            assert time.monotonic() < deadline_s, httpx.get(f"{self.url}/ready").text
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """End it, whatever state it is in. Nothing may have gone wrong in it."""
        self.process.kill()
        self.process.wait(5)
        os.close(self._death_write)
        self.link.close()
        self._log.seek(0)
        said = self._log.read().decode()
        self._log.close()
        assert "Traceback" not in said, said
