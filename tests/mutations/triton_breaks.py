"""Breaks of the Triton kernels, their choice and the record of where they compile (rows A5, A6, A10, A16, D5)."""

from broken import Break

KERNELS = "kernels/in_triton"
INTERPRETED = ("tests/numerics/test_triton_kernels.py", "-m", "not long", "-k")
REGISTRY = ("tests/pure/test_kernel_registry.py",)
TABLE = ("tests/pure/test_triton_configurations.py",)
FIRST_CHUNKS = ("tests/numerics/test_first_chunk_attention.py",)
MATRIX = ("tests/numerics/test_portability.py", "-k")

TRITON_BREAKS = (
    Break(
        "A5: a launch has too few tiles for what is left over",
        f"{KERNELS}/paged_attention.py",
        "grid = ((num_tokens // tokens + num_sequences) * k_cache.shape[2],)",
        "grid = (max(1, num_tokens // tokens) * k_cache.shape[2],)",
        (*INTERPRETED, "agrees_with_its_reference and lean"),
    ),
    Break(
        "A6: shared memory is not asked for",
        "kernels/implementation.py",
        "    if device_has is not None and device_has < shared:\n",
        "    if False:\n",
        REGISTRY,
    ),
    Break(
        "A6: one is chosen where it is not offered",
        "kernels/implementation.py",
        'return None if reason is None else f"not offered on {architecture}: {reason}"',
        "return None",
        REGISTRY,
    ),
    Break(
        "A6: a measured choice is taken unseen",
        f"{KERNELS}/configurations.py",
        "        _check(name, field, value, default)\n",
        "        pass\n",
        TABLE,
    ),
    Break(
        "A10: the strategy asked for does not go first",
        "kernels/registry.py",
        "key=lambda candidate: candidate.metadata.strategy is not asked",
        "key=lambda candidate: candidate.metadata.strategy is asked",
        REGISTRY,
    ),
    Break(
        "A10: parts of a decode are added up as if equal",
        f"{KERNELS}/paged_attention.py",
        "    share = tl.exp2(most - tl.max(most, 0))\n",
        "    share = tl.where(has_keys, 1.0, 0.0)\n",
        (*INTERPRETED, "long_contexts and tiled"),
    ),
    Break(
        "A10: a chunk looks behind its window",
        f"{KERNELS}/paged_attention.py",
        "            seen = seen & (distance < window)\n",
        "            seen = seen & (distance < window + 1)\n",
        (*INTERPRETED, "long_contexts and lean"),
    ),
    Break(
        "A10: a bulk copy forgets where in the block it is",
        f"{KERNELS}/paged_attention.py",
        "        slot = tl.load(table + start // S) * S + start % S\n",
        "        slot = tl.load(table + start // S) * S\n",
        (*INTERPRETED, "block_sizes and bulk"),
    ),
    Break(
        "A10: a chunk takes steps for seen by all that some rows have left behind",
        f"{KERNELS}/paged_attention.py",
        "whole = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, all_see)",
        "whole = tl.minimum(begin, all_see)",
        (*INTERPRETED, "long_contexts and bulk"),
    ),
    Break(
        "A10: a chunk on a cached prefix goes for a first one",
        "kernels/implementation.py",
        "((num_queries >= least) & (num_queries == self.kv_lengths)).nonzero()",
        "(num_queries >= least).nonzero()",
        FIRST_CHUNKS,
    ),
    Break(
        "A10: a run behind a first chunk keeps its starts",
        "kernels/in_torch/first_chunk_attention.py",
        "(rows.clone(), starts - begin, lengths.clone())",
        "(rows.clone(), starts, lengths.clone())",
        FIRST_CHUNKS,
    ),
    Break(
        "A10: what uses a forbidden kernel is not forbidden",
        "kernels/registry.py",
        "    parts = sorted(implementation.metadata.uses & choices.forbidden)\n",
        "    parts: list[str] = []\n",
        TABLE,
    ),
    Break(
        "A16: spilled registers are no fault",
        "tools/compile_matrix.py",
        '    if entry["spilled"]:\n',
        "    if False:\n",
        (*MATRIX, "what_makes_a_cell_red"),
    ),
    Break(
        "A16: what the compiler complains of is not read",
        "tools/compile_matrix.py",
        'if "error:" in text]',
        'if "fatal:" in text]',
        (*MATRIX, "only_complains"),
    ),
    Break(
        "A16: a kernel that changed keeps its old numbers",
        "tools/compile_matrix.py",
        "parts = (code_of(self.kernel.fn.__module__), ",
        'parts = ("", ',
        (*MATRIX, "fingerprints"),
    ),
    Break(
        "A16: a kernel changes and the record does not",
        f"{KERNELS}/activation.py",
        "    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)",
        "    silu = (tl.sigmoid(wide) * wide).to(gate.dtype)",
        (*MATRIX, "current_complete"),
    ),
    Break(
        "D5: head sizes beyond 128 are refused",
        "kernels/catalog.py",
        "strategy=strategy, max_head_dim=256,",
        "strategy=strategy, max_head_dim=128,",
        (*INTERPRETED, "head_sizes and 160"),
    ),
    Break(
        "D5: a head that is no power of two rotates around the padded middle",
        f"{KERNELS}/rotary.py",
        '            "HALF": half,\n',
        '            "HALF": next_power_of_two(half) if half > 40 else half,\n',
        (*INTERPRETED, "head_sizes and 112"),
    ),
    Break(
        "a draw has other bits than the reference's",
        f"{KERNELS}/philox.py",
        "low1, high0 ^ c3 ^ k1, low0",
        "low1, high0 ^ c3 ^ k0, low0",
        (*INTERPRETED, "exactness and draws"),
    ),
    Break(
        "the largest noise is made from a rounded 1 - v",
        f"{KERNELS}/philox.py",
        "tl.where(exponent == 0, -v, _rest(other, exponent))",
        "_rest(other, exponent)",
        (*INTERPRETED, "exactness and draws"),
    ),
    Break(
        "a part of a row is drawn from with the words of another",
        f"{KERNELS}/sampling.py",
        "first = (begin // 1024) * 4096 + begin % 1024",
        "first = (begin // 1024) * 4096 + begin % 512",
        (*INTERPRETED, "exactness and drawn_in_parts"),
    ),
    Break(
        "a program that adds up shares leaves its counter",
        f"{KERNELS}/linear.py",
        "            tl.store(num_arrived + block, 0)\n",
        "            pass\n",
        (*INTERPRETED, "exactness and linears"),
    ),
    Break(
        "inputs beyond the last are multiplied",
        f"{KERNELS}/linear.py",
        "            is_token = is_token & is_input[:, None]\n",
        "            pass\n",
        (*INTERPRETED, "exactness and linears"),
    ),
    Break(
        "ties at the edge of the nucleus are cut",
        f"{KERNELS}/sampling.py",
        "tl.where(key[:, None] > ends[None, :], weight[:, None], 0.0)",
        "tl.where(key[:, None] >= ends[None, :], weight[:, None], 0.0)",
        (*INTERPRETED, "exactness and sampled_rows"),
    ),
    Break(
        "halves between two values of e4m3 go up",
        f"{KERNELS}/quantize_fp8.py",
        "(bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20",
        "(bits + 0x80000) >> 20",
        (*INTERPRETED, "exactness and bfloat16"),
    ),
)
