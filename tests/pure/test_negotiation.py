"""Negotiation: reasons for every decision, overrides, and refusals whose largest value then works."""

import re

import numpy as np
import pytest
from msgspec.structs import replace

from trimaran.engine_core.negotiation import count_blocks, settle
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.configuration import CoreConfiguration
from trimaran.ipc.facts import (
    AttentionStrategy,
    DeviceCapability,
    DeviceProfile,
    Feature,
    MemoryFacts,
    ModelFacts,
    PoolingFacts,
    PoolingKind,
    QueueOrdering,
)
from trimaran.ipc.worker_messages import Loaded, Settled, WorkerHello
from trimaran.tools.simulate_serving import simulate

GIB = 1 << 30
ASKED = CoreConfiguration(incarnation=1, generation=1, num_ranks=1, frontends_address="", workers_address="")
LARGE = DeviceProfile(
    platform="cuda",
    vendor="nvidia",
    name="a large card",
    memory_bytes=140 * GIB,
    bandwidth=4800.0,
    capability=DeviceCapability(
        architecture="sm_90",
        num_multiprocessors=132,
        shared_memory_per_block_bytes=227 << 10,
        shared_memory_per_multiprocessor_bytes=228 << 10,
        rates={"bfloat16": 989.0},
        features=frozenset({Feature.TRITON, Feature.BULK_TENSOR_COPY, Feature.GRAPH_CAPTURE, Feature.BF16}),
    ),
)
SMALL = DeviceProfile(
    platform="cuda",
    vendor="nvidia",
    name="a laptop's card",
    memory_bytes=8 * GIB,
    bandwidth=256.0,
    capability=DeviceCapability(
        architecture="sm_89",
        num_multiprocessors=24,
        shared_memory_per_block_bytes=99 << 10,
        shared_memory_per_multiprocessor_bytes=100 << 10,
        rates={"bfloat16": 60.0},
        features=frozenset({Feature.TRITON, Feature.GRAPH_CAPTURE, Feature.BF16}),
    ),
)
MODEL = ModelFacts(  # the shape of a Qwen3-0.6B
    architecture="Qwen3ForCausalLM",
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_model_len=40960,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    num_parameters=596_000_000,
    tensor_parallel_sizes=(1, 2, 4, 8, 16),
    weight_bytes=1_500_000_000,
    kv_bytes_per_token=114_688,
    step_bytes_per_token=42_000,
    step_bytes_per_row=607_752,
)


def hello(profile: DeviceProfile, *, utilization: float = 0.9, model: ModelFacts = MODEL, rank: int = 0) -> WorkerHello:
    assert profile.memory_bytes is not None
    return WorkerHello(
        rank=rank,
        generation=1,
        pid=1,
        profile=profile,
        model=model,
        memory=MemoryFacts(total_bytes=profile.memory_bytes, free_bytes=profile.memory_bytes, ours_bytes=0),
        spendable_bytes=int(profile.memory_bytes * utilization),
    )


