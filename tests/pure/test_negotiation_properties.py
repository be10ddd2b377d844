"""Whatever device, model and wish: what negotiation proposes fits, and the largest that a refusal names then works."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from trimaran.device_workers.memory.memory_plan import plan_memory, plan_spending, shared_limit
from trimaran.engine_core.negotiation import BLOCK_SIZES, count_blocks, settle
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.configuration import CoreConfiguration
from trimaran.ipc.facts import DeviceCapability, DeviceProfile, Feature, MemoryFacts, ModelFacts
from trimaran.ipc.worker_messages import Loaded, Settled, WorkerHello

MIB, GIB = 1 << 20, 1 << 30
ASKED = CoreConfiguration(incarnation=1, generation=1, num_ranks=1, frontends_address="", workers_address="")

MODELS = st.builds(
    lambda layers, heads, kv_heads, head_dim, channels, vocab, context: ModelFacts(
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=channels,
        num_heads=heads * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_model_len=context,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        num_parameters=layers * 12 * channels * channels + vocab * channels,
        tensor_parallel_sizes=(1, 2, 4, 8),
        weight_bytes=2 * (layers * 12 * channels * channels + vocab * channels),
        kv_bytes_per_token=4 * layers * kv_heads * head_dim,
        step_bytes_per_token=2 * (15 * channels + 3 * heads * kv_heads * head_dim) + 12,
        step_bytes_per_row=4 * vocab + 8,
    ),
    layers=st.integers(1, 80),
    heads=st.integers(1, 8),
    kv_heads=st.sampled_from([1, 2, 3, 8, 16]),
    head_dim=st.sampled_from([20, 32, 64, 80, 96, 128, 256]),
    channels=st.sampled_from([64, 576, 1024, 4096, 8192]),
    vocab=st.sampled_from([1000, 49152, 151936, 262144]),
    context=st.sampled_from([10, 64, 2048, 40960, 131072, 1 << 20]),
)
PROFILES = st.builds(
    lambda platform, multiprocessors, shared, rate, bandwidth, features: DeviceProfile(
        platform=platform,
        vendor="anyone",
        name="a device",
        bandwidth=bandwidth,
        capability=DeviceCapability(
            architecture="any",
            num_multiprocessors=multiprocessors,
            shared_memory_per_block_bytes=shared,
            rates={} if rate is None else {"bfloat16": rate},
            features=features,
        ),
    ),
    platform=st.sampled_from(["cuda", "cpu", "metal"]),
    multiprocessors=st.one_of(st.none(), st.integers(1, 400)),
    shared=st.one_of(st.none(), st.sampled_from([16 << 10, 64 << 10, 227 << 10])),
    rate=st.one_of(st.none(), st.floats(0.01, 5000)),
    bandwidth=st.one_of(st.none(), st.floats(1, 10000)),
    features=st.frozensets(st.sampled_from([Feature.TRITON, Feature.BULK_TENSOR_COPY, Feature.GRAPH_CAPTURE])),
)
WISHES = st.fixed_dictionaries(
    {},
    optional={
        "block_size": st.sampled_from(BLOCK_SIZES),
        "max_num_seqs": st.one_of(st.integers(1, 64), st.integers(1, 100_000)),
        "max_batched_tokens": st.one_of(st.integers(1, 4096), st.integers(1, 1_000_000)),
        "max_model_len": st.one_of(st.integers(1, 4096), st.integers(1, 1 << 20)),
        "kv_memory_bytes": st.one_of(st.integers(1, 16 * MIB), st.integers(1, 64 * GIB)),
        "memory_utilization": st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.98, 1.0]),
        "graph_buckets": st.just((1, 8, 4096)),
    },
)
MEMORY = st.one_of(st.integers(1, 4096), st.integers(1, 400_000)).map(lambda mib: mib * MIB)
NAMED = re.compile(r"(?:start with|take at most|raise) --([a-z-]+) (?:from [\d.]+ to |to )?([\d.]+\d)")


def hello(asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile, total_bytes: int) -> WorkerHello:
    profile = replace(profile, memory_bytes=total_bytes, memory_is_shared=profile.platform != "cuda")
    memory = MemoryFacts(total_bytes=total_bytes, free_bytes=total_bytes, ours_bytes=0)
    spending = plan_spending(
        memory,
        utilization=asked.memory_utilization,
        kv_memory_bytes=asked.kv_memory_bytes,
        shared_limit_bytes=shared_limit(profile, total_bytes),
    )
    return WorkerHello(
        rank=0,
        generation=1,
        pid=1,
        profile=profile,
        model=model if asked.max_model_len is None else replace(model, max_model_len=asked.max_model_len),
        memory=memory,
        spendable_bytes=spending.spendable_bytes,
        kv_limit_bytes=spending.kv_limit_bytes,
    )


def loaded(asked: CoreConfiguration, settled: Settled, told: WorkerHello) -> Loaded:
    """As a worker answers that found what the model's sizes had promised. Raises Refusal, as it does."""
    assert told.memory is not None
    blocks = -(-settled.max_model_len // settled.block_size)
    step = told.model.step_bytes(
        max_tokens=settled.max_batched_tokens, max_rows=settled.max_num_seqs, max_blocks=blocks
    )
    taken, total = told.model.loaded_bytes + step, told.memory.total_bytes
    assert taken <= total
    memory = MemoryFacts(total_bytes=total, free_bytes=total - taken, ours_bytes=taken)
    plan = plan_memory(
        memory,
        weight_bytes=told.model.loaded_bytes,
        activation_bytes=step,
        utilization=asked.memory_utilization,
        kv_memory_bytes=asked.kv_memory_bytes,
        shared_limit_bytes=shared_limit(told.profile, total),
    )
    return Loaded(
        rank=0,
        generation=1,
        resolutions=(),
        decisions=(),
        memory=memory,
        weight_bytes=plan.weight_bytes,
        activation_bytes=plan.activation_bytes,
        kv_budget_bytes=plan.kv_budget_bytes,
        kv_bytes_per_block=told.model.kv_bytes_per_token * settled.block_size,
        kv_is_limited=plan.kv_is_limited,
    )


def start(asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile, total_bytes: int) -> None:
    """A whole negotiation. Asserts that what came out fits; raises Refusal."""
    told = hello(asked, model, profile, total_bytes)
    settled = settle(asked, [told])
    found = loaded(asked, settled, told)
    num_blocks, max_model_len, late = count_blocks(asked, settled, [found])
    assert found.weight_bytes + found.activation_bytes + num_blocks * found.kv_bytes_per_block <= total_bytes
    assert 0 < num_blocks * found.kv_bytes_per_block <= found.kv_budget_bytes
    assert 0 < max_model_len <= settled.max_model_len and max_model_len <= num_blocks * settled.block_size
    assert 0 < settled.max_num_seqs <= settled.max_batched_tokens
    assert 0 < settled.max_chunk_tokens <= settled.max_batched_tokens
    assert all(0 < size <= settled.max_batched_tokens for size in settled.graph_buckets)
    for name in ("block_size", "max_num_seqs", "max_batched_tokens", "max_model_len"):
        wish = getattr(asked, name)
        assert wish is None or getattr(settled, name) == wish
    for decision in (*settled.decisions, *late):
        assert decision.reason and "None" not in decision.reason and "unknown number" not in decision.reason


@settings(max_examples=300, deadline=None)
@given(model=MODELS, profile=PROFILES, wishes=WISHES, total_bytes=MEMORY)
def test_what_is_proposed_fits_and_what_is_named_works(
    model: ModelFacts, profile: DeviceProfile, wishes: dict[str, object], total_bytes: int
) -> None:
    """Every refusal that names a value is followed; each step cures one wish, so they end."""
    asked = replace(ASKED, **wishes)  # type: ignore[arg-type]
    followed: list[str] = []
    while True:
        try:
            start(asked, model, profile, total_bytes)
            return
        except Refusal as refusal:
            text = str(refusal)
        assert re.search(r"[;:,] (or )?(take|raise|lower|end|leave|start|ask|choose|spread|-)[^;]*$", text), text
        named = NAMED.search(text)
        if named is None:
            return
        name = named.group(1).replace("-", "_")
        value = float(named.group(2)) if name == "memory_utilization" else int(named.group(2))
        assert name not in followed, f"{text} came after --{name} {value} was followed"
        followed.append(name)
        asked = replace(asked, **{name: value})
