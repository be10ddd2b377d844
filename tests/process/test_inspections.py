"""`trimaran probe | doctor | kernels | diagnose` on this machine, through the real worker process.

Where a fault is injected instead of real, the test's docstring says so.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from trimaran.device_workers.inspecting.doctor import platform_verdicts
from trimaran.device_workers.inspecting.host_checks import CHECKS, Examined
from trimaran.device_workers.platforms.cpu import CpuPlatform
from trimaran.device_workers.platforms.detection import detect
from trimaran.device_workers.platforms.host import Host
from trimaran.device_workers.platforms.null import NullPlatform
from trimaran.ipc.inspection import Level, Verdict
from trimaran.tests.golden.cases import SHAPES
from trimaran.tests.surfaces.machines import Machine
from trimaran.tests.surfaces.nvml import NvmlLibrary

COMMAND = [sys.executable, "-P", "-m", "trimaran.frontend.launch.commands"]
DOCTOR_LIMIT_S = 15.0


def trimaran(*arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRIMARAN_")}
    command = [*prefix, *COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**inherited, **environment})


def judged(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    """Verdicts by check; of several the worst."""
    order = [Level.PASS, Level.WARN, Level.FAIL]
    found: dict[str, dict[str, str]] = {}
    assert done.stdout, done.stderr
    for verdict in json.loads(done.stdout)["verdicts"]:
        known = found.get(verdict["check"])
        if known is None or order.index(known["level"]) < order.index(verdict["level"]):
            found[verdict["check"]] = verdict
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all, so that the C++ kernels are built once."""
    return str(tmp_path_factory.mktemp("cache"))


class TestProbe:
    def test_every_platform_is_listed_in_order_with_its_reason(self) -> None:
        seen = json.loads(trimaran("probe", "--json").stdout)
        names = [found["platform"] for found in seen]
        assert names[:5] == ["cuda", "rocm", "xpu", "ascend", "metal"] and "cpu" in names
        for found in seen:
            assert found["refused"] or found["devices"], found
        (chosen,) = [found for found in seen if found["chosen"]]
        profile = chosen["devices"][0]
        assert profile["memory_bytes"] > 0 and profile["capability"]["architecture"]
        assert set(profile["provenance"].values()) <= {"declared", "detected", "measured"}

    def test_tables_are_plain_when_piped(self) -> None:
        done = trimaran("probe")
        assert done.returncode == 0 and "\x1b" not in done.stdout
        assert "Platforms, in order of detection" in done.stdout and "known by" in done.stdout

    def test_nothing_usable_is_exit_1(self) -> None:
        done = trimaran("probe", "--platform", "ascend")
        assert done.returncode == 1 and "no Ascend device" in done.stdout


