"""The deliberate breaks: what a shortcut could fake, and the tests that must notice."""

from api_breaks import API_BREAKS
from broken import Break
from embedding_breaks import EMBEDDING_BREAKS
from fault_breaks import FAULT_BREAKS
from frontend_breaks import FRONTEND_BREAKS
from grammar_breaks import GRAMMAR_BREAKS
from hardware_breaks import HARDWARE_BREAKS
from hardware_review_breaks import HARDWARE_REVIEW_BREAKS
from module_breaks import MODULE_BREAKS
from numerics_breaks import NUMERICS_BREAKS
from platform_breaks import PLATFORM_BREAKS
from profile_breaks import PROFILE_BREAKS
from suite_breaks import SUITE_BREAKS
from tool_breaks import TOOL_BREAKS
from triton_breaks import TRITON_BREAKS

PROPERTIES = ("tests/pure/test_engine_properties.py", "-m", "not long")
SCHEDULING = ("tests/pure/test_scheduling.py",)

BREAKS = (
    Break(
        "blocks come back while a plan in flight names them",
        "engine_core/sequence_table.py",
        "if self.last_step[sequence.row] <= returned_step]",
        "if True]",
        PROPERTIES,
    ),
    Break(
        "a late token of an ended sequence is delivered",
        "engine_core/commit.py",
        "        is_alive = table.alive[sampled]\n",
        "        is_alive = table.alive[sampled] | True\n",
        PROPERTIES,
    ),
    Break(
        "uncommitted blocks enter the prefix cache",
        "engine_core/sequence_table.py",
        "num_full = min(int(self.computed[row]), int(self.known[row])) // self.block_size",
        "num_full = min(int(self.computed[row]), int(self.known[row])) // self.block_size + 1",
        (*PROPERTIES, "tests/pure/test_scheduling.py"),
    ),
    Break(
        "a salt does not separate",
        "engine_core/prefix_cache.py",
        "            if value is not None\n",
        "            if value is not None and kind != b'salt'\n",
        SCHEDULING,
    ),
    Break(
        "a preempted sequence loses its pending token",
        "engine_core/sequence_table.py",
        "sequence.saved = self.history[row, : self.known[row]].copy()",
        "sequence.saved = self.history[row, : self.known[row] - 1].copy()",
        PROPERTIES,
    ),
    Break(
        "preemption has no bound",
        "engine_core/scheduler.py",
        "victim.reserved = victim.num_preemptions >= RESERVE_AFTER",
        "victim.reserved = False; self._horizon = 1",
        SCHEDULING,
    ),
    Break(
        "a long prompt takes the whole budget",
        "engine_core/scheduler.py",
        "share = left if num_others == 0 else max(left // 2, min(left, MIN_CHUNK))",
        "share = left",
        SCHEDULING,
    ),
    Break(
        "an aborted request sends no terminal message",
        "engine_core/engine.py",
        "            done[-1] = 1\n",
        "",
        PROPERTIES,
    ),
    Break(
        "followers recompute the whole prompt",
        "engine_core/scheduler.py",
        "for block in request.shared_blocks[len(matched) : max_blocks]:",
        "for block in []:",
        SCHEDULING,
    ),
    Break(
        "one that does not fit is passed for ever",
        "engine_core/scheduler.py",
        "return bool(sequence.num_preemptions) or sequence.bypassed >= MAX_BYPASSED",
        "return False",
        SCHEDULING,
    ),
    *HARDWARE_REVIEW_BREAKS,
    *FRONTEND_BREAKS,
    *GRAMMAR_BREAKS,
    *EMBEDDING_BREAKS,
    *API_BREAKS,
    *FAULT_BREAKS,
    *MODULE_BREAKS,
    *NUMERICS_BREAKS,
    *PLATFORM_BREAKS,
    *PROFILE_BREAKS,
    *SUITE_BREAKS,
    *TOOL_BREAKS,
    *TRITON_BREAKS,
    *HARDWARE_BREAKS,
)
