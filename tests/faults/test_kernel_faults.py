"""Kernels of another package that go wrong in a real server: service goes on, with the reason where users look."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trimaran.tests.faults.bad_package import BadPackage
from trimaran.tests.faults.crowd import nothing_left
from trimaran.tests.server import Server

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

SIZES = ("--dtype", "float32", "--kv-memory-bytes", str(48 << 20), "--max-model-len", "256", "--max-num-seqs", "16")
NUM_STREAMS = 8
NUM_TOKENS = 24
PLAIN: dict[str, Any] = {"temperature": 0}
PENALISED: dict[str, Any] = {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.3}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 5, "logprobs": 2}
LOGPROBS: dict[str, Any] = {"temperature": 0, "logprobs": 2}
KINDS = {"plain": PLAIN, "penalised": PENALISED, "drawn": DRAWN, "logprobs": LOGPROBS}


def prompt(number: int) -> str:
    return f"Number {number} of the stories begins"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> tuple[Path, dict[str, list[Any]]]:
    """A cache with the C++ kernels built and no verdicts, and what a clean server answers."""
    cache = tmp_path_factory.mktemp("cache")
    with Server(demo_folder, *SIZES, "--cache-dir", str(cache), script=None) as server:
        answers = {
            name: [answer(server, number, fields) for number in range(NUM_STREAMS)] for name, fields in KINDS.items()
        }
    (cache / "kernel-verdicts.json").unlink()
    return cache, answers


def answer(server: Server, number: int, fields: dict[str, Any]) -> Any:
    done = server.complete(prompt(number), max_tokens=NUM_TOKENS, ignore_eos=True, **fields)
    return _said(done["choices"][0]["text"], done["choices"][0].get("logprobs"))


def _said(text: str, logprobs: dict[str, Any] | None) -> tuple[str, list[float]]:
    return text, [] if logprobs is None else [round(value, 2) for value in logprobs["token_logprobs"]]


@pytest.fixture
def cache(tmp_path: Path, clean: tuple[Path, Any]) -> Path:
    return Path(shutil.copytree(clean[0], tmp_path / "cache"))


@contextmanager
def serving(model: Path, package: BadPackage, cache: Path, *arguments: str, wait: bool = True) -> Iterator[Server]:
    options: dict[str, Any] = {"script": None, "environment": package.environment, "wait": wait}
    with Server(model, *SIZES, "--cache-dir", str(cache), *arguments, **options) as server:
        yield server


def kernel_of(server: Server, kernel: str) -> dict[str, Any]:
    """Its entry in /v1/server_info."""
    entries = server.http.get("/v1/server_info").json()["kernels"]
    found: dict[str, Any] = next(entry for entry in entries if entry["kernel"] == kernel)
    return found


def assert_demoted(server: Server, package: BadPackage, reason: str, *, in_log: str = "") -> None:
    """In the log, in /metrics and in /v1/server_info, with the same reason; another serves."""
    kernel, name = package.kernel, package.implementation
    server.until(lambda: name in kernel_of(server, kernel)["demoted"], 5, f"{name} is demoted")
    entry = kernel_of(server, kernel)
    assert reason in entry["demoted"][name] and "\n" not in entry["demoted"][name]
    assert entry["chosen"] != name
    assert server.printed(in_log or rf"^kernel {kernel} = {entry['chosen']}.*; not {name}: .*{reason}")
    metrics = server.metrics()
    assert metrics[f'kernel_info{{implementation="{entry["chosen"]}",kernel="{kernel}",rank="0"}}'] == 1
    (demoted,) = [key for key in metrics if key.startswith("kernel_demoted{")]
    assert f'implementation="{name}"' in demoted and f'kernel="{kernel}"' in demoted and reason in demoted


def assert_right(server: Server, clean: tuple[Path, dict[str, list[Any]]], kind: str = "plain") -> None:
    assert answer(server, 0, KINDS[kind]) == clean[1][kind][0]


@pytest.mark.parametrize(
    ("kernel", "fault", "reason"),
    [
        ("rms_norm", "compile", "RuntimeError: ptxas fatal"),
        pytest.param(
            "paged_attention",
            "resources in load",
            "OutOfResources: out of resource: shared memory",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "silu_and_mul",
            "resources in call",
            "OutOfResources: out of resource: shared memory",
            marks=pytest.mark.long,
        ),
        ("fused_add_rms_norm", "wrong", "disagrees with its reference"),
        pytest.param("greedy_sample", "wrong", "disagrees with its reference", marks=pytest.mark.long),
        pytest.param("silu_and_mul", "meddles", "changes its argument 1", marks=pytest.mark.long),
        pytest.param("linear", "wrong", "disagrees with its reference", marks=pytest.mark.long),
    ],
)
def test_one_that_cannot_be_used_is_passed_over(
    demo_folder: Path, tmp_path: Path, cache: Path, clean: Any, kernel: str, fault: str, reason: str
) -> None:
    package = BadPackage(tmp_path, kernel, fault)
    with serving(demo_folder, package, cache) as server:
        assert_demoted(server, package, reason)
        assert_right(server, clean)
        assert server.metrics()["engine_generation"] == 1


@pytest.mark.parametrize("fault", ["crash in load", pytest.param("crash in call", marks=pytest.mark.long)])
def test_one_that_kills_the_worker_is_passed_over_after_two_deaths(
    demo_folder: Path, tmp_path: Path, cache: Path, clean: Any, fault: str
) -> None:
    package = BadPackage(tmp_path, "rms_norm", fault)
    with serving(demo_folder, package, cache) as server:
        assert_demoted(server, package, "the process died 2 times")
        assert server.printed(r"worker 0 was killed by SIGSEGV.*restart 2 of 5")
        assert server.metrics()["engine_generation"] == 3
        assert_right(server, clean)
    with serving(demo_folder, package, cache) as server:  # and the next server knows
        assert_demoted(server, package, "the process died 2 times")
        assert server.metrics()["engine_generation"] == 1


class TestUnderLoad:
    """The fault begins when all streams have tokens; what the kernel wrote is spoilt when it raises."""

    @pytest.mark.parametrize(
        ("kernel", "kind"),
        [
            pytest.param("embed", "plain", marks=pytest.mark.long),
            pytest.param("rotary_and_kv_write", "plain", marks=pytest.mark.long),
            ("paged_attention", "plain"),
            pytest.param("fused_add_rms_norm", "plain", marks=pytest.mark.long),
            pytest.param("fused_add_rms_norm", "penalised", marks=pytest.mark.long),
            pytest.param("apply_penalties", "penalised", marks=pytest.mark.long),
            pytest.param("greedy_sample", "logprobs", marks=pytest.mark.long),
            pytest.param("sample", "drawn", marks=pytest.mark.long),
            ("token_logprobs", "logprobs"),
            pytest.param("token_logprobs", "drawn", marks=pytest.mark.long),
        ],
    )
    def test_no_stream_notices(
        self, demo_folder: Path, tmp_path: Path, cache: Path, clean: Any, kernel: str, kind: str
    ) -> None:
        package = BadPackage(tmp_path, kernel, "under load")
        with serving(demo_folder, package, cache) as server:
            assert not kernel_of(server, kernel)["demoted"]
            assert kernel_of(server, kernel)["chosen"] == package.implementation
            assert streamed(server, package, KINDS[kind]) == clean[1][kind]
            assert_demoted(server, package, "illegal memory access", in_log=_REPLACED.format(package.implementation))
            assert server.metrics()["engine_generation"] == 1
            assert sum(package.implementation in line for line in server.lines if "takes over" in line) == 1
            server.assert_idle()

    @pytest.mark.long
    @pytest.mark.parametrize("fields", [PLAIN, {**PLAIN, "prompt_logprobs": 1}], ids=["plain", "prompt logprobs"])
    def test_beside_a_recording(
        self, demo_folder: Path, tmp_path: Path, cache: Path, clean: Any, fields: dict[str, Any]
    ) -> None:
        """The passes are replayed; the kernel's own calls are those of the logits, of which some are the prompt's."""
        package = BadPackage(tmp_path, "fused_add_rms_norm", "under load", recorded=True)
        with serving(demo_folder, package, cache) as server:
            assert server.printed("^graphs = one recording")
            package.strike()
            done = server.complete(prompt(0), max_tokens=NUM_TOKENS, ignore_eos=True, **fields)
            assert done["choices"][0]["text"] == clean[1]["plain"][0][0]
            assert_demoted(server, package, "illegal memory access", in_log=_REPLACED.format(package.implementation))
            assert server.metrics()["engine_generation"] == 1
            assert_right(server, clean)

    @pytest.mark.long
    def test_ranks_start_again_together(self, demo_folder: Path, tmp_path: Path, cache: Path) -> None:
        """One that went on alone might compute otherwise than the others."""
        package = BadPackage(tmp_path, "embed", "under load")
        with serving(demo_folder, package, cache, "--tensor-parallel", "3") as server:
            before = answer(server, 0, PLAIN)
            package.strike()
            done = server.http.post("/v1/completions", json={"prompt": prompt(0), "max_tokens": 4})
            assert done.status_code == 503 and "bad_embed failed while serving" in done.text
            server.wait_ready(30)
            entry = kernel_of(server, "embed")
            assert "illegal memory access" in entry["demoted"]["bad_embed"] and entry["chosen"] != "bad_embed"
            metrics = server.metrics()
            assert metrics["engine_generation"] == 2
            serving_now = f'kernel_info{{implementation="{entry["chosen"]}",kernel="embed",rank='
            assert [metrics[f'{serving_now}"{rank}"}}'] for rank in range(3)] == [1, 1, 1]
            assert answer(server, 0, PLAIN) == before

    @pytest.mark.long
    def test_a_packed_weight_needs_a_new_worker(
        self, demo_folder: Path, tmp_path: Path, cache: Path, clean: Any
    ) -> None:
        """`linear` keeps weights in its own layout: nothing can take over in its place, so the worker starts again."""
        package = BadPackage(tmp_path, "linear", "under load")
        with serving(demo_folder, package, cache) as server:
            package.strike()
            done = server.http.post("/v1/completions", json={"prompt": prompt(0), "max_tokens": 4})
            assert done.status_code == 503 and "bad_linear failed while serving" in done.text
            server.wait_ready(30)
            assert_demoted(server, package, "illegal memory access", in_log="bad_linear failed while serving")
            assert server.metrics()["engine_generation"] == 2
            assert_right(server, clean)


_REPLACED = r"WARNING kernel \w+: {} failed while serving: .*illegal memory access.*; \w+ takes over"


def streamed(server: Server, package: BadPackage, fields: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """What each stream got; the fault struck when all of them had begun."""
    streams = [server.stream(prompt(number), max_tokens=NUM_TOKENS, **fields) for number in range(NUM_STREAMS)]
    for stream in streams:
        stream.read_until(b"data: ")
    package.strike()
    said = []
    for stream in streams:
        stream.read_all()
        events = stream.events()
        stream.vanish()
        assert events[-1] == "[DONE]", events[-1]
        assert len(events) > 4, "all was said before the fault"
        choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
        parts = [choice["logprobs"]["token_logprobs"] for choice in choices if choice.get("logprobs")]
        logprobs = {"token_logprobs": [value for part in parts for value in part]} if parts else None
        said.append(_said("".join(choice["text"] for choice in choices), logprobs))
    return said


class TestBoot:
    @pytest.mark.long
    def test_first_failure_in_the_warm_up(self, demo_folder: Path, tmp_path: Path, cache: Path, clean: Any) -> None:
        package = BadPackage(tmp_path, "fused_add_rms_norm", "warm-up", recorded=True)
        with serving(demo_folder, package, cache) as server:
            assert_demoted(server, package, "it does not work in warm_up", in_log="bad_fused_add_rms_norm failed")
            assert server.metrics()["engine_generation"] == 1
            assert_right(server, clean)

    @pytest.mark.parametrize("kernel", ["fused_add_rms_norm", pytest.param("rms_norm", marks=pytest.mark.long)])
    def test_first_failure_in_the_recording(
        self, demo_folder: Path, tmp_path: Path, cache: Path, clean: Any, kernel: str
    ) -> None:
        """The recording is made again, of the kernels that serve."""
        package = BadPackage(tmp_path, kernel, "capture", recorded=True)
        with serving(demo_folder, package, cache) as server:
            assert_demoted(server, package, "it does not work in _capture", in_log=f"bad_{kernel} failed")
            assert server.printed("^graphs = one recording of")
            assert_right(server, clean)


@pytest.mark.long
def test_a_start_that_is_ended_shows_nothing_against_a_kernel(demo_folder: Path, tmp_path: Path, cache: Path) -> None:
    """Whoever loses patience with a compiler twice would else never see the kernel again."""
    package = BadPackage(tmp_path, "rms_norm", "slow")
    verdicts = cache / "kernel-verdicts.json"

    def is_tried() -> bool:
        return verdicts.exists() and "trying" in verdicts.read_text()

    for _ in range(2):
        with serving(demo_folder, package, cache, wait=False) as server:
            server.until(is_tried, 30, "the kernel is loaded")
            assert server.stop(20) == 0
        assert not is_tried()


class TestPins:
    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            ("compile", "ptxas fatal"),
            ("wrong", "disagrees with its reference"),
            pytest.param("warm-up", "it does not work in warm_up", marks=pytest.mark.long),
            pytest.param("capture", "it does not work in _capture", marks=pytest.mark.long),
        ],
    )
    def test_one_that_fails_is_refused_at_start(
        self, demo_folder: Path, tmp_path: Path, cache: Path, fault: str, reason: str
    ) -> None:
        package = BadPackage(tmp_path, "fused_add_rms_norm", fault, recorded=True)
        pin = ("--kernel", f"fused_add_rms_norm={package.implementation}")
        with serving(demo_folder, package, cache, *pin, wait=False) as server:
            assert server.ended(60) not in (0, -9)
            last = server.lines[-1]
            assert "--kernel fused_add_rms_norm=bad_fused_add_rms_norm failed" in last and reason in last
            assert last.endswith("drop the pin")
            assert not server.printed("restart 1 of")

    def test_under_load_its_step_fails_and_the_server_goes_on(
        self, demo_folder: Path, tmp_path: Path, cache: Path, clean: Any
    ) -> None:
        package = BadPackage(tmp_path, "token_logprobs", "under load")
        pin = ("--kernel", f"token_logprobs={package.implementation}")
        with serving(demo_folder, package, cache, *pin) as server:
            worker = server.pids("worker")
            package.strike()
            done = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, **LOGPROBS})
            assert done.status_code == 500
            assert "--kernel token_logprobs=bad_token_logprobs failed" in done.text and "drop the pin" in done.text
            assert_right(server, clean)
            assert server.pids("worker") == worker
            server.assert_idle()

    def test_forbidden_is_not_even_loaded(self, demo_folder: Path, tmp_path: Path, cache: Path, clean: Any) -> None:
        package = BadPackage(tmp_path, "rms_norm", "crash in load")
        with serving(demo_folder, package, cache, "--without-kernel", "bad_rms_norm") as server:
            entry = kernel_of(server, "rms_norm")
            assert entry["rejected"] == {"bad_rms_norm": "forbidden by --without-kernel"} and not entry["demoted"]
            assert server.metrics()["engine_generation"] == 1
            assert_right(server, clean)


@pytest.mark.long
def test_two_servers_with_one_cache(demo_folder: Path, tmp_path: Path, cache: Path, clean: Any) -> None:
    """What one of them learns under load stays known, whatever the other writes; the file stays whole."""
    package = BadPackage(tmp_path, "apply_penalties", "under load")
    with serving(demo_folder, package, cache) as first, serving(demo_folder, package, cache) as second:
        package.strike()
        assert answer(first, 0, PENALISED) == clean[1]["penalised"][0]
        second.kill("worker")
        second.until(lambda: second.printed("restart 1 of 5"), 10, "a restart")
        second.wait_ready(30)
        assert_demoted(second, package, "failed while serving", in_log="not bad_apply_penalties: failed while serving")
    verdicts = json.loads((cache / "kernel-verdicts.json").read_text())
    (verdict,) = [text for key, text in verdicts.items() if key.startswith("bad_apply_penalties")]
    assert "illegal memory access" in verdict
    assert sum(text == "agrees" for text in verdicts.values()) >= 6


def test_demoted_over_restarts_until_the_code_changes(
    demo_folder: Path, tmp_path: Path, cache: Path, clean: Any
) -> None:
    """A worker that starts again detects anew; a demotion lasts as long as what it was found with."""
    package = BadPackage(tmp_path, "rms_norm", "wrong")
    with nothing_left(
        Server(demo_folder, *SIZES, "--cache-dir", str(cache), script=None, environment=package.environment)
    ) as server:
        assert_demoted(server, package, "disagrees with its reference")
        detections = _detections(server)
        server.kill("worker")
        server.until(lambda: server.printed("restart 1 of 5"), 10, "a restart")
        server.wait_ready(30)
        assert _detections(server) == 2 * detections > 0
        assert_demoted(server, package, "disagrees with its reference")
        server.kill("core")
        server.until(lambda: server.printed("core was killed"), 10, "the core's end")
        server.wait_ready(30)
        assert_demoted(server, package, "disagrees with its reference")
    with serving(demo_folder, package, cache) as server:
        assert_demoted(server, package, "disagrees with its reference")
    assert checked(package, cache) == ("demoted", 1)
    package.write("none")  # a new version of the package, which is right
    assert checked(package, cache) == ("agrees", 0)
    with serving(demo_folder, package, cache) as server:
        assert kernel_of(server, "rms_norm")["chosen"] == "bad_rms_norm"
        assert_right(server, clean)


def checked(package: BadPackage, cache: Path) -> tuple[str, int]:
    """What `trimaran kernels check` says of it, and its exit status."""
    command = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands", "kernels", "check"]
    done = subprocess.run(
        [*command, package.implementation, "--cache-dir", str(cache), "--json"],
        env=package.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    (seen,) = json.loads(done.stdout)
    assert ("disagrees with its reference" in seen["reason"]) is (seen["state"] == "demoted")
    return seen["state"], done.returncode


def _detections(server: Server) -> int:
    return sum("platform cpu:" in line for line in list(server.lines))
