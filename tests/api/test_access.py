"""Who may ask, how often, from where and over what: keys, admin routes, rates, origins, certificates."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from trimaran.frontend.http.rate_limit import RateLimit
from trimaran.frontend.launch.keys import Keys, check_certificate, open_door, read_keys
from trimaran.frontend.launch.options import OptionError, Options, options_from_keywords, read_options
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.control import DrainAsked, LogLevelAsked

from ..server import Server
from .conftest import Served
from .frontend_process import FrontendProcess

KEYS = {"Authorization": "Bearer client"}
ADMIN = {"Authorization": "Bearer boss"}


def ask(frontend: FrontendProcess, path: str, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    return httpx.post(f"{frontend.url}{path}", headers=headers or {}, timeout=10, **options)


def completion(frontend: FrontendProcess, headers: dict[str, str]) -> httpx.Response:
    return ask(frontend, "/v1/completions", headers, json={"prompt": "a", "max_tokens": 1})


# admin routes

ADMIN_PATHS = ("/admin/drain", "/admin/reset_prefix_cache", "/admin/log_level", "/admin/other")


@pytest.mark.user_pain("X5")
def test_admin_routes_are_not_there_without_an_admin_key(served: Served, model_directory: Path) -> None:
    for keys, sent in (((), {}), (("client",), KEYS)):
        frontend = FrontendProcess(served.core.address, model_directory, index=7, api_keys=keys)
        try:
            frontend.wait_ready()
            for path in ADMIN_PATHS:
                assert ask(frontend, path, sent).status_code == 404, path
            paths = httpx.get(f"{frontend.url}/openapi.json", headers=sent).json()["paths"]
            assert not [path for path in paths if path.startswith("/admin")]
            if keys:
                assert ask(frontend, "/admin/drain").status_code == 401, "nobody learns what is there without a key"
        finally:
            frontend.stop()


@pytest.mark.user_pain("X5")
def test_admin_routes_want_an_admin_key(served: Served, model_directory: Path) -> None:
    frontend = FrontendProcess(
        served.core.address, model_directory, index=7, api_keys=("client",), admin_keys=("boss", "owner")
    )
    try:
        frontend.wait_ready()
        for path in ADMIN_PATHS:
            assert ask(frontend, path).status_code == 401
            assert ask(frontend, path, {"Authorization": "Bearer nobody"}).status_code == 401
            refused = ask(frontend, path, KEYS)
            assert refused.status_code == 403 and "admin key" in refused.json()["error"]["message"]
        assert ask(frontend, "/admin/other", ADMIN).status_code == 404
        assert httpx.get(f"{frontend.url}/admin/drain", headers=ADMIN).status_code == 405
        for headers in (KEYS, ADMIN, {"Authorization": "Bearer owner"}):
            assert completion(frontend, headers).status_code == 200
        assert ask(frontend, "/admin/log_level", ADMIN, json={"level": "warning"}).status_code == 200
        assert frontend.hear(LogLevelAsked, 5).level == "warning"
        for body in ({"level": "loud"}, {}, {"level": "info", "who": 1}, []):
            assert ask(frontend, "/admin/log_level", ADMIN, json=body).status_code == 400, body
        assert ask(frontend, "/admin/drain", ADMIN).status_code == 202
        frontend.hear(DrainAsked, 5)
        document = httpx.get(f"{frontend.url}/openapi.json", headers=ADMIN).json()
        assert document["paths"]["/admin/drain"]["post"]["security"] == [{"key": []}]
    finally:
        frontend.stop()


def test_an_admin_drains_the_server(demo_folder: Path) -> None:
    """Streams that run are finished, others are told, and the server ends in order."""
    with Server(demo_folder, "--admin-key", "boss", "--log-level", "error", script="step_ms=20") as server:
        log_level = server.http.post("/admin/log_level", json={"level": "info"}, headers=ADMIN)
        assert log_level.status_code == 200
        stream = server.stream("a", max_tokens=60)
        stream.read_until(b"data: ")
        for _ in range(2):  # a second wish is no second signal
            assert server.http.post("/admin/drain", headers=ADMIN).status_code == 202
        server.until(lambda: server.status("/ready") in (0, 503), 5, "nothing new is taken")
        stream.read_all()
        assert stream.events()[-1] == "[DONE]"
        stream.vanish()
        assert server.ended(30) == 0
        assert server.printed("Draining")


def test_the_prefix_cache_is_forgotten(demo_folder: Path) -> None:
    def cached_tokens() -> int:
        prompt = [7] * 200
        usage = server.complete(prompt, max_tokens=1)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with Server(demo_folder, "--admin-key", "boss") as server:
        assert cached_tokens() == 0
        assert cached_tokens() > 100
        assert server.http.post("/admin/reset_prefix_cache", headers=ADMIN).status_code == 200
        assert cached_tokens() == 0


# keys


def options(**given: Any) -> Options:
    return Options(**given)


def test_keys_of_options_and_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# clients\n\n  two  \nthree\n")
    keys = read_keys(options(api_key=("one",), api_key_file=file, admin_key=("boss",)))
    assert keys == Keys(clients=("one", "two", "three"), admins=("boss",))
    file.write_text("# nothing\n")
    with pytest.raises(Refusal, match="holds no key; write one a line"):
        read_keys(options(api_key_file=file))
    with pytest.raises(Refusal, match="--admin-key-file .* cannot be read .*; give a text file with one key a line"):
        read_keys(options(admin_key_file=tmp_path))
    with pytest.raises(Refusal, match="an admin key opens every route") as refusal:
        read_keys(options(api_key=("same",), admin_key=("same",)))
    assert "same" not in str(refusal.value)
    with pytest.raises(Refusal, match="add --api-key"):
        read_keys(options(max_requests_per_minute=5))
    read = read_options(["--admin-key", "a,b", "--cors-origin", "https://a,https://b"], {}).options
    assert (read.admin_key, read.cors_origin) == (("a,b",), ("https://a", "https://b"))
    with pytest.raises(OptionError, match="only for `trimaran serve`"):
        options_from_keywords({"admin_key": "boss"}, {})


@pytest.mark.user_pain("X5")
@pytest.mark.parametrize(
    ("host", "clients", "is_open"),
    [
        ("127.0.0.1", (), False),
        ("127.8.8.8", (), False),
        ("::1", (), False),
        ("localhost", (), False),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("10.0.0.7", (), True),
        ("some.host", (), True),
        ("0.0.0.0", ("key",), False),
    ],
)
def test_x5_an_open_door_is_told(host: str, clients: tuple[str, ...], is_open: bool) -> None:
    told = open_door(options(host=host), Keys(clients=clients))
    assert (told is not None) == is_open
    assert told is None or "--api-key" in told


@pytest.mark.user_pain("X5")
def test_x5_an_open_door_is_told_once_at_the_start(demo_folder: Path) -> None:
    with Server(demo_folder, "--host", "0.0.0.0", "--frontends", "2") as server:
        assert sum("may use this server" in line for line in server.lines) == 1


# rates


def test_a_bucket_fills_with_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    ours, theirs = (RateLimit(tmp_path / "rates", 2, per_minute=6) for _ in range(2))
    assert [limit.take(0) for limit in (ours, theirs, ours, theirs, ours, theirs)] == [None] * 6
    assert ours.take(0) == pytest.approx(10.0), "the seventh waits for a sixth of a minute"
    assert theirs.take(0) == pytest.approx(10.0), "a refusal takes nothing"
    assert theirs.take(1) is None, "of another key"
    now_s[0] += 10
    assert theirs.take(0) is None and ours.take(0) == pytest.approx(10.0)
    now_s[0] += 3600
    assert [ours.take(0) for _ in range(7)].count(None) == 6, "no more than a minute's is saved"


def test_each_key_has_its_rate(served: Served, model_directory: Path, tmp_path: Path) -> None:
    """Counted over frontends; whatever makes no tokens is free."""
    frontends = [
        FrontendProcess(
            served.core.address,
            model_directory,
            index=7 + number,
            api_keys=("client", "other"),
            admin_keys=("boss",),
            requests_per_minute=4,
            rate_file=str(tmp_path / "rates"),
        )
        for number in range(2)
    ]
    try:
        for frontend in frontends:
            frontend.wait_ready()
            assert httpx.get(f"{frontend.url}/v1/models", headers=KEYS).status_code == 200
        codes = [completion(frontends[number % 2], KEYS).status_code for number in range(4)]
        assert codes == [200] * 4
        refused = completion(frontends[0], KEYS)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "4 requests a minute" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 15
        assert completion(frontends[1], KEYS).status_code == 429
        assert completion(frontends[1], {"Authorization": "Bearer other"}).status_code == 200
        assert completion(frontends[1], ADMIN).status_code == 200
        assert httpx.get(f"{frontends[0].url}/v1/models", headers=KEYS).status_code == 200
    finally:
        for frontend in frontends:
            frontend.stop()


def test_frontends_of_a_server_share_one_rate(demo_folder: Path) -> None:
    """Each connection may meet another frontend."""
    keys = ("--api-key", "client", "--max-requests-per-minute", "6")
    with Server(demo_folder, *keys, "--frontends", "2") as server:
        server.http.headers.update(KEYS)
        body = {"model": server.model, "prompt": "a", "max_tokens": 1}
        codes = [
            httpx.post(f"{server.url}/v1/completions", json=body, headers=KEYS, timeout=20).status_code
            for _ in range(16)
        ]
        assert codes.count(200) == 6 and codes.count(429) == 10, codes


# origins

PAGE = {"Origin": "https://app.example"}
PREFLIGHT = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_no_other_page_may_ask_unless_told(served: Served) -> None:
    for answer in (
        served.http.get("/health", headers=PAGE),
        served.http.options("/v1/completions", headers=PREFLIGHT),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_pages_of_allowed_origins_may_ask(served: Served, model_directory: Path) -> None:
    frontend = FrontendProcess(
        served.core.address, model_directory, index=7, api_keys=("client",), cors_origins=("https://app.example",)
    )
    try:
        frontend.wait_ready()
        with httpx.Client(base_url=frontend.url, timeout=10) as http:
            before = http.options("/v1/completions", headers=PREFLIGHT)
            assert before.status_code == 200 and before.headers["access-control-allow-origin"] == PAGE["Origin"]
            assert "authorization" in before.headers["access-control-allow-headers"].lower()
            other = http.options("/v1/completions", headers={**PREFLIGHT, "Origin": "https://evil.example"})
            assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
            body = {"prompt": "a b c", "max_tokens": 8, "stream": True}
            with http.stream("POST", "/v1/completions", json=body, headers=PAGE | KEYS) as answer:
                assert answer.headers["access-control-allow-origin"] == PAGE["Origin"]
                events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]" and len(events) > 2 and json.loads(events[0])["choices"]
            assert completion(frontend, PAGE).status_code == 401, "the key is wanted all the same"
            foreign = completion(frontend, {"Origin": "https://evil.example", **KEYS})
            assert "access-control-allow-origin" not in foreign.headers
    finally:
        frontend.stop()


# certificates


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of this machine's loopback address, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(chain)]
    names = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, *names], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed here")
    return chain, key


def test_https(demo_folder: Path, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    tls = ("--tls-certificate", str(chain), "--tls-key", str(key))
    with Server(demo_folder, *tls, wait=False) as server:
        server.until(lambda: server.printed("^Listening on https://") and server.printed("^Ready"), 30, "ready")
        trusted = ssl.create_default_context(cafile=str(chain))
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trusted, timeout=10) as https:
            server.until(lambda: https.get("/ready").status_code == 200, 10, "every process knows")
            body = {"prompt": "a b", "max_tokens": 4, "stream": True}
            with https.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=5)
        old = ssl.create_default_context(cafile=str(chain))
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert httpx.get(f"https://127.0.0.1:{server.port}/health", verify=old).status_code == 200


def test_certificates_that_cannot_be_used_are_refused_at_once(
    certificate: tuple[Path, Path], tmp_path: Path, demo_folder: Path
) -> None:
    chain, key = certificate
    check_certificate(options())
    check_certificate(options(tls_certificate=chain, tls_key=key))
    for given in ({"tls_certificate": chain}, {"tls_key": key}):
        with pytest.raises(Refusal, match="needs --tls-(key|certificate) beside it"):
            check_certificate(options(**given))
    other, locked = tmp_path / "other.pem", tmp_path / "locked.pem"
    subprocess.run(["openssl", "genrsa", "-out", str(other), "2048"], check=True, capture_output=True)
    lock = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(lock, check=True, capture_output=True)
    for wrong in (other, locked, demo_folder / "config.json"):
        with pytest.raises(Refusal, match="cannot be used .*; give a certificate chain and its own key in PEM form"):
            check_certificate(options(tls_certificate=chain, tls_key=wrong))
    tls = ("--tls-certificate", str(chain), "--tls-key", str(other))
    with Server(demo_folder, *tls, wait=False) as server:
        assert server.ended(20) == 2
        assert "cannot be used" in server.lines[-1]
