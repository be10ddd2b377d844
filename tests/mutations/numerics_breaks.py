"""Breaks of what the model computes, each of which some way of running a request would show and another would hide."""

from broken import Break

INVARIANCE = ("tests/numerics/test_batch_invariance.py",)
VARIANTS = ("tests/numerics/test_engine_variants.py",)
KERNELS = ("tests/numerics/test_kernels.py",)
RULES = ("tests/pure/test_device_rules.py",)

NUMERICS_BREAKS = (
    Break(
        "Q3: one or two rows are multiplied in another order",
        "kernels/in_cpp/kernels.cpp",
        "  if (M > 2 || alike) {",
        "  if (M > 2) {",
        (*INVARIANCE, "-k", "products"),
    ),
    Break(
        "Q3: a decode attends in another order than a prompt",
        "kernels/in_cpp/kernels.cpp",
        "else if (count == 1 && !s.alike) decode_rows(",
        "else if (count == 1) decode_rows(",
        (*INVARIANCE, "-k", "attention"),
    ),
    Break(
        "Q3: tiles of a window begin where the chunk does",
        "kernels/in_cpp/kernels.cpp",
        "std::max<int64_t>(0, position - s.window + 1) / kTile * kTile : 0;",
        "std::max<int64_t>(0, position - s.window + 1) : 0;",
        (*INVARIANCE, "-k", "attention"),
    ),
    Break(
        "Q3: kernels are not told that they must not depend on the batch",
        "device_workers/models/facts.py",
        "        batch_invariant=settled.batch_invariant,\n",
        "",
        ("tests/api/test_batch_invariance.py", "-k", "greedy"),
    ),
    Break(
        "Q3: kernels that depend on the batch are taken all the same",
        "kernels/implementation.py",
        "    if problem.batch_invariant and metadata.depends_on_batch:\n",
        "    if False:\n",
        (*INVARIANCE, "-k", "refused"),
    ),
    Break(
        "rotary positions begin at nought after a prefix hit",
        "device_workers/execution/batch.py",
        '        host["positions"][:num_tokens] = positions\n',
        "        is_later = (counts > 1) & (starts > 0)\n"
        '        host["positions"][:num_tokens] = positions - (starts * is_later)[item_of_token]\n',
        ("tests/numerics/test_whole_engine.py", "-k", "from_the_prefix_cache"),
    ),
    Break(
        "each query head reads the key head of its own number",
        "kernels/in_cpp/kernels.cpp",
        "const T* from = q + (g * group + h) * D;",
        "const T* from = q + (h * s.G + g) * D;",
        (*VARIANTS, "-k", "alone"),
    ),
    Break(
        "a window is ignored in decode",
        "kernels/in_cpp/kernels.cpp",
        "return window ? std::max<int64_t>(0, position - window + 1) : 0;",
        "return 0;",
        (*VARIANTS, "-k", "alone"),
    ),
    Break(
        "log-probabilities are of the shaped logits",
        "device_workers/execution/sampler.py",
        "raw = logits_SV[self._link.send(wants_logprobs)] if len(wants_logprobs) else None\n",
        "raw = None\n        if len(wants_logprobs):\n"
        "            self._shape(logits_SV, rows, lengths, flags, table, masks)\n"
        "            raw = logits_SV[self._link.send(wants_logprobs)]\n",
        ("tests/numerics/test_whole_engine.py", "-k", "raw_logits"),
    ),
    Break(
        "penalties forget what was said before a preemption",
        "engine_core/plan_builder.py",
        "history[sequence.row, :known] for sequence, known in with_history",
        "np.where(np.arange(known) < sequence.request.prompt_length, history[sequence.row, :known], 0)"
        " for sequence, known in with_history",
        (*VARIANTS, "-k", "penalties_after"),
    ),
    Break(
        "prompt log-probabilities are reported again after a preemption",
        "engine_core/scheduler.py",
        "        if start < sent:  # recomputed after a preemption: end the chunk where reporting goes on\n",
        "        if False:\n",
        (*VARIANTS, "-k", "logprobs"),
    ),
    Break(
        "a chunk's last position samples though the prompt goes on",
        "engine_core/scheduler.py",
        "        elif stop == table.known[row]:\n",
        "        elif stop >= table.known[row] - 1:\n",
        (*VARIANTS, "-k", "mixed"),
    ),
    Break(
        "a draw is keyed by the row instead of the position",
        "device_workers/execution/batch.py",
        'host["draw_positions"][:num_sampled] = lengths\n',
        'host["draw_positions"][:num_sampled] = rows\n',
        (*VARIANTS, "-k", "seed_survives"),
    ),
    Break(
        "choices of a request draw alike",
        "device_workers/execution/batch.py",
        '    "choices": (np.int32, "choices"),\n',
        '    "choices": (np.int32, "min_lengths"),\n',
        (*VARIANTS, "-k", "three_choices"),
    ),
    Break(
        "padding ids may be sampled",
        "device_workers/models/facts.py",
        "    return min(max(known, added), config.vocab_size) or config.vocab_size",
        "    return config.vocab_size",
        (*VARIANTS, "-k", "padding"),
    ),
    Break(
        "float32 weights are rounded to bfloat16",
        "kernels/in_cpp/launches.py",
        "return weight.dtype is torch.float32 and not bool((weight.view(torch.int32) & 0xFFFF).any())",
        "return weight.dtype is torch.float32",
        (*VARIANTS, "-k", "alone"),
    ),
    Break(
        "the last part of a long sequence is dropped",
        "kernels/in_cpp/kernels.cpp",
        "for (int64_t other = 1; other < parts; ++other) merge(",
        "for (int64_t other = 1; other < parts - 1; ++other) merge(",
        (*KERNELS, "-k", "parts"),
    ),
    Break(
        "block ids are taken on trust",
        "device_workers/execution/row_table.py",
        "ids.max() < num_blocks)",
        "ids.max() < 2**31)",
        RULES,
    ),
    Break(
        "a row keeps the reach of its last tenant",
        "device_workers/execution/row_table.py",
        "        self.num_granted[plan.new_rows] = 0\n",
        "",
        RULES,
    ),
    Break(
        "ranks add the bias each",
        "device_workers/models/decoder.py",
        "if has_bias and rank == 0 else None",
        "if has_bias else None",
        ("tests/numerics/test_tensor_parallel.py", "-k", "biases"),
    ),
)
