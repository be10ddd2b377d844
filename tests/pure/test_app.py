"""A bug of ours is a JSON 500 without a traceback, on every kind of route, and is logged."""

import asyncio
import logging
from typing import Any, NoReturn

import httpx
import pytest

from trimaran.frontend.http.app import App
from trimaran.frontend.http.serving import Serving
from trimaran.ipc.configuration import FrontendConfiguration


class BrokenClient:
    """Every use of it is a bug."""

    def __getattr__(self, name: str) -> NoReturn:
        raise OSError("secret detail")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/metrics"), ("GET", "/ready"), ("POST", "/v1/completions"), ("POST", "/tokenize")]
)
async def test_bugs_are_plain_500s(method: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    configuration = FrontendConfiguration(
        index=0,
        num_frontends=1,
        incarnation=1,
        core_address="",
        host="",
        port=1,
        served_model_name="m",
        log_requests=True,
    )
    client: Any = BrokenClient()
    serving = Serving(
        configuration, client, lambda work, name: asyncio.get_running_loop().create_task(work), lambda message: None
    )
    transport = httpx.ASGITransport(App(serving), raise_app_exceptions=False)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            response = await http.request(method, path, json={"prompt": "x"})
            assert (await http.get("/health")).status_code == 200
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text and "Traceback" not in response.text
    assert response.headers["x-request-id"]
    assert any(record.exc_info and "secret detail" in str(record.exc_info[1]) for record in caplog.records)
    assert any(f"{method} {path} 500" in record.getMessage() for record in caplog.records)
    serving.text_work.close()
