"""Data that this server does not take: media by address, media in the request, tensors. Rows X3, X4."""

import base64
import pickle
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimaran.tests.api.conftest import Served
from trimaran.tests.api.test_refusals import CHAT, PROMPT, check_alive, check_refused

HOSTS = ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0")  # the last reaches loopback too


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A listening socket to which nothing may connect while the test runs."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        yield listener
        assert not select.select([listener], [], [], 0.3)[0], "the server connected to an address of a request"


def _addresses(trap: socket.socket) -> list[str]:
    port = trap.getsockname()[1]
    return [f"http://{host}:{port}/a.png" for host in HOSTS] + [
        f"ftp://127.0.0.1:{port}/a",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/a.png",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
    ]


def _media_parts(url: str) -> dict[str, dict[str, Any]]:
    return {
        "image_url": {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        "video_url": {"type": "video_url", "video_url": {"url": url}},
        "audio_url": {"type": "audio_url", "audio_url": {"url": url}},
        "input_image": {"type": "input_image", "image_url": url},
        "input_audio": {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        "file": {"type": "file", "file": {"file_id": url, "file_data": url, "filename": "a"}},
    }


@pytest.mark.user_pain("X3")
@pytest.mark.parametrize("kind", _media_parts(""))
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_x3_media_is_refused_and_nothing_is_fetched(served: Served, trap: socket.socket, kind: str, role: str) -> None:
    """On every route that takes messages, in every role, alone and beside text."""
    extra = {"tool_call_id": "x"} if role == "tool" else {}
    for url in _addresses(trap):
        part = _media_parts(url)[kind]
        for content in ([part], [{"type": "text", "text": "see"}, part]):
            messages = [{"role": "user", "content": "x"}, {"role": role, "content": content, **extra}]
            for path in ("/v1/chat/completions", "/tokenize"):
                error = check_refused(served.http.post(path, json={"messages": messages}), "messages")
                assert kind in error["message"], error
    assert not served.core.submits
    check_alive(served)


@pytest.mark.user_pain("X3")
def test_x3_an_address_in_text_stays_text(served: Served, trap: socket.socket) -> None:
    """Where text is taken an address is text: it is answered, and nothing is fetched."""
    for url in _addresses(trap):
        for content in (url, [{"type": "text", "text": url}], f"![x]({url})"):
            body = {**CHAT, "messages": [{"role": "user", "content": content}]}
            assert served.http.post("/v1/chat/completions", json=body).status_code == 200
        assert served.http.post("/v1/completions", json={**PROMPT, "prompt": url}).status_code == 200


def _blobs(flag: Path) -> list[Any]:
    """Values that name a tensor; the first runs code in whoever unpickles it."""

    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (flag,)

    blob = base64.b64encode(pickle.dumps(Runs())).decode()
    return [blob, [blob], {"data": blob, "shape": [1, 8], "dtype": "float32"}, [[0.0] * 8], ""]


@pytest.mark.user_pain("X4")
def test_x4_tensors_are_refused_by_name_and_never_decoded(served: Served, tmp_path: Path) -> None:
    flag = tmp_path / "decoded"
    for blob in _blobs(flag):
        for path, base in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            error = check_refused(served.http.post(path, json={**base, "prompt_embeds": blob}), "prompt_embeds")
            assert "prompt_embeds" in error["message"]
        for kind in ("image_embeds", "audio_embeds", "prompt_embeds", "tensor"):
            messages = [{"role": "user", "content": [{"type": kind, kind: blob}]}]
            refused = served.http.post("/v1/chat/completions", json={"messages": messages})
            assert kind in check_refused(refused, "messages")["message"]
    for blob in _blobs(flag)[2:4]:  # text is taken as text; what is neither text nor ids is refused
        check_refused(served.http.post("/v1/completions", json={"prompt": blob}), "prompt")
    assert not flag.exists() and not served.core.submits
    check_alive(served)