def loaded(settled: Settled, profile: DeviceProfile, *, utilization: float = 0.9) -> Loaded:
    """As a worker would answer that found exactly what it had said."""
    assert profile.memory_bytes is not None
    step = MODEL.step_bytes(
        max_tokens=settled.max_batched_tokens,
        max_rows=settled.max_num_seqs,
        max_blocks=-(-settled.max_model_len // settled.block_size),
    )
    free = profile.memory_bytes - MODEL.weight_bytes - step
    return Loaded(
        rank=0,
        generation=1,
        resolutions=(),
        decisions=(),
        memory=MemoryFacts(total_bytes=profile.memory_bytes, free_bytes=free, ours_bytes=0),
        weight_bytes=MODEL.weight_bytes,
        activation_bytes=step,
        kv_budget_bytes=int(profile.memory_bytes * utilization) - MODEL.weight_bytes - step,
        kv_bytes_per_block=MODEL.kv_bytes_per_token * settled.block_size,
    )


def test_devices_get_different_plans_with_reasons() -> None:
    large, small = settle(ASKED, [hello(LARGE)]), settle(ASKED, [hello(SMALL)])
    assert all(decision.reason for decision in (*large.decisions, *small.decisions))
    assert large.attention_strategy is AttentionStrategy.BULK_COPY
    assert small.attention_strategy is AttentionStrategy.LOW_OCCUPANCY
    assert large.queue_ordering is QueueOrdering.LONG_FIRST
    assert small.queue_ordering is QueueOrdering.SHORT_FIRST
    assert large.max_num_seqs > small.max_num_seqs
    assert large.max_batched_tokens > small.max_batched_tokens
    assert large.block_size == 64 and small.block_size == 16
    assert large.graph_buckets[0] == 1 and large.graph_buckets[-1] <= 512


def test_measured_facts_decide_over_declared_ones() -> None:
    measured = replace(LARGE.capability, concurrent_blocks=40, launch_latency_us=3.0, graph_launch_us=4.0)
    settled = settle(ASKED, [hello(replace(LARGE, capability=measured))])
    assert settled.queue_ordering is QueueOrdering.SHORT_FIRST
    assert settled.graph_buckets == ()
    reasons = {decision.name: decision.reason for decision in settled.decisions}
    assert "measured" in reasons["queue_ordering"] and "measured" in reasons["graph_buckets"]


OVERRIDES = {
    "block_size": 64,
    "max_num_seqs": 7,
    "max_batched_tokens": 333,
    "max_model_len": 1000,
    "max_chunk_tokens": 100,
    "prompt_step_s": 0.5,
    "graph_buckets": (1, 8),
    "attention_strategy": AttentionStrategy.TILED,
    "queue_ordering": QueueOrdering.ARRIVAL,
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_every_decision_can_be_overridden(name: str) -> None:
    settled = settle(replace(ASKED, **{name: OVERRIDES[name]}), [hello(LARGE)])
    assert getattr(settled, name) == OVERRIDES[name]
    decision = next(found for found in settled.decisions if found.name == name)
    assert decision.overridden and decision.reason == "as asked"


def test_eager_is_an_override_too() -> None:
    settled = settle(replace(ASKED, enforce_eager=True), [hello(LARGE)])
    assert settled.graph_buckets == ()
    assert next(found for found in settled.decisions if found.name == "graph_buckets").value == "eager"


@pytest.mark.parametrize("memory_gib", [2.5, 3, 4, 6, 8, 12, 24, 48, 80, 140])
@pytest.mark.parametrize("capability", [LARGE, SMALL], ids=["large", "small"])
def test_what_is_proposed_fits(memory_gib: float, capability: DeviceProfile) -> None:
    """Whatever the memory: the sizes that nobody asked for leave a KV cache, and it is counted within the budget."""
    profile = replace(capability, memory_bytes=int(memory_gib * GIB))
    settled = settle(ASKED, [hello(profile)])
    found = loaded(settled, profile)
    num_blocks, max_model_len, decisions = count_blocks(ASKED, settled, [found])
    assert 0 < num_blocks * found.kv_bytes_per_block <= found.kv_budget_bytes
    assert max_model_len <= num_blocks * settled.block_size
    assert all(decision.reason for decision in decisions)


@pytest.mark.user_pain("M1")
@pytest.mark.parametrize(
    ("name", "value"), [("max_model_len", 40_000), ("max_batched_tokens", 200_000), ("max_num_seqs", 20_000)]
)
def test_a_wish_that_does_not_fit_names_the_largest_that_does(name: str, value: int) -> None:
    """Before weights are read; and that value then works, also after loading."""
    profile = replace(SMALL, memory_bytes=5 * GIB)
    asked = replace(ASKED, **{name: value})
    if name == "max_num_seqs":
        asked = replace(asked, max_batched_tokens=20_000)
    with pytest.raises(Refusal) as refused:
        settle(asked, [hello(profile)])
    text = str(refused.value)
    flag = f"--{name.replace('_', '-')}"
    if name == "max_num_seqs":  # both were asked, and the budget is what must shrink for so many
        flag = re.search(r"start with (--[a-z-]+)", text).group(1)  # type: ignore[union-attr]
        name = flag[2:].replace("-", "_")
    assert "GiB" in text and "available" in text
    largest = int(re.search(rf"start with {flag} (\d+)", text).group(1))  # type: ignore[union-attr]
    again = replace(asked, **{name: largest})
    for _ in range(2):
        try:
            settled = settle(again, [hello(profile)])
            break
        except Refusal as other:  # the second wish in its turn
            flag, value = re.search(r"start with (--[a-z-]+) (\d+)", str(other)).groups()  # type: ignore[union-attr]
            again = replace(again, **{flag[2:].replace("-", "_"): int(value)})
    assert count_blocks(again, settled, [loaded(settled, profile)])[0] > 0


def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    profile = replace(SMALL, memory_bytes=GIB)
    with pytest.raises(Refusal, match=r"weights need 1\.40 GiB.*0\.90 GiB are available.*--tensor-parallel 2"):
        settle(ASKED, [hello(profile)])
    busy = WorkerHello(
        rank=0,
        generation=1,
        pid=1,
        profile=SMALL,
        model=MODEL,
        memory=MemoryFacts(total_bytes=8 * GIB, free_bytes=GIB, ours_bytes=0, holders={"4711 python": 6 * GIB}),
        spendable_bytes=int(0.2 * GIB),
    )
    with pytest.raises(Refusal, match=r"4711 python holds 6\.00 GiB.*end the programs that hold memory"):
        settle(ASKED, [busy])


@pytest.mark.user_pain("M3")
def test_every_fraction_starts_or_names_one_that_does() -> None:
    """From 0.30 to 0.98 on a card that the model half fills."""
    profile = replace(SMALL, memory_bytes=int(3.2 * GIB))
    outcomes = set()
    for percent in range(30, 99, 2):
        asked = replace(ASKED, memory_utilization=percent / 100)
        try:
            start(asked, profile)
            outcomes.add("starts")
            continue
        except Refusal as refusal:
            text = str(refusal)
        named = re.search(r"raise --memory-utilization (?:from [\d.]+ to|to) ([\d.]+)", text)
        assert named, text
        raised = float(named.group(1))
        assert raised > percent / 100
        start(replace(asked, memory_utilization=raised), profile)
        outcomes.add("named one that does")
    assert outcomes == {"starts", "named one that does"}


def start(asked: CoreConfiguration, profile: DeviceProfile) -> None:
    share = asked.memory_utilization
    settled = settle(asked, [hello(profile, utilization=share)])
    count_blocks(asked, settled, [loaded(settled, profile, utilization=share)])


def test_the_least_of_the_ranks_counts() -> None:
    full = replace(hello(LARGE, rank=1), spendable_bytes=10 * GIB)
    alone, shared = settle(ASKED, [hello(LARGE)]), settle(ASKED, [hello(LARGE), full])
    assert shared.max_num_seqs < alone.max_num_seqs


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_are_as_many_as_the_least_rank_holds(order: tuple[int, int]) -> None:
    profile = replace(SMALL, memory_bytes=5 * GIB)
    settled = settle(ASKED, [hello(profile)])
    much = loaded(settled, profile)
    less = replace(much, rank=1, kv_budget_bytes=much.kv_budget_bytes // 2)
    ranks = [(much, less)[index] for index in order]
    num_blocks, _, decisions = count_blocks(ASKED, settled, ranks)
    assert num_blocks == less.kv_budget_bytes // less.kv_bytes_per_block
    assert "on rank 1" in decisions[0].reason


def test_more_blocks_than_fit_are_refused_with_the_largest_that_do() -> None:
    profile = replace(SMALL, memory_bytes=5 * GIB)
    settled = settle(ASKED, [hello(profile)])
    found = loaded(settled, profile)
    fits = found.kv_budget_bytes // found.kv_bytes_per_block
    with pytest.raises(Refusal, match=rf"--num-blocks {fits + 1} needs .* GiB.*start with --num-blocks {fits}$"):
        count_blocks(replace(ASKED, num_blocks=fits + 1), settled, [found])
    assert count_blocks(replace(ASKED, num_blocks=fits), settled, [found])[0] == fits


def test_a_strategy_that_nothing_follows_here_is_not_chosen() -> None:
    """Nor is the block size that it alone would want."""
    told = replace(hello(LARGE), strategy_misfits={AttentionStrategy.BULK_COPY: "not offered on sm_90: a reason"})
    settled = settle(ASKED, [told])
    assert settled.attention_strategy is AttentionStrategy.TILED and settled.block_size == 16
    assert "not offered on sm_90: a reason" in _reason(settled, "attention_strategy")
    asked = settle(replace(ASKED, attention_strategy=AttentionStrategy.BULK_COPY), [told])
    assert "the next that fits serves" in _reason(asked, "attention_strategy")
    small_blocks = settle(replace(ASKED, block_size=8), [hello(LARGE)])
    assert small_blocks.attention_strategy is AttentionStrategy.TILED


def _reason(settled: Settled, name: str) -> str:
    return next(decision.reason for decision in settled.decisions if decision.name == name)


def test_the_other_half_precision_stands_in_for_an_unknown_rate() -> None:
    rates = replace(SMALL.capability, rates={"float16": 60.0})
    settled = settle(ASKED, [hello(replace(SMALL, capability=rates))])
    assert settled.max_batched_tokens == settle(ASKED, [hello(SMALL)]).max_batched_tokens
    assert "60 TFLOP/s of float16" in _reason(settled, "max_batched_tokens")
    unknown = settle(ASKED, [hello(replace(SMALL, capability=replace(SMALL.capability, rates={})))])
    assert unknown.max_batched_tokens == 2048 and "not known" in _reason(unknown, "max_batched_tokens")


def test_a_very_slow_device_is_settled() -> None:
    slow = replace(SMALL, bandwidth=5000.0, capability=replace(SMALL.capability, rates={"bfloat16": 0.01}))
    assert settle(ASKED, [hello(slow)]).max_num_seqs == 64


def test_steps_with_prompts_are_as_short_as_the_model_allows() -> None:
    """Short for a small model; longer where decodes take long themselves; never longer than on an unknown device."""
    large_model = replace(MODEL, weight_bytes=16_000_000_000)
    huge_model = replace(MODEL, weight_bytes=60_000_000_000)
    unknown = replace(LARGE, bandwidth=None)
    steps_s = [
        settle(ASKED, [hello(profile, model=model)]).prompt_step_s
        for profile, model in ((LARGE, MODEL), (LARGE, large_model), (LARGE, huge_model), (unknown, MODEL))
    ]
    assert steps_s == [0.025, 0.04, 0.05, 0.05]
    assert settle(ASKED, [hello(replace(SMALL, platform="cpu"))]).prompt_step_s == 0.25


@pytest.mark.parametrize(("shape", "loss"), [("m1", 0.02), ("m2", 0.03)])
def test_those_steps_answer_sooner_and_cost_little(shape: str, loss: float) -> None:
    """Of the two models that the simulation knows; what it says of an H200 is in docs/performance.md."""
    model = MODEL if shape == "m1" else replace(MODEL, weight_bytes=16_000_000_000)
    short_s = settle(ASKED, [hello(LARGE, model=model)]).prompt_step_s
    short, long = (simulate(shape, clients=256, requests=512, prompt_step_s=step_s) for step_s in (short_s, 0.05))
    assert np.median(short.waits_s) < 0.9 * np.median(long.waits_s)
    assert np.percentile(short.gaps_s, 99) < 0.9 * np.percentile(long.gaps_s, 99)
    assert short.tokens_per_s > (1 - loss) * long.tokens_per_s


def test_one_model_is_not_spread_over_unlike_devices() -> None:
    with pytest.raises(Refusal, match=r"rank 1 has a laptop's card \(cuda sm_89\).*--tensor-parallel 1"):
        settle(replace(ASKED, num_ranks=2), [hello(LARGE), hello(SMALL, rank=1)])


def test_graphs_that_no_step_can_use_are_told() -> None:
    settled = settle(replace(ASKED, graph_buckets=(8, 100_000), max_batched_tokens=2048), [hello(LARGE)])
    assert settled.graph_buckets == (8,) and "without those over a step's 2048" in _reason(settled, "graph_buckets")
    for rows in (1, 3, 7, 100):
        buckets = settle(replace(ASKED, max_num_seqs=rows, max_batched_tokens=rows), [hello(LARGE)]).graph_buckets
        assert buckets[-1] == rows


def test_a_cache_below_one_block_is_refused_before_weights_are_read() -> None:
    with pytest.raises(Refusal, match=r"--kv-memory-bytes 1000 is less.*start with --kv-memory-bytes (\d+)"):
        settle(replace(ASKED, kv_memory_bytes=1000), [replace(hello(SMALL), kv_limit_bytes=1000)])


def test_the_ranks_that_are_named_divide_the_model() -> None:
    odd = replace(MODEL, num_heads=9, num_kv_heads=3, tensor_parallel_sizes=(1, 3))
    with pytest.raises(Refusal, match="--tensor-parallel 3"):
        settle(ASKED, [hello(replace(SMALL, memory_bytes=GIB), model=odd)])
    with pytest.raises(Refusal) as refused:
        settle(ASKED, [hello(replace(SMALL, memory_bytes=GIB, platform="cpu"), model=odd)])
    assert "--tensor-parallel" not in str(refused.value)


ENCODER = replace(
    MODEL,
    architecture="BertModel",
    max_model_len=512,
    kv_bytes_per_token=0,
    pooling=PoolingFacts(kind=PoolingKind.MEAN, num_dimensions=1024, normalizes=True, is_encoder=True),
)


def test_an_encoder_needs_no_blocks_and_a_step_for_its_longest_text() -> None:
    for profile in (LARGE, SMALL):
        settled = settle(ASKED, [hello(profile, model=ENCODER)])
        assert settled.max_batched_tokens >= settled.max_model_len == 512
        assert settled.graph_buckets == ()
        answer = replace(loaded(settled, profile), kv_budget_bytes=0, kv_bytes_per_block=0)
        num_blocks, max_model_len, decisions = count_blocks(ASKED, settled, [answer])
        assert (num_blocks, max_model_len) == (0, 512)
        assert "no KV cache" in decisions[0].reason


def test_a_step_below_an_encoders_longest_text_is_refused_with_what_works() -> None:
    asked = replace(ASKED, max_batched_tokens=300, max_num_seqs=8)
    with pytest.raises(Refusal, match="raise it to 512 or lower --max-model-len"):
        settle(asked, [hello(LARGE, model=ENCODER)])
    assert settle(replace(asked, max_batched_tokens=512), [hello(LARGE, model=ENCODER)]).max_batched_tokens == 512
    assert settle(replace(asked, max_model_len=300), [hello(LARGE, model=ENCODER)]).max_model_len == 300