class TestDoctor:
    def test_this_machine(self, cache: str) -> None:
        began = time.monotonic()
        done = trimaran("doctor", str(SHAPES / "qwen3-0.6b"), "--json", "--cache-dir", cache)
        assert time.monotonic() - began < DOCTOR_LIMIT_S
        found = judged(done)
        assert done.returncode in (0, 1), done.stdout
        for check in ("python", "torch", "compiler", "shared memory", "open files", "cache", "platform", "device"):
            assert check in found
        kernels = [check for check in found if check.startswith("kernel ")]
        assert len(kernels) >= 11 and all(found[check]["level"] == "pass" for check in kernels)
        assert found["model"]["level"] == "pass" and "GiB of weights" in found["model"]["text"]
        assert all(verdict["cure"] for verdict in found.values() if verdict["level"] != "pass")

    @pytest.mark.user_pain("D8")
    def test_without_a_compiler(self, tmp_path: Path) -> None:
        """Real: an empty PATH and an empty cache."""
        began = time.monotonic()
        done = trimaran("doctor", "--json", "--cache-dir", str(tmp_path), PATH=str(tmp_path))
        assert time.monotonic() - began < DOCTOR_LIMIT_S
        found = judged(done)
        assert done.returncode == 1, done.stdout
        assert found["compiler"]["level"] == "warn" and "install gcc" in found["compiler"]["cure"]
        norm = found["kernel rms_norm"]
        assert norm["level"] == "warn" and "plain_rms_norm agrees" in norm["text"] and norm["cure"] == "install g++"

    def test_tiny_shared_memory(self, cache: str) -> None:
        """Real where a mount namespace is permitted; else the size is injected into the check."""
        shell = 'mount -t tmpfs -o size=8m none /dev/shm && exec "$@"'
        prefix = ("unshare", "-Urm", "sh", "-c", shell, "sh")
        allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
        if allowed:
            began = time.monotonic()
            done = trimaran("doctor", "--json", "--cache-dir", cache, prefix=prefix)
            assert time.monotonic() - began < DOCTOR_LIMIT_S and done.returncode == 1
            verdict = judged(done)["shared memory"]
        else:
            examined = Examined(host=Host(), cache_directory=cache, size_bytes=lambda path: 8 << 20)
            verdict = _json(next(iter(CHECKS["shared memory"](examined))))
        assert verdict["level"] == "warn" and "/dev/shm has 8 MiB" in verdict["text"]
        assert "--shm-size=64m" in verdict["cure"]

    def test_shared_memory_of_several_devices_is_a_failure(self) -> None:
        """Injected size."""
        examined = Examined(host=Host(), cache_directory="/", num_ranks=2, size_bytes=lambda path: 64 << 20)
        (verdict,) = CHECKS["shared memory"](examined)
        assert verdict.level is Level.FAIL and "1024" in verdict.text and "--shm-size=1024m" in verdict.cure

    @pytest.mark.user_pain("D6")
    def test_an_old_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Injected: a simulated CUDA machine whose driver says 470."""
        machine = Machine("cuda", tmp_path)
        machine.libraries["libnvidia-ml.so.1"] = NvmlLibrary("470.256.02", machine.boards)
        machine.state.available = False  # as torch.cuda is with such a driver
        verdict = self._refused(machine, monkeypatch)
        assert verdict.level is Level.FAIL and "470.256.02" in verdict.text and "525.60.13" in verdict.text
        assert verdict.cure

    @pytest.mark.user_pain("D4")
    def test_an_unsupported_architecture(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Injected: a simulated CUDA machine whose torch has no code for its device."""
        machine = Machine("cuda", tmp_path)
        machine.architectures[:] = ["sm_50", "sm_60"]
        verdict = self._refused(machine, monkeypatch)
        assert verdict.level is Level.FAIL and "sm_90" in verdict.text and "sm_60" in verdict.text
        assert verdict.cure

    def _refused(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Verdict:
        began = time.monotonic()
        detection = detect(candidates=(machine.install(monkeypatch), CpuPlatform(), NullPlatform()))
        verdicts = {found.check: found for found in platform_verdicts(detection)}
        assert time.monotonic() - began < DOCTOR_LIMIT_S
        assert verdicts["platform"].level is Level.PASS and "cpu" in verdicts["platform"].text
        return verdicts["platform cuda"]

    def test_a_device_file_of_another_architecture(self, cache: str) -> None:
        """Real."""
        began = time.monotonic()
        done = trimaran("doctor", "--json", "--cache-dir", cache, "--device-config", "hopper:H200")
        assert time.monotonic() - began < DOCTOR_LIMIT_S and done.returncode == 2
        verdict = judged(done)["device"]
        assert verdict["level"] == "fail" and "sm_90" in verdict["text"] and "--allow-mismatch" in verdict["cure"]

    def test_a_model_that_does_not_fit(self, cache: str) -> None:
        options = ("--max-model-len", "131072", "--memory-utilization", "0.01")
        done = trimaran("doctor", str(SHAPES / "llama-3.1-8b"), "--json", "--cache-dir", cache, *options)
        verdict = judged(done)["model"]
        assert done.returncode == 2 and verdict["level"] == "fail"
        assert "the weights need 15.03 GiB" in verdict["text"] and verdict["cure"]

    def test_the_text_ends_with_a_summary(self, cache: str) -> None:
        done = trimaran("doctor", "--cache-dir", cache)
        assert "passed" in done.stdout.strip().splitlines()[-1] and "verdict" in done.stdout


def _json(verdict: Verdict) -> dict[str, str]:
    return {"level": verdict.level, "text": verdict.text, "cure": verdict.cure}


def checked(name: str, host: Host | None = None, **facts: Any) -> list[Verdict]:
    examined = Examined(host=host or Host(), cache_directory=facts.pop("cache_directory", "/tmp"), **facts)
    return list(CHECKS[name](examined))


class TestHostChecks:
    """Injected facts throughout: other machines than this one."""

    def test_python_and_libraries(self) -> None:
        assert checked("python", python=(3, 9))[0].level is Level.FAIL
        assert checked("python", python=(3, 14))[0].level is Level.FAIL
        old = Host(package_version=lambda name: "2.5.1" if name == "torch" else None)
        (verdict,) = checked("libraries", old)
        assert verdict.level is Level.FAIL and "2.5.1" in verdict.text and 'pip install "torch>=2.11"' in verdict.cure
        no_triton = Host(package_version=lambda name: "2.13.0" if name == "torch" else None)
        assert [found.level for found in checked("libraries", no_triton, needs_triton=True)] == [Level.PASS, Level.WARN]

    def test_old_c_library(self) -> None:
        (verdict,) = checked("libc", libc="glibc 2.17")
        assert verdict.level is Level.FAIL and "2.28" in verdict.text and verdict.cure

    @pytest.mark.user_pain("D8")
    def test_headers_are_needed_where_triton_is(self, tmp_path: Path) -> None:
        verdicts = checked("compiler", needs_triton=True, headers=str(tmp_path))
        assert [found.level for found in verdicts] == [Level.PASS, Level.WARN]
        assert "Python.h" in verdicts[1].text and "python3-dev" in verdicts[1].cure
        assert len(checked("compiler", needs_triton=False, headers=str(tmp_path))) == 1

    def test_mixed_compilers(self, tmp_path: Path) -> None:
        for folder, names in (("conda", ("gcc",)), ("system", ("gcc", "g++"))):
            (tmp_path / folder).mkdir()
            for name in names:
                (tmp_path / folder / name).write_text("#!/bin/sh\n")
                (tmp_path / folder / name).chmod(0o755)
        path = (str(tmp_path / "conda"), str(tmp_path / "system"))

        def version(name: str) -> str:
            return "9.4.0" if "conda" in name else "12.2.0"

        (verdict,) = checked("mixed compilers", path=path, compiler_version=version)
        assert verdict.level is Level.WARN and "9.4.0" in verdict.text and "conda deactivate" in verdict.cure
        (verdict,) = checked("mixed compilers", path=path[::-1], compiler_version=version)
        assert verdict.level is Level.PASS

    def test_wsl(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "version").write_text("Linux version 6.6 microsoft-standard-WSL2")
        (verdict,) = checked("wsl", Host(root=tmp_path))
        assert verdict.level is Level.WARN and "wsl --update" in verdict.cure
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / "dxg").touch()
        (verdict,) = checked("wsl", Host(root=tmp_path))
        assert verdict.level is Level.PASS
        assert checked("wsl") == [] or "microsoft" in Path("/proc/version").read_text().lower()

    def test_device_nodes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        card = tmp_path / "sys/class/drm/card0/device"
        card.mkdir(parents=True)
        (card / "vendor").write_text("0x1002\n")
        (verdict,) = checked("nodes", Host(root=tmp_path))
        assert (
            verdict.level is Level.WARN
            and "/dev/kfd is missing" in verdict.text
            and "--device /dev/kfd" in verdict.cure
        )
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / "kfd").touch()
        assert [found.level for found in checked("nodes", Host(root=tmp_path))] == [Level.PASS]
        monkeypatch.setattr(Host, "may_use", lambda host, name: False)
        (verdict,) = checked("nodes", Host(root=tmp_path))
        assert verdict.level is Level.FAIL and "usermod -aG render,video" in verdict.cure
        (card / "vendor").write_text("0x10de\n")
        verdicts = checked("nodes", Host(root=tmp_path))
        assert any("/dev/nvidiactl is missing" in found.text for found in verdicts)

    def test_open_files(self) -> None:
        (verdict,) = checked("open files", open_files=(1024, 1 << 20))
        assert verdict.level is Level.WARN and "ulimit -n 4096" in verdict.cure
        (verdict,) = checked("open files", open_files=(256, 1024))
        assert "hard limit of 1024" in verdict.cure

    def test_cache(self, tmp_path: Path) -> None:
        (verdict,) = checked("cache", cache_directory=str(tmp_path), free_bytes=lambda path: 1 << 20)
        assert verdict.level is Level.WARN and "--cache-dir" in verdict.cure
        (verdict,) = checked("cache", cache_directory="/dev/null/cache")
        assert verdict.level is Level.WARN and "cannot be written" in verdict.text


