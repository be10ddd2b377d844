"""`trimaran explain`: reasoned plans for devices that are not here, from the real processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trimaran.tests.golden.cases import CASES, GOLDEN, MODELS, SHAPES, explained, text_of


@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_explanations_are_as_reviewed(model: str, device: str) -> None:
    """After a change that is meant: python tests/golden/cases.py, and read what changed."""
    assert text_of(model, CASES[device]) == (GOLDEN / f"{model}-{device}.txt").read_text()


def test_the_plans_differ_where_devices_do() -> None:
    """Over all files: at least four strategies and orderings, different sizes, and a reason for every decision."""
    plans = {}
    for name, device in CASES.items():
        done = explained("qwen3-0.6b", device, "--json")
        assert done.returncode == 0, done.stderr
        plans[name] = json.loads(done.stdout)
    values = {
        name: {decision["name"]: decision["value"] for decision in plan["decisions"]} for name, plan in plans.items()
    }
    assert all(decision["reason"] for plan in plans.values() for decision in plan["decisions"])
    assert len({found["attention_strategy"] for found in values.values()}) >= 3
    assert len({found["queue_ordering"] for found in values.values()}) == 3
    assert len({found["num_blocks"] for found in values.values()}) >= 8
    for plan in plans.values():
        cache = plan["memory"]["kv_cache"]
        assert sum(plan["memory"].values()) <= plan["devices"][0]["memory_bytes"] and cache > 0


def test_it_takes_less_than_two_seconds() -> None:
    took = []
    for _ in range(3):
        began = time.monotonic()
        assert explained("llama-3.1-8b", "hopper:H200").returncode == 0
        took.append(time.monotonic() - began)
    assert min(took) < 2.0, took


@pytest.mark.user_pain("M1")
def test_a_context_that_cannot_fit_names_the_largest_and_that_works() -> None:
    refused = explained("llama-3.1-8b", "ada", "--max-model-len", "131072")
    assert refused.returncode == 2
    text = refused.stderr
    assert "GiB" in text and "available" in text and "start with --max-model-len" in text
    largest = text.split("start with --max-model-len ")[1].split()[0].rstrip(",;")
    again = explained("llama-3.1-8b", "ada", "--max-model-len", largest, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["limits"]["max_model_len"] == int(largest)
    automatic = json.loads(explained("llama-3.1-8b", "ada", "--json").stdout)
    assert "the KV cache holds" in _reason(automatic, "max_model_len")


def _reason(plan: dict[str, Any], name: str) -> str:
    return str(next(found["reason"] for found in plan["decisions"] if found["name"] == name))


def test_what_is_pinned_and_forbidden_shows() -> None:
    pinned = json.loads(explained("qwen3-0.6b", "hopper:H200", "--kernel", "rms_norm=plain_rms_norm", "--json").stdout)
    norm = next(found for found in pinned["kernels"] if found["kernel"] == "rms_norm")
    assert norm["chosen"] == "plain_rms_norm" and norm["pinned"]
    without = json.loads(explained("qwen3-0.6b", "hopper:H200", "--without-kernel", "triton_rms_norm", "--json").stdout)
    norm = next(found for found in without["kernels"] if found["kernel"] == "rms_norm")
    assert norm["rejected"]["triton_rms_norm"] == "forbidden by --without-kernel"
    misfit = explained("qwen3-0.6b", "hopper:H200", "--kernel", "rms_norm=cpp_rms_norm")
    assert misfit.returncode == 2 and "does not fit: needs platform cpu" in misfit.stderr


def test_neither_torch_nor_weights_are_touched(tmp_path: Path) -> None:
    """With a torch that cannot be imported, and a folder that holds nothing but config.json."""
    (tmp_path / "torch.py").write_text("raise ImportError('explain imported torch')")
    (tmp_path / "triton.py").write_text("raise ImportError('explain imported triton')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "trimaran.frontend.launch.commands", "explain", str(SHAPES / "llama-3.1-8b")]
    done = subprocess.run(
        [*command, "--device-config", "gfx942", "--cache-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "AMD Instinct" in done.stdout


def test_an_invented_architecture_is_one_file(tmp_path: Path) -> None:
    """The next architecture: a capability file, and every choice follows from it."""
    (tmp_path / "next.yaml").write_text(
        "schema: 1\narchitecture: sm_130\ntitle: Next\nplatform: cuda\nvendor: NVIDIA\n"
        "documents:\n  guide: {title: Guide, section: all, address: 'https://example.com'}\n"
        "warp_width: [32, guide]\nshared_memory_per_block_bytes: [300 KiB, guide]\n"
        "features: {triton: guide, bf16: guide, fp16: guide, bulk_tensor_copy: guide, graph_capture: guide}\n"
        "compute_capability: ['13.0', guide]\n"
        "products:\n  - name: X1\n    device_names: [X1]\n    memory_bytes: [200 GiB, guide]\n"
        "    bandwidth: [10000, guide]\n    num_multiprocessors: [200, guide]\n    rates: {bfloat16: [3000, guide]}\n"
    )
    plan = json.loads(explained("llama-3.1-8b", str(tmp_path / "next.yaml"), "--json").stdout)
    chosen = {found["kernel"]: found["chosen"] for found in plan["kernels"]}
    assert chosen["paged_attention"] == "cudnn_paged_attention_bulk" and chosen["rms_norm"] == "triton_rms_norm"
    assert plan["devices"][0]["capability"]["architecture"] == "sm_130"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--device-config", "hoper"), "did you mean 'hopper'"),
        (("--device-config", "hopper:H900"), "H200"),
        (("--block-size", "7"), "choose 8, 16, 32, 64 or 128"),
        (("--dtype", "int3"), "bfloat16"),
    ],
)
def test_refusals_end_with_the_cure(arguments: tuple[str, ...], expected: str) -> None:
    done = explained("qwen3-0.6b", "hopper:H200", *arguments) if arguments[0] != "--device-config" else None
    if done is None:
        done = explained("qwen3-0.6b", arguments[1])
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


def test_bulk_copies_are_not_planned_where_no_kernel_makes_them() -> None:
    """sm_120 has the hardware, and the kernel is not offered there."""
    plan = json.loads(explained("qwen3-0.6b", "blackwell_sm120", "--json").stdout)
    chosen = {found["name"]: found["value"] for found in plan["decisions"]}
    attention = next(found for found in plan["kernels"] if found["kernel"] == "paged_attention")
    assert chosen["attention_strategy"] == "tiled" and chosen["block_size"] == "16"
    assert attention["chosen"] == "cudnn_paged_attention_tiled"
    assert "not offered on sm_120" in _reason(plan, "attention_strategy")


def test_ranks_that_share_a_processor_share_its_memory() -> None:
    """Two ranks on one processor have half of its memory each: what fits one does not fit twice."""
    alone = json.loads(explained("llama-3.1-8b", "./amx_server.yaml", "--json").stdout)
    both = json.loads(explained("llama-3.1-8b", "./amx_server.yaml", "--tensor-parallel", "2", "--json").stdout)
    assert 2 * both["memory"]["kv_cache"] <= alone["memory"]["kv_cache"]
    total = alone["devices"][0]["memory_bytes"]
    assert 2 * sum(both["memory"].values()) <= 0.9 * total
    tight = explained("llama-3.1-8b", "./amx_server.yaml", "--tensor-parallel", "2", "--memory-utilization", "0.2")
    assert tight.returncode == 2 and "the weights need 7.5" in tight.stderr and "6.40 GiB are available" in tight.stderr
