"""The deliberate breaks of negotiation's promises and of how commands end."""

from broken import Break

NEGOTIATION = ("tests/pure/test_negotiation_properties.py", "tests/pure/test_negotiation.py")
ENDS = ("tests/process/test_command_ends.py",)
EXPLAINED = ("tests/process/test_explain.py",)

HARDWARE_REVIEW_BREAKS = (
    Break(
        "A9: estimates forget what loading adds",
        "ipc/facts.py",
        "return self.weight_bytes + self.weight_bytes // _PACKING_DIVISOR",
        "return self.weight_bytes",
        ("tests/process/test_explain.py", "-k", "as_reviewed"),
    ),
    Break(
        "M1: the named value is a little more than fits",
        "engine_core/negotiation.py",
        "    return low\n",
        "    return low + max(low // 8, 1)\n",
        NEGOTIATION,
    ),
    Break(
        "A9: unlike devices share a model",
        "engine_core/negotiation.py",
        "    if other is not None:\n",
        "    if False:\n",
        NEGOTIATION,
    ),
    Break(
        "A9: ranks on one processor plan with all of its memory",
        "device_workers/memory/memory_plan.py",
        "max(spendable, 0) // num_sharing",
        "max(spendable, 0)",
        (*EXPLAINED, "-k", "share"),
    ),
    Break(
        "A10: a strategy is planned that no kernel follows here",
        "engine_core/policies.py",
        "    if AttentionStrategy.BULK_COPY in misfits:\n",
        "    if False:\n",
        (*EXPLAINED, "-k", "bulk_copies"),
    ),
    Break(
        "A18: a declared device and another --platform are both taken",
        "device_workers/boot.py",
        "    if forced not in (None, profile.platform):\n",
        "    if False:\n",
        (*ENDS, "-k", "mistakes"),
    ),
    Break(
        "D11: a worker that looks for ever is waited for",
        "frontend/launch/inspections.py",
        "call_later(self._silence_limit_s, self._give_up)",
        "call_later(1e6, self._give_up)",
        (*ENDS, "-k", "hangs"),
    ),
    Break(
        "A17: an interrupted command leaves a traceback",
        "frontend/launch/ending.py",
        "    except KeyboardInterrupt:\n",
        "    except ZeroDivisionError:\n",
        (*ENDS, "-k", "asked_for"),
    ),
    Break(
        "a background job does not hear that it is to end",
        "frontend/launch/ending.py",
        "if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:",
        "if False:",
        (*ENDS, "-k", "asked_for"),
    ),
    Break(
        "A17: JSON in the order of the day",
        "frontend/launch/tables.py",
        ', order="deterministic"',
        "",
        (*ENDS, "-k", "same_facts"),
    ),
)
