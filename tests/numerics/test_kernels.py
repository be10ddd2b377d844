"""Every implementation of every kernel against its reference, over dtypes and head sizes; and what the references
mean.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from trimaran.device_workers.platforms.cpu import CpuPlatform
from trimaran.ipc.facts import Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import Implementation, Kernel, Services
from trimaran.kernels.reference.attention import paged_attention
from trimaran.kernels.reference.philox import philox, random_words
from trimaran.kernels.reference.quantize_fp8 import quantize_fp8
from trimaran.kernels.reference.sample import INVALID_TOKEN, gumbel, sample
from trimaran.kernels.registry import Registry
from trimaran.kernels.verification import compare

PROFILE = CpuPlatform().profile(0)
PLAIN = Registry(CATALOG)
HEAD_DIMS = (32, 40, 64, 80, 96, 112, 128, 160, 192, 256)
CHALLENGERS = [
    implementation
    for implementation in CATALOG
    if implementation is not PLAIN.chain(implementation.kernel)[-1]
    and PROFILE.platform not in implementation.metadata.not_platforms
]


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    return Services(num_threads=2, cache_dir=tmp_path_factory.mktemp("kernels"))


def make_problem(dtype: str, head_dim: int, *, group: int = 3, block_size: int = 16) -> Problem:
    return Problem(
        dtype=dtype,
        kv_dtype=dtype,
        head_dim=head_dim,
        num_heads=2 * group,
        num_kv_heads=2,
        block_size=block_size,
        hidden_size=2 * group * head_dim,
        intermediate_size=200,
        vocab_size=777,
    )


def loaded(implementation: Implementation, problem: Problem, services: Services) -> Kernel:
    assert implementation.misfit(PROFILE, problem) is None
    return implementation.load(PROFILE, problem, services)


def assert_agrees(implementation: Implementation, problem: Problem, services: Services) -> None:
    reference = PLAIN.chain(implementation.kernel)[-1].load(PROFILE, problem, services)
    assert compare(implementation.kernel, loaded(implementation, problem, services), reference, problem) is None


@pytest.mark.user_pain("D5")
@pytest.mark.parametrize("implementation", CHALLENGERS, ids=lambda implementation: implementation.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_agrees_with_its_reference(implementation: Implementation, dtype: str, services: Services) -> None:
    for head_dim in HEAD_DIMS:
        assert_agrees(implementation, make_problem(dtype, head_dim), services)


@pytest.mark.parametrize("name", ["cpp_paged_attention", "gathered_attention"])
@pytest.mark.parametrize("group", [1, 2, 7, 16])
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_attention_over_groups_and_block_sizes(name: str, group: int, block_size: int, services: Services) -> None:
    implementation = next(implementation for implementation in CATALOG if implementation.name == name)
    for head_dim in (40, 64):
        assert_agrees(implementation, make_problem("float32", head_dim, group=group, block_size=block_size), services)


@pytest.mark.parametrize("lengths", [(700,), (1, 256, 257, 513), (300,) * 9, (900, 40)], ids=str)
@pytest.mark.parametrize("window", [0, 400])
def test_long_sequences_are_seen_in_parts(lengths: tuple[int, ...], window: int, services: Services) -> None:
    """Over threads where few sequences run, one after another where many do: equal to the bit, and to the reference."""
    problem, num_heads, num_groups, head_dim, size = make_problem("float32", 40), 6, 2, 40, 16
    implementation = next(implementation for implementation in CATALOG if implementation.name == "cpp_paged_attention")
    generator = torch.Generator().manual_seed(len(lengths))
    width = -(-max(lengths) // size)
    num_blocks = width * len(lengths)
    tables = torch.randperm(num_blocks, generator=generator).to(torch.int32).view(len(lengths), width)
    keys, values = (torch.randn(num_blocks, size, num_groups, head_dim, generator=generator) for _ in range(2))
    q = torch.randn(len(lengths), num_heads, head_dim, generator=generator)
    rows = torch.arange(len(lengths), dtype=torch.int32)
    starts, ends = torch.arange(len(lengths) + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    alone = Services(num_threads=1, cache_dir=services.cache_dir)
    crowd = Services(num_threads=4, cache_dir=services.cache_dir)
    reference = PLAIN.chain("paged_attention")[-1].load(PROFILE, problem, services)
    kernels = [loaded(implementation, problem, chosen) for chosen in (services, crowd, alone)] + [reference]
    outs = [torch.empty_like(q) for _ in kernels]
    for kernel, out in zip(kernels, outs, strict=True):
        for _ in range(3):
            kernel(out, q, keys, values, tables, rows, starts, ends, head_dim**-0.5, window)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[2])
    torch.testing.assert_close(outs[0], outs[3], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 7, 11, 12, 13, 31, 97, 200])
def test_linear_over_batch_sizes(dtype: torch.dtype, num_tokens: int, services: Services) -> None:
    """Sizes that leave remainders in every direction, rows that are not side by side, a wider output."""
    implementation = next(implementation for implementation in CATALOG if implementation.name == "cpp_linear")
    kernel = loaded(implementation, make_problem("float32", 64), services)
    generator = torch.Generator().manual_seed(num_tokens)
    wide = torch.randn(num_tokens, 300, generator=generator).to(dtype)
    x = wide[:, 20:270]
    weight = (torch.randn(83, 250, generator=generator) / 16).to(dtype)
    out = torch.empty(num_tokens, 83)
    kernel(out, x, kernel.pack(weight, None))  # type: ignore[attr-defined]
    torch.testing.assert_close(out, x.float() @ weight.float().T, rtol=0, atol=5e-5)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 12, 40])
def test_linear_keeps_widened_weights_narrow(num_tokens: int, services: Services) -> None:
    """Float32 weights that are exact in bfloat16 take half the memory and give what float32 ones give."""
    implementation = next(implementation for implementation in CATALOG if implementation.name == "cpp_linear")
    kernel = loaded(implementation, make_problem("float32", 64), services)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 250, generator=generator)
    weight = (torch.randn(83, 250, generator=generator) / 16).bfloat16().float()
    packed = kernel.pack(weight, torch.ones(83))  # type: ignore[attr-defined]
    assert packed.dtype is torch.bfloat16
    assert packed.num_bytes == 96 * 250 * 2 + 83 * 4
    out = torch.empty(num_tokens, 83)
    kernel(out, x, packed)
    torch.testing.assert_close(out, x @ weight.T + 1, rtol=0, atol=5e-6)
    weight[7, 9] += 1e-6
    assert kernel.pack(weight, None).dtype is torch.float32  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_reference(dtype: torch.dtype) -> None:
    """Dynamic scales use the whole range of a row; a static one cuts what is beyond it."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[2] *= 1000
    out, scales = torch.empty(5, 64, dtype=torch.float8_e4m3fn), torch.empty(5)
    quantize_fp8(out, scales, x, False)
    assert torch.equal(out.float().abs().amax(1), torch.full((5,), 448.0))
    torch.testing.assert_close(out.float() * scales.unsqueeze(1), x.float(), rtol=0.07, atol=float(scales[2]) / 448)
    quantize_fp8(out, torch.ones(1), x, True)
    assert float(out[2].float().abs().max()) == 448.0
    torch.testing.assert_close(out[:2].float(), x[:2].float(), rtol=0.07, atol=2.0**-9)


