"""Every Triton kernel in Triton's interpreter against its reference, loaded and compared by the registry itself."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from trimaran.device_workers.platforms.cpu import CpuPlatform
from trimaran.ipc.facts import Problem
from trimaran.kernels.catalog import CATALOG

from ..triton_interpreter import Interpreter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install 'trimaran[test]' on Linux"
)
TRITON = [implementation.name for implementation in CATALOG if implementation.name.startswith("triton_")]
ATTENTIONS = [name for name in TRITON if "attention" in name]
PAGED = [name for name in ATTENTIONS if "paged" in name]
BY_DTYPE = [name for name in TRITON if name not in ("triton_greedy_sample", "triton_sample", "triton_token_logprobs")]
DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (32, 40, 64, 80, 96, 112, 128, 160, 192, 256)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    child = Interpreter()
    yield child
    child.close()


def problem(dtype: str, head_dim: int, *, group: int = 3, block_size: int = 16, **more: Any) -> dict[str, Any]:
    sizes = {"head_dim": head_dim, "num_heads": 2 * group, "num_kv_heads": 2, "block_size": block_size}
    others = {"hidden_size": 200, "intermediate_size": 136, "vocab_size": 777}
    return {"dtype": dtype, "kv_dtype": dtype, **sizes, **others, **more}


@pytest.mark.user_pain("D5")
@pytest.mark.parametrize("name", TRITON)
def test_agrees_with_its_reference(name: str, interpreter: Interpreter) -> None:
    """In each dtype, where it has several; a head size of 80 is no power of two, and has a window in the trials."""
    for dtype in DTYPES if name in BY_DTYPE else ("float32",):
        assert interpreter.verdict(name, problem(dtype, 80)) == "", dtype


@pytest.mark.user_pain("D5")
@pytest.mark.parametrize(
    "head_dim", [size if size in (80, 128) else pytest.param(size, marks=pytest.mark.long) for size in HEAD_DIMS]
)
def test_head_sizes(head_dim: int, interpreter: Interpreter) -> None:
    for name in (*ATTENTIONS, "triton_rotary_and_kv_write"):
        dtype = "float32" if head_dim <= 128 or name != "triton_decode_attention" else "float16"  # heads of 512 bytes
        assert interpreter.verdict(name, problem(dtype, head_dim, group=1)) == "", name


@pytest.mark.parametrize("name", ATTENTIONS)
def test_block_sizes_and_groups(name: str, interpreter: Interpreter) -> None:
    sizes = (16, 32, 64, 128) if name.endswith("bulk") else (8, 16, 32, 64, 128)
    for block_size, group in zip(sizes, (1, 2, 7, 8, 20), strict=False):
        assert interpreter.verdict(name, problem("float16", 64, group=group, block_size=block_size)) == "", block_size


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("name", PAGED)
def test_long_contexts(name: str, window: int, interpreter: Interpreter) -> None:
    assert interpreter.check("long_contexts", name, window) == ""


def test_a_part_of_the_head_rotates(interpreter: Interpreter) -> None:
    for name in ("triton_rotary_and_kv_write", "triton_decode_attention"):
        assert interpreter.verdict(name, problem("bfloat16", 80, rotary_dim=32)) == "", name


@pytest.mark.parametrize(
    "check",
    [
        "draws",
        pytest.param("sampled_rows", marks=pytest.mark.long),
        pytest.param("drawn_in_parts", marks=pytest.mark.long),
        "greedy_rows",
        "ranks_and_tops",
        "every_bfloat16",
        "wide_rows",
        "linears",
        "fused_linears",
        "decode_attentions",
    ],
)
def test_exactness(check: str, interpreter: Interpreter) -> None:
    assert interpreter.check(check) == ""


def test_measured_choices_are_used_and_checked(interpreter: Interpreter) -> None:
    """A measured configuration goes over the table's; one that cannot be is a reason to take the next link."""
    small = {"paged_attention_tiled": {"decode_keys": 16, "tile_keys": 16, "tile_rows": 16}}
    assert interpreter.verdict("triton_paged_attention_tiled", problem("float32", 64), small) == ""
    wrong = {"rms_norm": {"num_warps": 3}}
    assert "capability.best.rms_norm.num_warps is 3: give a power of two" in interpreter.verdict(
        "triton_rms_norm", problem("float32", 64), wrong
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.user_pain("D5")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_combination(name: str, dtype: str, interpreter: Interpreter) -> None:
    is_narrow = name == "triton_decode_attention" and dtype == "float32"  # it takes heads of 512 bytes
    for head_dim in (size for size in HEAD_DIMS if not is_narrow or size <= 128):
        for block_size in (16, 32, 64, 128):
            for group in (1, 4):
                asked = problem(dtype, head_dim, group=group, block_size=block_size)
                assert interpreter.verdict(name, asked) == "", asked


def test_never_on_a_processor() -> None:
    for name in TRITON:
        implementation = next(implementation for implementation in CATALOG if implementation.name == name)
        profile = CpuPlatform().profile(0)
        assert implementation.misfit(profile, Problem(dtype="float32")) == "does not run on platform cpu"