class TestKernels:
    def test_list_says_why_not(self) -> None:
        seen = json.loads(trimaran("kernels", "list", "--json").stdout)
        by_name = {found["implementation"]: found for found in seen}
        assert by_name["plain_rms_norm"]["state"] in ("chosen", "fits")
        assert by_name["triton_rms_norm"]["state"] == "does not fit" and by_name["triton_rms_norm"]["reason"]
        assert sum(found["state"] == "chosen" for found in seen) == len({found["kernel"] for found in seen})

    def test_matrix_has_no_empty_cell(self) -> None:
        seen = json.loads(trimaran("kernels", "matrix", "--json").stdout)
        devices, kernels = ({found[key] for found in seen} for key in ("device", "kernel"))
        assert len(devices) >= 20 and len(seen) == len(devices) * len(kernels)
        attention = {found["device"]: found["implementation"] for found in seen if found["kernel"] == "paged_attention"}
        assert attention["hopper"] != attention["gfx90a"] != attention["apple_m"]

    def test_check_runs_what_fits(self, cache: str) -> None:
        done = trimaran("kernels", "check", "rms_norm", "cpp_embed", "--json", "--cache-dir", cache)
        seen = {found["implementation"]: found["state"] for found in json.loads(done.stdout)}
        assert done.returncode == 0
        assert seen["plain_rms_norm"] == "agrees" and seen["cpp_embed"] == "agrees"
        assert seen["triton_rms_norm"] == "does not fit" and "plain_embed" not in seen

    def test_mistakes(self) -> None:
        done = trimaran("kernels", "lost")
        assert done.returncode == 2 and "no task lost; name list, matrix or check" in done.stderr
        done = trimaran("kernels", "check", "no_such_kernel")
        assert done.returncode == 2 and "see `trimaran kernels list`" in done.stderr
        done = trimaran("kernels", "list", "--without-kernel", "nothing")
        assert done.returncode == 2 and "no such implementation" in done.stderr