def test_philox_known_answers() -> None:
    """Known answers of Random123's own test vectors for philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    cases = [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, expected in cases:
        assert philox(torch.tensor([counter]), torch.tensor([key])).tolist() == [expected]


def parameters(num_rows: int, **changes: torch.Tensor) -> list[torch.Tensor]:
    values = {
        "temperature": torch.ones(num_rows),
        "top_k": torch.zeros(num_rows, dtype=torch.int32),
        "top_p": torch.ones(num_rows),
        "min_p": torch.zeros(num_rows),
        "seeds": torch.arange(num_rows),
        "choices": torch.zeros(num_rows, dtype=torch.int32),
        "positions": torch.zeros(num_rows, dtype=torch.int32),
    }
    return list((values | changes).values())


@pytest.mark.parametrize("name", ["cpp_sample", "plain_sample"])
def test_draws_follow_the_distribution(name: str, services: Services) -> None:
    implementation = next(implementation for implementation in CATALOG if implementation.name == name)
    kernel = loaded(implementation, make_problem("float32", 64), services)
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    num_rows = 4000
    logits = probabilities.log().repeat(num_rows, 1)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    kernel(tokens, logits, *parameters(num_rows), 4)
    shares = torch.bincount(tokens, minlength=4) / num_rows
    assert torch.allclose(shares, probabilities, atol=0.03)
    kernel(tokens, logits, *parameters(num_rows, top_p=torch.full((num_rows,), 0.7)), 4)
    assert set(tokens.tolist()) == {0, 1}
    kernel(tokens, logits, *parameters(num_rows, top_k=torch.full((num_rows,), 3, dtype=torch.int32)), 4)
    assert set(tokens.tolist()) == {0, 1, 2}
    kernel(tokens, logits, *parameters(num_rows, min_p=torch.full((num_rows,), 0.2)), 4)
    assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "num_draws"),
    [pytest.param("cpp_sample", 60_000, marks=pytest.mark.long), ("cpp_sample", 6000), ("plain_sample", 6000)],
)
def test_many_draws_pass_a_chi_square_test(name: str, num_draws: int, services: Services) -> None:
    """Sixteen classes of unlike probability, strewn over more entries than a group of counters has."""
    implementation = next(implementation for implementation in CATALOG if implementation.name == name)
    kernel = loaded(implementation, make_problem("float32", 64), services)
    weights = torch.linspace(-3, 2, 16).exp()
    class_of = torch.arange(4200) % 16
    logits = weights.log()[class_of].expand(num_draws, -1) * 1.7
    tokens = torch.empty(num_draws, dtype=torch.int64)
    temperature = torch.full((num_draws,), 1.7)
    kernel(tokens, logits, *parameters(num_draws, temperature=temperature), 4200)
    shares = torch.zeros(16).index_add_(0, class_of, weights[class_of])
    expected = shares / shares.sum() * num_draws
    found = torch.bincount(class_of[tokens], minlength=16)
    assert float(((found - expected) ** 2 / expected).sum()) < 30.6  # 1 percent at 15 degrees of freedom
    assert len(tokens.unique()) > min(1500, num_draws // 4)


def test_both_ways_draw_the_same(services: Services) -> None:
    """C++ and the reference, on rows of all kinds, with ties at the edges of top-k and top-p."""
    implementation = next(implementation for implementation in CATALOG if implementation.name == "cpp_sample")
    kernel = loaded(implementation, make_problem("float32", 64), services)
    generator = torch.Generator().manual_seed(8)
    num_rows, vocab_size = 240, 9001

    def of(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (num_rows,), generator=generator)]

    logits = torch.randn(num_rows, vocab_size + 7, generator=generator) * of(0.1, 1.0, 4.0, 12.0).unsqueeze(1)
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[1::5] *= -1
    logits[2::7, :8000] = float("-inf")
    logits[5] = 3e38
    changes = {
        "temperature": of(1.0, 0.7, 1.9, 0.0, 0.01, 1e-4),
        "top_k": of(0, 0, 1, 3, 50, 9000, 20000).int(),
        "top_p": of(1.0, 1.0, 0.95, 0.5, 0.0, 0.999),
        "min_p": of(0.0, 0.0, 0.05, 0.7, 1.0),
        "seeds": torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        "choices": torch.arange(num_rows, dtype=torch.int32),
        "positions": torch.arange(num_rows, dtype=torch.int32) * 77,
    }
    changes["temperature"][5] = 0.5
    expected, tokens = (torch.empty(num_rows, dtype=torch.int64) for _ in range(2))
    sample(expected, logits, *parameters(num_rows, **changes), vocab_size)
    kernel(tokens, logits, *parameters(num_rows, **changes), vocab_size)
    assert tokens.tolist() == expected.tolist()
    assert tokens[5] == INVALID_TOKEN and len(tokens.unique()) > 100


def test_a_filter_that_keeps_the_token_does_not_change_it() -> None:
    """A seed gives the same token by whichever path, as long as it is kept."""
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(4)).repeat(50, 1)
    free, filtered = torch.empty(50, dtype=torch.int64), torch.empty(50, dtype=torch.int64)
    sample(free, logits, *parameters(50), 600)
    sample(filtered, logits, *parameters(50, top_k=torch.full((50,), 300), top_p=torch.full((50,), 0.9)), 600)
    kept = logits[0].argsort(descending=True)[:100]
    is_kept = torch.isin(free, kept)
    assert int(is_kept.sum()) > 10 and torch.equal(free[is_kept], filtered[is_kept])
    assert not torch.equal(free, filtered)


def test_noise_at_its_ends() -> None:
    """Of the smallest word comes the largest noise; the inverse of the distribution gives back where a word lies."""
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    noise = gumbel(words).double()
    assert noise.tolist() == sorted(noise.tolist(), reverse=True)
    assert 22.8 < noise[0] < 22.9 and -3.2 < noise[-1] < -3.1
    torch.testing.assert_close(-torch.expm1(-torch.exp(-noise)), (words.double() + 0.5) * 2.0**-32, rtol=3e-6, atol=0)


@pytest.mark.user_pain("Q4")
def test_a_draw_does_not_depend_on_neighbours() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    together, alone = torch.empty(6, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    sample(together, logits, *parameters(6), 50)
    for row in range(6):
        sample(alone, logits[row : row + 1], *(parameter[row : row + 1] for parameter in parameters(6)), 50)
        assert alone[0] == together[row]
    seeds, choices, positions = torch.full((3,), 9), torch.tensor([0, 1, 0]), torch.tensor([4, 4, 5])
    assert len(set(random_words(seeds, choices, positions, 5000).sum(1).tolist())) == 3


@pytest.mark.user_pain("Q6")
@pytest.mark.parametrize("name", ["cpp_sample", "plain_sample", "cpp_greedy_sample", "plain_greedy_sample"])
def test_padding_is_never_sampled(name: str, services: Services) -> None:
    implementation = next(implementation for implementation in CATALOG if implementation.name == name)
    kernel = loaded(implementation, make_problem("float32", 64), services)
    logits = torch.randn(20, 64)
    logits[:, 50:] = 1e5
    tokens = torch.empty(20, dtype=torch.int64)
    extra = parameters(20) if "greedy" not in name else []
    kernel(tokens, logits, *extra, 50)
    assert int(tokens.max()) < 50


@pytest.mark.user_pain("V2")
@pytest.mark.parametrize("name", ["cpp_sample", "plain_sample"])
def test_tiny_temperatures_are_greedy_and_broken_rows_are_named(name: str, services: Services) -> None:
    implementation = next(implementation for implementation in CATALOG if implementation.name == name)
    kernel = loaded(implementation, make_problem("float32", 64), services)
    logits = torch.randn(4, 40)
    logits[1, 5] = float("nan")
    logits[2] = float("-inf")
    tokens = torch.empty(4, dtype=torch.int64)
    kernel(tokens, logits, *parameters(4, temperature=torch.tensor([1e-5, 1.0, 1.0, 1e-4])), 40)
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] == tokens[2] == INVALID_TOKEN
    assert 0 <= tokens[3] < 40


def test_denormals_stay_on(services: Services) -> None:
    """The library is linked without -ffast-math, which would turn denormals off for the whole process."""
    implementation = next(implementation for implementation in CATALOG if implementation.name == "cpp_rms_norm")
    loaded(implementation, make_problem("float32", 64), services)
    assert np.float32(1e-38) * np.float32(0.01) != 0
    assert float(torch.tensor(1e-38) * 0.01) != 0


def openmp_runtimes() -> set[str]:
    maps = Path("/proc/self/maps").read_text()
    return {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libiomp" in line}


def test_no_second_openmp_runtime(services: Services) -> None:
    """Ours runs on torch's: two runtimes in one process would fight for the cores."""
    before = openmp_runtimes()
    loaded(CATALOG[0], make_problem("float32", 64), services)
    assert before and openmp_runtimes() == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("caps", "sinks"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("head_dim", [32, 40])
def test_soft_caps_and_sinks(dtype: str, caps: bool, sinks: bool, head_dim: int, services: Services) -> None:
    """With windows (heads of 40) and without: what takes them agrees, and all others decline."""
    problem = replace(make_problem(dtype, head_dim), caps_scores=caps, has_sinks=sinks)
    for implementation in PLAIN.chain("paged_attention"):
        if implementation.metadata.takes_caps_and_sinks:
            assert_agrees(implementation, problem, services)
        elif implementation.metadata.platforms == frozenset({"cpu"}):
            assert ("soft cap" if caps else "attention sinks") in str(implementation.misfit(PROFILE, problem))


def test_the_reference_of_caps_and_sinks_is_the_formula() -> None:
    """One query over three positions, by hand."""
    q, keys = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[[1.0, 0.0]], [[3.0, 0.0]], [[-1.0, 0.0]]]])
    values = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]], [[5.0, 5.0]]]])
    out, row = torch.empty(1, 1, 2), torch.tensor([0], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    paged_attention(out, q, keys, values, row[None], row, starts, lengths, 0.5, 0, None, 2.0, torch.tensor([0.7]))
    scores = [2.0 * math.tanh(score / 2.0) for score in (1.0, 3.0, -1.0)]
    weights = [math.exp(score) for score in scores]
    total = sum(weights) + math.exp(0.7)
    expected = [(weights[0] + 5 * weights[2]) / total, (weights[1] + 5 * weights[2]) / total]
    np.testing.assert_allclose(out.flatten(), expected, rtol=1e-6)
