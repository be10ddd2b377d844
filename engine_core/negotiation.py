"""Settles the engine's sizes and policies from what the model needs, what the devices have and what the user asked.

Every choice comes back as a Decision with its reason; a value the user gave is taken, or refused with the largest that
fits. Two parts: `settle` before weights are read, `count_blocks` when what is left for the KV cache is known.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from ..ipc.conditions import Refusal
from ..ipc.configuration import CoreConfiguration
from ..ipc.facts import (
    AttentionStrategy,
    Decision,
    DeviceProfile,
    MemoryFacts,
    ModelFacts,
    QueueOrdering,
)
from ..ipc.worker_messages import Loaded, Settled, WorkerHello
from .policies import (
    choose_attention_strategy,
    choose_batch_invariance,
    choose_graph_buckets,
    choose_prompt_step,
    choose_queue_ordering,
)

_GIB = 1 << 30
BLOCK_SIZES = (8, 16, 32, 64, 128)
_UNKNOWN_SEQS, _UNKNOWN_TOKENS = 256, 2048
_STEP_S = 0.5
_PREFILL_EFFICIENCY = 0.65  # of the matrix rate: what long prefills of an 8B model were measured to reach on an H200
_STEP_SHARE = 0.1  # of the memory that weights leave, for the buffers of a step
_TYPICAL_TOKENS = 256  # of one running sequence, to guess how many a KV cache holds
_FEW_ROWS = 8
_ESTIMATE_MARGIN = 0.97  # packing adds a little to the weights: an early answer must still hold after loading


class Room(Struct, frozen=True, kw_only=True):
    """Memory of the rank that has least: what may be spent in all, and the most that the KV cache may take of it."""

    spendable_bytes: int
    kv_limit_bytes: int | None

    def kv_bytes(self, model: ModelFacts, step_bytes: int) -> int:
        """What weights and step buffers leave to the KV cache."""
        left = self.spendable_bytes - model.loaded_bytes - step_bytes
        return left if self.kv_limit_bytes is None else min(left, self.kv_limit_bytes)


def settle(asked: CoreConfiguration, hellos: Sequence[WorkerHello]) -> Settled:
    """Sizes and policies that hold whatever loading finds. Raises Refusal."""
    _check_alike(hellos)
    model, profile = hellos[0].model, hellos[0].profile
    room = _room(hellos)
    if room is not None:
        _check_weights(asked, model, profile, room, hellos[0].memory)
    strategy = choose_attention_strategy(asked, model, profile, hellos[0].strategy_misfits)
    sizes = _sizes(asked, model, profile, room, strategy)
    if room is not None:
        _check_wishes(asked, model, profile, room, strategy, sizes, hellos[0].memory)
    chunk = _max_chunk_tokens(asked, sizes.num("max_batched_tokens"))
    buckets, graphs = choose_graph_buckets(asked, profile, sizes.num("max_num_seqs"), sizes.num("max_batched_tokens"))
    if model.is_encoder:
        buckets, graphs = (), Decision(name="graphs", value="eager", reason="an encoder's steps have any shape")
    ordering = choose_queue_ordering(asked, profile)
    prompt_step = choose_prompt_step(asked, model, profile)
    kv_dtype = Decision(name="kv_dtype", value=model.kv_dtype, reason="that of the activations")
    decisions = (*sizes.decisions, chunk, prompt_step, graphs, kv_dtype, strategy, ordering)
    if asked.batch_invariant:
        decisions += (choose_batch_invariance(asked, model),)
    return Settled(
        block_size=sizes.num("block_size"),
        max_num_seqs=sizes.num("max_num_seqs"),
        max_batched_tokens=sizes.num("max_batched_tokens"),
        max_model_len=sizes.num("max_model_len"),
        max_chunk_tokens=int(chunk.value),
        graph_buckets=buckets,
        attention_strategy=AttentionStrategy(strategy.value),
        queue_ordering=QueueOrdering(ordering.value),
        prompt_step_s=float(prompt_step.value),
        batch_invariant=asked.batch_invariant,
        decisions=decisions,
    )


class Sizes(Struct, frozen=True):
    """Block size, sequences, context and token budget, each with its reason."""

    decisions: tuple[Decision, ...]

    def num(self, name: str) -> int:
        return next(int(decision.value) for decision in self.decisions if decision.name == name)


def _sizes(
    asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile, room: Room | None, strategy: Decision
) -> Sizes:
    max_num_seqs = _max_num_seqs(asked, model, profile, room)
    budget = _max_batched_tokens(asked, model, profile, room, int(max_num_seqs.value))
    length = _max_model_len(asked, model)
    if model.is_encoder:
        budget = _whole_prompts(budget, int(length.value))
    return Sizes((_block_size(asked, strategy), max_num_seqs, length, budget))


def _whole_prompts(budget: Decision, length: int) -> Decision:
    """An encoder sees a prompt whole, so one of full length must fit into a step."""
    if int(budget.value) >= length:
        return budget
    if budget.overridden:
        raise Refusal(
            f"--max-batched-tokens {budget.value} is below the {length} tokens of this encoder's longest prompt, which "
            f"it computes whole; raise it to {length} or lower --max-model-len"
        )
    return Decision(name=budget.name, value=str(length), reason="a prompt of full length is one step of an encoder")


def _check_alike(hellos: Sequence[WorkerHello]) -> None:
    """Ranks of one model compute the same step at the same time, by the same kernels."""
    kinds = [(hello.profile.platform, hello.profile.capability.architecture) for hello in hellos]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        first, second = hellos[0].profile, hellos[other].profile
        raise Refusal(
            f"rank 0 has {first.name} ({' '.join(kinds[0])}) and rank {other} has {second.name} "
            f"({' '.join(kinds[other])}): one model is not spread over unlike devices; name devices of one kind by "
            "--device, or serve on one by --tensor-parallel 1"
        )


def count_blocks(
    asked: CoreConfiguration, settled: Settled, loaded: Sequence[Loaded]
) -> tuple[int, int, tuple[Decision, ...]]:
    """Blocks that every rank can hold, the context they allow, and why. Raises Refusal."""
    if all(rank.kv_bytes_per_block == 0 for rank in loaded):
        none = Decision(name="num_blocks", value="0", reason="an encoder keeps no KV cache")
        return 0, settled.max_model_len, (none,)
    least = min(loaded, key=lambda rank: rank.kv_budget_bytes // rank.kv_bytes_per_block)
    fits = max(least.kv_budget_bytes, 0) // least.kv_bytes_per_block
    if fits == 0:
        raise Refusal(_nothing_left(asked, settled, least))
    needed = -(-settled.max_model_len // settled.block_size)
    num_blocks = _num_blocks(asked, settled, least, fits, needed)
    decisions = [num_blocks]
    max_model_len = settled.max_model_len
    if int(num_blocks.value) < needed:
        max_model_len = int(num_blocks.value) * settled.block_size
        if asked.max_model_len is not None or max_model_len < 2:
            raise Refusal(_too_small(asked, settled, needed, least, int(num_blocks.value)))
        reason = (
            f"the KV cache holds {num_blocks.value} blocks of {settled.block_size}; "
            f"the model would allow {settled.max_model_len}"
        )
        decisions.append(Decision(name="max_model_len", value=str(max_model_len), reason=reason))
    return int(num_blocks.value), max_model_len, tuple(decisions)


# after loading


def _num_blocks(asked: CoreConfiguration, settled: Settled, least: Loaded, fits: int, needed: int) -> Decision:
    name = "num_blocks"
    if asked.num_blocks is not None:
        if asked.num_blocks > fits:
            raise Refusal(
                f"--num-blocks {asked.num_blocks} needs {_gib(asked.num_blocks * least.kv_bytes_per_block)}, "
                f"{_gib(least.kv_budget_bytes)} are available; the largest that fits is {fits}: "
                f"start with --num-blocks {fits}"
            )
        return Decision(name=name, value=str(asked.num_blocks), reason="as asked", overridden=True)
    useful = needed * settled.max_num_seqs
    if fits > useful:
        reason = f"enough for {settled.max_num_seqs} sequences of {settled.max_model_len} tokens"
        return Decision(name=name, value=str(useful), reason=reason)
    reason = (
        f"{_gib(least.kv_budget_bytes)} for the KV cache on rank {least.rank}, {least.kv_bytes_per_block} bytes a block"
    )
    return Decision(name=name, value=str(fits), reason=reason)


def _too_small(asked: CoreConfiguration, settled: Settled, needed: int, least: Loaded, num_blocks: int) -> str:
    largest = num_blocks * settled.block_size
    story = (
        f"a context of {settled.max_model_len} tokens needs {_gib(needed * least.kv_bytes_per_block)} of KV cache, "
        f"{_gib(num_blocks * least.kv_bytes_per_block)} are available; the largest context that fits is {largest}: "
        f"start with --max-model-len {largest}"
    )
    if asked.num_blocks is not None:
        return f"{story}, or --num-blocks {needed}"
    return story + _more_memory(asked, least, needed * least.kv_bytes_per_block)


def _nothing_left(asked: CoreConfiguration, settled: Settled, least: Loaded) -> str:
    memory = least.memory
    wanted = least.kv_bytes_per_block * -(-min(settled.max_model_len, _TYPICAL_TOKENS) // settled.block_size)
    share, total = asked.memory_utilization, memory.total_bytes
    return (
        f"no memory is left for the KV cache on rank {least.rank}: --memory-utilization {share:g} wants "
        f"{_gib(int(total * share))} of {_gib(total)}, of which {_gib(least.weight_bytes)} of weights, "
        f"{_gib(least.activation_bytes)} of step buffers and other programs take all; {_gib(memory.free_bytes)} "
        f"free{_holders(memory)}; end other programs, take a smaller model or lower --max-num-seqs and "
        f"--max-batched-tokens{_more_memory(asked, least, wanted)}"
    )


def _more_memory(asked: CoreConfiguration, least: Loaded, wanted_bytes: int) -> str:
    """The direction and the value of --memory-utilization that would do, when one would."""
    if asked.kv_memory_bytes is not None:
        return f", or --kv-memory-bytes {wanted_bytes}"
    total, free = least.memory.total_bytes, least.memory.free_bytes
    if least.kv_is_limited:
        return f", or --kv-memory-bytes {wanted_bytes}" if wanted_bytes <= free else ""
    share = -(-100 * (total - free + wanted_bytes) // total) / 100
    raised = share <= 1.0 and share > asked.memory_utilization
    return f", or raise --memory-utilization from {asked.memory_utilization:g} to {share:g}" if raised else ""


# memory before loading


def _room(hellos: Sequence[WorkerHello]) -> Room | None:
    known = [hello for hello in hellos if hello.spendable_bytes is not None]
    if len(known) < len(hellos):
        return None
    least = min(known, key=lambda hello: hello.spendable_bytes or 0)
    return Room(spendable_bytes=least.spendable_bytes or 0, kv_limit_bytes=least.kv_limit_bytes)


def _check_weights(
    asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile, room: Room, memory: MemoryFacts | None
) -> None:
    """Weights that cannot fit are refused before they are read."""
    if model.loaded_bytes <= room.spendable_bytes:
        return
    story = (
        f"the weights need {_gib(model.loaded_bytes)} per device as {model.dtype}, {_gib(room.spendable_bytes)} are "
        f"available on {profile.name}"
    )
    if memory is not None:
        story += (
            f" ({_gib(memory.total_bytes)} in all, {_gib(memory.free_bytes)} free{_holders(memory)}, "
            f"--memory-utilization {asked.memory_utilization:g})"
        )
    ranks = _enough_ranks(asked, model, profile, room)
    cures = ["take a smaller model"]
    if model.dtype == "float32":
        cures.append("--dtype bfloat16 needs half")
    if ranks is not None:
        cures.append(f"spread it over devices: --tensor-parallel {ranks}")
    needed = _least_share(model, memory) if memory is not None else 1.0
    if needed < 0.99:
        cures.append(f"raise --memory-utilization to {needed:.2f}")
    elif memory is not None and memory.total_bytes * asked.memory_utilization > model.loaded_bytes:
        cures.append("end the programs that hold memory")
    raise Refusal(f"{story}; {', or '.join(cures)}")


def _enough_ranks(asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile, room: Room) -> int | None:
    """Ranks at which the weights leave a fifth of such devices. A processor has no second memory to spread over."""
    if profile.platform == "cpu":
        return None
    whole = model.loaded_bytes * asked.num_ranks
    more = (ranks for ranks in model.tensor_parallel_sizes if ranks > asked.num_ranks)
    return next((ranks for ranks in more if whole * 5 <= room.spendable_bytes * 4 * ranks), None)


def _least_share(model: ModelFacts, memory: MemoryFacts) -> float:
    """The share of memory at which the model starts, with a few short sequences; rounded up to a hundredth."""
    step = model.step_bytes(max_tokens=_TYPICAL_TOKENS, max_rows=_FEW_ROWS, max_blocks=_TYPICAL_TOKENS)
    cache = _FEW_ROWS * _TYPICAL_TOKENS * model.kv_bytes_per_token
    needed = memory.total_bytes - memory.free_bytes + model.loaded_bytes + 2 * (step + cache)
    return -(-100 * needed // memory.total_bytes) / 100


def _check_wishes(
    asked: CoreConfiguration,
    model: ModelFacts,
    profile: DeviceProfile,
    room: Room,
    strategy: Decision,
    sizes: Sizes,
    memory: MemoryFacts | None,
) -> None:
    """What the user asked of step and context must fit before weights are read; a text names the largest that does."""
    need = _Need.of(asked, model, room, sizes)
    if need.fits:
        return

    def fits(name: str, value: int) -> bool:
        changed = structs.replace(asked, **{name: value})
        try:
            return _Need.of(changed, model, room, _sizes(changed, model, profile, room, strategy)).fits
        except Refusal:  # of sizes that contradict each other
            return False

    for name in ("max_batched_tokens", "max_num_seqs", "max_model_len"):
        wish = getattr(asked, name)
        largest = 0 if wish is None else _largest(lambda value, name=name: fits(name, value), wish)  # type: ignore[misc]
        if largest:
            raise Refusal(need.story(f"--{name.replace('_', '-')}", wish, largest))
    if asked.kv_memory_bytes is not None and asked.kv_memory_bytes < need.cache <= need.left - need.step:
        raise Refusal(
            f"--kv-memory-bytes {asked.kv_memory_bytes} is less than the {need.cache} bytes of {need.length} "
            f"tokens in blocks of {need.block_size}; start with --kv-memory-bytes {need.cache}"
        )
    wishes = [f"--{name.replace('_', '-')}" for name in _WISHES if getattr(asked, name) is not None]
    cures = [f"leave {' and '.join(wishes)} out" if wishes else "take a smaller model"]
    share = 1.0 if memory is None else _least_share(model, memory)
    if asked.memory_utilization < share < 1.0:
        cures.append(f"raise --memory-utilization from {asked.memory_utilization:g} to {share:.2f}")
    raise Refusal(
        f"{_gib(need.left)} are left by {_gib(model.loaded_bytes)} of weights, and {_gib(need.step + need.cache)} are "
        f"needed for the buffers of a step and {need.length} tokens of KV cache; {', or '.join(cures)}"
    )


_WISHES = ("max_batched_tokens", "max_num_seqs", "max_model_len", "block_size")


def _largest(fits: Callable[[int], bool], wish: int) -> int:
    """The largest value below a wish that fits, by halving; 0 where none does."""
    low, high = 0, wish
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Need(Struct, frozen=True, kw_only=True):
    """Bytes of a step's buffers and of the least KV cache, against what the weights leave."""

    length: int
    block_size: int
    step: int
    cache: int
    left: int
    kv_limit: int | None

    @staticmethod
    def of(asked: CoreConfiguration, model: ModelFacts, room: Room, sizes: Sizes) -> "_Need":
        size = sizes.num("block_size")
        length = asked.max_model_len or min(model.max_model_len, size)
        max_blocks = -(-sizes.num("max_model_len") // size)
        return _Need(
            length=length,
            block_size=size,
            step=model.step_bytes(
                max_tokens=sizes.num("max_batched_tokens"), max_rows=sizes.num("max_num_seqs"), max_blocks=max_blocks
            ),
            cache=-(-length // size) * size * model.kv_bytes_per_token,
            left=int((room.spendable_bytes - model.loaded_bytes) * _ESTIMATE_MARGIN),
            kv_limit=room.kv_limit_bytes,
        )

    @property
    def most_cache(self) -> int:
        return self.left - self.step if self.kv_limit is None else min(self.left - self.step, self.kv_limit)

    @property
    def fits(self) -> bool:
        return self.cache <= self.most_cache

    def story(self, flag: str, wish: int, largest: int) -> str:
        if flag == "--max-model-len":
            needed, available, beside = self.cache, self.most_cache, f"{_gib(self.step)} of step buffers"
        else:
            needed, available, beside = self.step, self.left - self.cache, f"a context of {self.length}"
        text = (
            f"{flag} {wish} needs {_gib(needed)}, {_gib(max(available, 0))} are available beside the weights and "
            f"{beside}; the largest that fits is {largest}: start with {flag} {largest}"
        )
        is_limited = self.kv_limit is not None and self.kv_limit < self.cache <= self.left - self.step
        return f"{text}, or --kv-memory-bytes {self.cache}" if is_limited else text


# sizes


def _block_size(asked: CoreConfiguration, strategy: Decision) -> Decision:
    name = "block_size"
    if asked.block_size is not None:
        if asked.block_size not in BLOCK_SIZES:
            raise Refusal(
                f"--block-size {asked.block_size} is not supported; choose {', '.join(map(str, BLOCK_SIZES[:-1]))} "
                f"or {BLOCK_SIZES[-1]}"
            )
        return Decision(name=name, value=str(asked.block_size), reason="as asked", overridden=True)
    if strategy.value == AttentionStrategy.BULK_COPY:
        return Decision(name=name, value="64", reason="a bulk copy moves one block: 64 rows fill a tile of keys")
    return Decision(name=name, value="16", reason="small blocks waste little of the last one of a sequence")


def _max_num_seqs(asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile, room: Room | None) -> Decision:
    name = "max_num_seqs"
    if asked.max_num_seqs is not None:
        return Decision(name=name, value=str(asked.max_num_seqs), reason="as asked", overridden=True)
    if profile.platform == "cpu":
        value, reason = 256, "a CPU gains little from larger batches"
    else:
        value, reason = _useful_batch(model, profile)
    if room is not None and not model.is_encoder:
        held = int(room.kv_bytes(model, 0) * (1 - _STEP_SHARE)) // (model.kv_bytes_per_token * _TYPICAL_TOKENS)
        if _floor_power(max(held, 8)) < value:
            value = _floor_power(max(held, 8))
            reason = f"the KV cache holds about {held} sequences of {_TYPICAL_TOKENS} tokens"
            if held < 8:
                reason = f"the KV cache holds fewer than 8 sequences of {_TYPICAL_TOKENS} tokens; short ones fit"
        if value * model.step_bytes_per_row > _step_share(room, model):
            value = _floor_power(max(_step_share(room, model) // model.step_bytes_per_row, 1))
            reason = f"their logits take {_gib(value * model.step_bytes_per_row)} of the memory left by the weights"
    if asked.max_batched_tokens is not None and asked.max_batched_tokens < value:
        value, reason = asked.max_batched_tokens, "each running sequence needs one of --max-batched-tokens"
    return Decision(name=name, value=str(value), reason=reason)


def _left(room: Room, model: ModelFacts) -> int:
    return max(room.spendable_bytes - model.loaded_bytes, 0)


def _step_share(room: Room, model: ModelFacts) -> int:
    """Bytes that the buffers of a step may take where nobody asked for more."""
    return int(_left(room, model) * _STEP_SHARE)


def _floor_power(value: int) -> int:
    """The largest power of two up to a positive value."""
    return 1 << value.bit_length() - 1


def _useful_batch(model: ModelFacts, profile: DeviceProfile) -> tuple[int, str]:
    """Four times the batch at which a decode stops being bound by reading weights: attention still is."""
    dtype, rate = _rate(model, profile)
    bandwidth = profile.bandwidth
    if rate is None or bandwidth is None:
        return _UNKNOWN_SEQS, "as many as most devices gain by (rate or bandwidth of this one is not known)"
    item_bytes = 4 if model.dtype == "float32" else 2
    balanced = rate * 1e3 * item_bytes / (2 * bandwidth)
    value = min(1024, max(64, _floor_power(max(round(4 * balanced), 1))))
    return value, (
        f"{rate:g} TFLOP/s of {dtype} against {bandwidth:g} GB/s: reading weights bounds a decode up to "
        f"{balanced:.0f} sequences, and reading the KV cache beyond"
    )


def _max_model_len(asked: CoreConfiguration, model: ModelFacts) -> Decision:
    name = "max_model_len"
    if asked.max_model_len is None:
        return Decision(name=name, value=str(model.max_model_len), reason="the model's own limit, from its config.json")
    if asked.max_model_len > model.max_model_len:
        raise Refusal(
            f"--max-model-len {asked.max_model_len} is over the model's own limit of {model.max_model_len} "
            f"(max_position_embeddings in config.json); ask for {model.max_model_len} or less"
        )
    return Decision(name=name, value=str(asked.max_model_len), reason="as asked", overridden=True)


def _max_batched_tokens(
    asked: CoreConfiguration, model: ModelFacts, profile: DeviceProfile, room: Room | None, max_num_seqs: int
) -> Decision:
    name = "max_batched_tokens"
    if asked.max_batched_tokens is not None:
        if asked.max_batched_tokens < max_num_seqs:
            raise Refusal(
                f"--max-batched-tokens {asked.max_batched_tokens} is below --max-num-seqs {max_num_seqs}: each running "
                f"sequence needs one token of a step; raise it to {max_num_seqs} or lower --max-num-seqs"
            )
        return Decision(name=name, value=str(asked.max_batched_tokens), reason="as asked", overridden=True)
    if profile.platform == "cpu":
        value, reason = 512, "keeps one step on a CPU near a second"
    else:
        value, reason = _full_step(model, profile)
    if room is not None and model.step_bytes_per_token:
        most = _floor_power(max(_step_share(room, model) // model.step_bytes_per_token, 1))
        if most < value:
            value, reason = most, f"its buffers take a tenth of the {_gib(_left(room, model))} left by the weights"
    if value < max_num_seqs:
        value, reason = max_num_seqs, f"each of {max_num_seqs} running sequences needs one token of a step"
    return Decision(name=name, value=str(value), reason=reason)


def _rate(model: ModelFacts, profile: DeviceProfile) -> tuple[str, float | None]:
    """Of the model's dtype; where that is not known, of the other dtype of sixteen bits, which is as fast."""
    rates = profile.capability.rates
    near = {"bfloat16": "float16", "float16": "bfloat16"}.get(model.dtype, model.dtype)
    dtype = model.dtype if model.dtype in rates else near
    return dtype, rates.get(dtype)


def _full_step(model: ModelFacts, profile: DeviceProfile) -> tuple[int, str]:
    dtype, rate = _rate(model, profile)
    if rate is None or not model.num_parameters:
        return _UNKNOWN_TOKENS, "fills most devices in prefill (the rate of this one is not known)"
    tokens = rate * 1e12 * _PREFILL_EFFICIENCY * _STEP_S / (2 * model.num_parameters)
    value = min(16384, max(512, _floor_power(max(int(tokens), 1))))
    return value, f"{rate:g} TFLOP/s of {dtype} compute it in about {_STEP_S * value / tokens:.2g} s"


def _max_chunk_tokens(asked: CoreConfiguration, budget: int) -> Decision:
    name = "max_chunk_tokens"
    if asked.max_chunk_tokens is not None:
        value = min(asked.max_chunk_tokens, budget)
        reason = "as asked" if value == asked.max_chunk_tokens else f"the whole budget; {asked.max_chunk_tokens} asked"
        return Decision(name=name, value=str(value), reason=reason, overridden=True)
    return Decision(name=name, value=str(budget), reason="a prompt may fill a step when nobody else waits")


def _holders(memory: MemoryFacts) -> str:
    if not memory.holders:
        return ""
    told = ", ".join(f"{name} holds {_gib(size)}" for name, size in memory.holders.items())
    return f"; {told}"


def _gib(num_bytes: int) -> str:
    """In GiB, or in the unit that leaves something to read."""
    if abs(num_bytes) * 100 >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / (1 << 20):.2f} MiB" if abs(num_bytes) >= 1 << 20 else f"{num_bytes / (1 << 10):.1f} KiB"