class TestDiagnose:
    def test_a_file_that_is_accepted_and_counts(self, tmp_path: Path, cache: str) -> None:
        output = tmp_path / "this.yaml"
        tests = ("--test", "memory,bandwidth,launch,graph,copies,priorities,blocks")
        done = trimaran("diagnose", *tests, "--output", str(output), "--cache-dir", cache)
        assert done.returncode == 0, done.stderr
        assert "100 %" in done.stderr and "not measured" in done.stdout
        content = yaml.safe_load(output.read_text())
        assert content["bandwidth"]["source"] == "measured" and content["bandwidth"]["value"] > 0.5
        assert content["graph_launch_us"]["value"] < content["launch_latency_us"]["value"]
        plan = json.loads(
            trimaran("explain", str(SHAPES / "qwen3-0.6b"), "--device-config", str(output), "--json").stdout
        )
        profile = plan["devices"][0]
        assert profile["bandwidth"] == content["bandwidth"]["value"]
        assert profile["provenance"]["bandwidth"] == "measured"
        assert profile["capability"]["concurrent_blocks"] >= 1
        seen = json.loads(trimaran("probe", "--json", "--device-config", str(output)).stdout)
        chosen = next(found for found in seen if found["chosen"])
        assert chosen["devices"][0]["provenance"]["bandwidth"] == "measured"

    def test_matrix_rates(self, tmp_path: Path) -> None:
        output = tmp_path / "rates.yaml"
        done = trimaran("diagnose", "--test", "matrix", "--output", str(output))
        assert done.returncode == 0, done.stderr
        rates = yaml.safe_load(output.read_text())["rates"]
        assert {"float32", "bfloat16"} <= set(rates) and all(rate["value"] > 0 for rate in rates.values())

    def test_mistakes_are_found_before_minutes_of_measuring(self, tmp_path: Path) -> None:
        done = trimaran("diagnose", "--test", "speed")
        assert done.returncode == 2 and "take memory, bandwidth" in done.stderr
        done = trimaran("diagnose", "--output", str(tmp_path / "no" / "where.yaml"))
        assert done.returncode == 2 and "--output" in done.stderr
        done = trimaran("diagnose", "--platform", "null")
        assert done.returncode == 2 and "computes nothing" in done.stderr
