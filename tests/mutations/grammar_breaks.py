"""The deliberate breaks of constrained answers."""

from broken import Break

CONSTRAINTS = ("tests/pure/test_constraints.py",)
SCHEMAS = ("tests/pure/test_json_schemas.py", "-m", "not long")
COMPILER = ("tests/process/test_grammar_compiler.py",)
ENGINE = ("tests/numerics/test_constrained_engine.py",)
SERVED = ("tests/api/test_structured_outputs.py", "-m", "not long")

GRAMMAR_BREAKS = (
    Break(
        "masks are not applied to logits",
        "device_workers/execution/sampler.py",
        "            self._mask(logits_SV, rows, masks)\n",
        "            pass\n",
        (*ENGINE, "-k", "number_of_rows"),
    ),
    Break(
        "only the first rows of a batch are masked",
        "device_workers/execution/sampler.py",
        "        for begin in range(0, len(masks.rows), _ROWS_UNPACKED):\n",
        "        for begin in range(0, 1):\n",
        (*ENGINE, "-k", "number_of_rows"),
    ),
    Break(
        "Q6: ids behind the vocabulary are free before the mark",
        "engine_core/constraint.py",
        "            words[-1] = (1 << used) - 1\n",
        "            pass\n",
        CONSTRAINTS,
    ),
    Break(
        "choices share one state",
        "engine_core/constraint.py",
        "grammar.matcher.deep_copy()",
        "grammar.matcher",
        CONSTRAINTS,
    ),
    Break(
        "a preempted sequence's tokens are given to its grammar again",
        "engine_core/request.py",
        "        if self._constraint is None:\n",
        "        if self._constraint and self.num_preemptions:\n            self._constraint.num_given = 0\n"
        "        if self._constraint is None:\n",
        (*CONSTRAINTS, "-k", "preemption_happens"),
    ),
    Break(
        "masks leave out the tokens committed last",
        "engine_core/masks.py",
        "table.history[row, begin : table.known[row]].tolist()",
        "table.history[row, begin : table.known[row] - 1].tolist()",
        CONSTRAINTS,
    ),
    Break(
        "min_tokens does not hold under a grammar",
        "engine_core/constraint.py",
        "        is_short = self._num_outputs < self._min_tokens\n",
        "        is_short = False\n",
        CONSTRAINTS,
    ),
    Break(
        "a complete answer below min_tokens cannot end",
        "engine_core/sequence_table.py",
        "(0 if request.grammar else sampling.min_tokens)",
        "sampling.min_tokens",
        (*SERVED, "-k", "ends_by"),
    ),
    Break(
        "a complete answer goes on where end tokens are ignored",
        "engine_core/request.py",
        "self.sampling.end_token_ids if self.compiled is None else self.compiled.end_ids",
        "self.sampling.end_token_ids",
        (*SERVED, "-k", "ends_by"),
    ),
    Break(
        "T5: the mark is only found where it comes at once",
        "engine_core/constraint.py",
        "seen[max(len(seen) - len(mark) + 1, 0) :]",
        "[]",
        CONSTRAINTS,
    ),
    Break(
        "T5: an answer may end before its constrained part",
        "engine_core/constraint.py",
        "            words[-1] = (1 << used) - 1\n        self._ends.take_from(words)\n",
        "            words[-1] = (1 << used) - 1\n",
        CONSTRAINTS,
    ),
    Break(
        "T8: schemas are given as they are",
        "engine_core/grammar_text.py",
        "grammar_from_json_schema(closed(schema)",
        "grammar_from_json_schema(schema",
        SCHEMAS,
    ),
    Break(
        "T8: names may be written in escapes",
        "engine_core/grammar_text.py",
        '    "json_allowed_escapes": ESCAPES,\n',
        "",
        SCHEMAS,
    ),
    Break(
        "T8: keywords that cannot be honoured are ignored",
        "engine_core/grammar_text.py",
        '    "lenient": False,\n',
        '    "lenient": True,\n',
        CONSTRAINTS,
    ),
    Break(
        "T8: oneOf is taken for anyOf",
        "engine_core/grammar_text.py",
        '    "coerce_one_of": False,\n',
        '    "coerce_one_of": True,\n',
        SCHEMAS,
    ),
    Break(
        "T9: white space without bound",
        "engine_core/grammar_text.py",
        r'r"[ ]|\n[ ]{0,12}"',
        r'r"[ \n]+"',
        CONSTRAINTS,
    ),
    Break(
        "T7: a trial may run for ever",
        "engine_core/grammar_trial.py",
        "if trial.ends_s <= time.monotonic()]",
        "if False]",
        COMPILER,
    ),
    Break(
        "P8: every request compiles its own",
        "engine_core/grammar_compiler.py",
        "        found = self._cache.get(key)\n",
        "        found = None\n",
        COMPILER,
    ),
    Break(
        "compiled grammars pile up",
        "engine_core/grammar_compiler.py",
        "            self._cache.popitem(last=False)\n",
        "            break\n",
        COMPILER,
    ),
    Break(
        "a dead process of trials is never replaced",
        "engine_core/grammar_compiler.py",
        "            self._process = None\n            code",
        "            code",
        COMPILER,
    ),
    Break(
        "masks for a step that failed end the worker",
        "device_workers/step_thread.py",
        "        return int(masks.step[0]) <= self._failed_step\n",
        "        return False\n",
        ("tests/process/test_workers.py", "-k", "masks"),
    ),
    Break(
        "the null platform does what it likes",
        "device_workers/platforms/null_model.py",
        "        if masks is not None and len(masks.rows):\n",
        "        if False:\n",
        CONSTRAINTS,
    ),
    Break(
        "a new core is not told the vocabulary",
        "frontend/client/engine_client.py",
        "                self._vocabulary_told_to = incarnation\n",
        "                self._vocabulary_told_to = 1 << 60\n",
        (*SERVED, "-k", "dead_core"),
    ),
    Break(
        "of two constraints one is dropped",
        "frontend/client/constraints.py",
        "    if len(found) > 1:\n",
        "    if False:\n",
        (*SERVED, "-k", "cannot_be_honoured"),
    ),
    Break(
        "constraints of any size are taken",
        "frontend/client/constraints.py",
        "    if num_bytes > limits.max_grammar_bytes:\n",
        "    if False:\n",
        (*SERVED, "-k", "cannot_be_honoured"),
    ),
    Break(
        "C2: a request that leaves while its grammar is compiled is queued all the same",
        "engine_core/core.py",
        "        if not request.is_over:\n            engine.queue(request)\n",
        "        if True:\n            engine.queue(request)\n",
        (*SERVED, "-k", "who_leaves"),
    ),
)
