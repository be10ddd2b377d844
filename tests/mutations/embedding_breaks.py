"""The deliberate breaks of vectors, scores and rankings."""

from broken import Break

ENCODINGS = ("tests/pure/test_encodings.py",)
ENCODERS = ("tests/numerics/test_encoders.py",)
DECODERS = ("tests/numerics/test_decoder_embeddings.py",)
SERVED = ("tests/api/test_embeddings.py",)
DEATHS = ("tests/faults/test_deaths_under_vectors.py",)
RERANKER = ("tests/api/test_reranker.py",)

EMBEDDING_BREAKS = (
    Break(
        "E1: a cut vector is not normalised again",
        "frontend/client/vectors.py",
        "        cut = vector[: self.num_dimensions]\n        if not self.normalizes:\n            return cut\n",
        "        cut = vector[: self.num_dimensions]\n        if not self.normalizes or len(cut) < len(vector):\n"
        "            return cut\n",
        (*ENCODINGS, "-k", "e1"),
    ),
    Break(
        "E1: dimensions are ignored where the model allows no cut",
        "frontend/client/vectors.py",
        "    if dimensions is None or dimensions == full:\n",
        "    if dimensions is None or dimensions == full or text.matryoshka is None:\n",
        (*ENCODINGS, "-k", "e1"),
    ),
    Break(
        "E2: base64 holds numbers of twice the width",
        "frontend/http/routes/vectors.py",
        'np.ascontiguousarray(vector, "<f4")',
        'np.ascontiguousarray(vector, "<f8")',
        (*SERVED, "-k", "e2"),
    ),
    Break(
        "E2: base64 is ignored",
        "frontend/http/routes/vectors.py",
        "    if is_base64:\n",
        "    if False:\n",
        (*SERVED, "-k", "e2"),
    ),
    Break(
        "E3: vectors are made in whatever dtype is fast here",
        "device_workers/dtype_choice.py",
        '    others = ("float32",) if makes_vectors else ("float32", "bfloat16")\n',
        '    others = ("float32", "bfloat16")\n',
        ("tests/pure/test_device_rules.py",),
    ),
    Break(
        "E3: in a batch the last token of a text is left out",
        "device_workers/models/encoding.py",
        "[:, None] + np.arange(length)\n",
        "[:, None] + np.arange(length) % max(length - 1, 1)\n",
        (*ENCODERS, "-k", "equal_the_reference"),
    ),
    Break(
        "E3: tokens of an encoder see only what is before them",
        "device_workers/models/encoding.py",
        "scaled_dot_product_attention(q, k, v)",
        "scaled_dot_product_attention(q, k, v, is_causal=True)",
        (*ENCODERS, "-k", "equal_the_reference"),
    ),
    Break(
        "E3: the first token is pooled, whatever the files say",
        "device_workers/models/encoder.py",
        "        self._pool = _POOLS[config.pooling.kind]\n",
        "        self._pool = pool_first\n",
        (*ENCODERS, "-k", "equal_the_reference"),
    ),
    Break(
        "E3: a model that normalises is not normalised",
        "device_workers/models/embedding_files.py",
        'normalizes="Normalize" in folders',
        "normalizes=False",
        (*ENCODERS, "-k", "files_say"),
    ),
    Break(
        "E3: positions of RoBERTa begin at 0",
        "device_workers/models/encoder.py",
        "inputs.positions + self._config.first_position",
        "inputs.positions",
        (*ENCODERS, "-k", "roberta"),
    ),
    Break(
        "E3: a decoder's vector is taken before the last norm",
        "device_workers/models/decoder.py",
        "        return normed.float()\n",
        "        return residual_RD.float()\n",
        (*DECODERS, "-k", "e3"),
    ),
    Break(
        "E3: a decoder pools where its chunk begins",
        "device_workers/execution/tensor_engine.py",
        "places = self._link.send(batch.ends[items].astype(np.int64) - 1)",
        "places = self._link.send(batch.ends[items].astype(np.int64) - batch.lengths[items])",
        (*DECODERS, "-k", "e3"),
    ),
    Break(
        "E4: the tokenizer's ends are left out",
        "frontend/text/embedding_text.py",
        "ids = tokenizer.encode(whole, add_special_tokens=True)",
        "ids = tokenizer.encode(whole, add_special_tokens=False)",
        (*SERVED, "-k", "e4 or e3"),
    ),
    Break(
        "E4: a named prompt is read and not used",
        "frontend/client/embedder.py",
        "        return known.prompts[wishes.prompt_name]\n",
        "        return known.default_prompt\n",
        (*SERVED, "-k", "e4_a_prompt"),
    ),
    Break(
        "E5: a text over the limit is cut in silence",
        "frontend/client/embedder.py",
        "    if asked is None:\n        return None\n",
        "    if asked is None:\n        return limit\n",
        (*SERVED, "-k", "e5"),
    ),
    Break(
        "E5: truncation loses the tokenizer's last token",
        "frontend/text/embedding_text.py",
        "            return [*ids[: before + kept], *ids[before + len(content) :]][:max_tokens]\n",
        "            return ids[:max_tokens]\n",
        (*ENCODINGS, "-k", "keeps_the_tokenizers_ends"),
    ),
    Break(
        "a step of an encoder takes a text in part",
        "engine_core/scheduler.py",
        "            if len(tokens) > left and not builder.is_empty:\n                return\n",
        "            tokens = tokens[: max(left, 1)] if not builder.is_empty else tokens\n"
        "            if left <= 0:\n                return\n",
        ENCODINGS,
    ),
    Break(
        "a worker that keeps no blocks is not taken back by a new core",
        "engine_core/worker_group.py",
        "num_blocks is not None for settled",
        "num_blocks for settled",
        (*DEATHS, "-k", "core"),
    ),
    Break(
        "a vector that is not finite goes out",
        "engine_core/commit.py",
        "            if not np.isfinite(vector).all():\n",
        "            if False:\n",
        (*ENCODINGS, "-k", "not_finite"),
    ),
    Break(
        "rankings keep the order of the documents",
        "frontend/http/routes/vectors.py",
        "key=lambda place: -scored.scores[place]",
        "key=lambda place: place",
        (*SERVED, "-k", "rankings"),
    ),
    Break(
        "a reranker's question knows no instruction of its request",
        "frontend/text/judge.py",
        "{instruction or INSTRUCTION}",
        "{INSTRUCTION}",
        (*RERANKER, "-k", "e4"),
    ),
    Break(
        "a reranker says how likely no is",
        "frontend/client/judging.py",
        "math.exp(min(no - yes, 700.0))",
        "math.exp(min(yes - no, 700.0))",
        (*RERANKER, "-k", "e3"),
    ),
    Break(
        "a document may forge the end of a reranker's question",
        "frontend/text/judge.py",
        "self.template.render(messages, arguments=_ARGUMENTS)",
        "self.template.render(messages, arguments=_ARGUMENTS, control_tokens_in_content=True)",
        (*RERANKER, "-k", "stays_text"),
    ),
    Break(
        "a model of vectors is asked for tokens",
        "frontend/http/serving.py",
        "        if limits is not None and not limits.generates:\n",
        "        if False:\n",
        (*SERVED, "-k", "refuses_the_rest"),
    ),
)
