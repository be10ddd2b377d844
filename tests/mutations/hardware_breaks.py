"""Breaks of the hardware layer as users meet it: fallback, negotiation, strategies, watching, doctor, containers,
explanations. Profiles and platforms have files of their own.
"""

from broken import Break

MEMORY = ("tests/pure/test_kernel_memory.py",)
REGISTRY = ("tests/pure/test_kernel_registry.py",)
KERNELS = ("tests/faults/test_kernel_faults.py",)
NEGOTIATION = ("tests/pure/test_negotiation.py",)
WATCHER = ("tests/pure/test_watcher.py",)
INSPECTIONS = ("tests/process/test_inspections.py",)
VERIFICATION = "kernels/verification.py"
GUARDED = "device_workers/execution/guarded_kernels.py"
ENGINE = "device_workers/execution/tensor_engine.py"
CHOICES = "kernels/registry.py"
SETTLE = "engine_core/negotiation.py"
POLICIES = "engine_core/policies.py"
CHECKS = "device_workers/inspecting/host_checks.py"

HARDWARE_BREAKS = (
    Break(
        "A9: steps with prompts are as long for small models",
        POLICIES,
        "    value = round(min(max(_READINGS * reading_s, _PROMPT_STEPS_S[0]), longest), 3)\n",
        "    value = longest\n",
        (*NEGOTIATION, "-k", "steps"),
    ),
    Break(
        "P2: two steps in flight though the device is done before the host",
        "engine_core/scheduler.py",
        "        self.device_outruns_host = waited_s < 2 * (build_s + launch_s + sample_s)\n",
        "",
        ("tests/pure/test_scheduling.py", "-k", "p2"),
    ),
    Break(
        "P2: a spare step where the device is the host",
        "engine_core/engine.py",
        "        spare = self._is_asynchronous and self.scheduler.device_outruns_host\n",
        "        spare = self.scheduler.device_outruns_host\n",
        ("tests/pure/test_scheduling.py", "-k", "p2"),
    ),
    # A7: the fallback chain
    Break(
        "A7: what disagrees with its reference serves",
        VERIFICATION,
        "        return None if verdict == AGREES else verdict\n",
        "        return None\n",
        (*KERNELS, "-k", "passed_over and fused_add_rms_norm-wrong"),
    ),
    Break(
        "a death among many kernels leads to another one",
        VERIFICATION,
        "        if not all(map(_lives, marks)):\n",
        "        if False:\n",
        MEMORY,
    ),
    Break(
        "what draws launch is not rehearsed",
        "device_workers/execution/rehearsal.py",
        "    if draws_on_device:\n",
        "    if False:\n",
        ("tests/numerics/test_rehearsal.py", "-k", "qwen3 and eager"),
    ),
    Break(
        "a pinned buffer is filled while its copy runs",
        "device_workers/weights/upload.py",
        "        self._copied[turn] = self._backend.streams.record(self._stream)\n",
        "",
        ("tests/numerics/test_upload.py",),
    ),
    Break(
        "a file that ends early is read as if it were whole",
        "device_workers/weights/upload.py",
        "        if count == 0:\n            raise Refusal(",
        "        if count == 0:\n            return\n            raise Refusal(",
        ("tests/numerics/test_upload.py",),
    ),
    Break(
        "A7: a demotion is forgotten at the next start",
        VERIFICATION,
        "            self._verdicts.put(key, error if isinstance(error, str) else failure_text(error))\n",
        "            self._verdicts.drop(key)\n",
        MEMORY,
    ),
    Break(
        "A7: a full disk demotes a kernel for good",
        VERIFICATION,
        "        if isinstance(error, Exception) and _is_passing(error):\n",
        "        if False:\n",
        MEMORY,
    ),
    Break(
        "A7: one death is enough",
        VERIFICATION,
        "    if len(crashes) < MAX_CRASHES:\n",
        "    if len(crashes) < 1:\n",
        MEMORY,
    ),
    Break(
        "A7: a server writes over what another found",
        VERIFICATION,
        "                self._verdicts = self._read()\n",
        "                self._verdicts = {**self._read(), **self._verdicts}\n",
        MEMORY,
    ),
    Break(
        "A7: two servers write at the same moment",
        VERIFICATION,
        "        fcntl.flock(handle, fcntl.LOCK_EX)\n",
        "",
        MEMORY,
    ),
    Break(
        "A7: a new version of another package keeps its verdicts",
        VERIFICATION,
        "    return code_hash() + package_stamp(package)\n",
        "    return code_hash()\n",
        MEMORY,
    ),
    Break(
        "A7: a kernel in place is called again on what it spoilt",
        GUARDED,
        "            if self._is_in_place:\n",
        "            if False:\n",
        (*KERNELS, "-k", "no_stream_notices and fused_add_rms_norm-penalised"),
    ),
    Break(
        "A7: half penalised logits are penalised again",
        ENGINE,
        "                logits_SV = self._logits_at(inputs.places_S) if recorded is None else recorded\n",
        "                kept = batch.__dict__\n"
        "                logits_SV = kept.setdefault('logits', self._logits_at(inputs.places_S).clone())\n",
        (*KERNELS, "-k", "no_stream_notices and apply_penalties"),
    ),
    Break(
        "A7: a check is recorded instead of run",
        GUARDED,
        "        self._is_recording = True\n",
        "        self._is_recording = False\n",
        (*KERNELS, "-k", "failure_in_the_recording"),
    ),
    Break(
        "A7: a replacement is not told to the core",
        ENGINE,
        "        self._parts.on_kernels(self._kernels.resolutions)\n",
        "",
        (*KERNELS, "-k", "no_stream_notices and embed"),
    ),
    Break(
        "A7: a demotion in the warm-up is not told",
        "device_workers/step_thread.py",
        "        self._resolutions = resolutions\n",
        "",
        (*KERNELS, "-k", "failure_in_the_warm_up"),
    ),
    Break(
        "A7: demoted kernels are missing in the metrics",
        "engine_core/device_metrics.py",
        "            for name, reason in resolution.demoted.items():\n",
        "            for name, reason in ():\n",
        (*KERNELS, "-k", "passed_over and compile"),
    ),
    Break(
        "A7: a kernel may change what it must only read",
        VERIFICATION,
        "        reason = disagreement(name, ours, expected) or meddling(name, ours, expected)\n",
        "        reason = disagreement(name, ours, expected)\n",
        (*KERNELS, "-k", "passed_over and meddles"),
    ),
    Break(
        "A7: another package's kernel passes for the reference",
        "device_workers/platforms/plugins.py",
        "    if implementation.name in taken:\n",
        "    if False:\n",
        ("tests/process/test_platform_choice.py", "-k", "other_packages"),
    ),
    Break(
        "A7: memory that runs out demotes a kernel",
        GUARDED,
        "            if isinstance(error, RuntimeError) and is_exhaustion(error):\n",
        "            if False:\n",
        ("tests/pure/test_guarded_kernels.py",),
    ),
    Break(
        "A7: ranks go on with different kernels",
        GUARDED,
        "        if self._num_ranks > 1 or name in PACKED:\n",
        "        if name in PACKED:\n",
        ("tests/pure/test_guarded_kernels.py",),
    ),
    Break(
        "A7: packed weights are read by another kernel",
        GUARDED,
        "        if self._num_ranks > 1 or name in PACKED:\n",
        "        if self._num_ranks > 1:\n",
        ("tests/pure/test_guarded_kernels.py",),
    ),
    Break(
        "A7: whoever ends two starts demotes a kernel",
        "device_workers/step_thread.py",
        "            self._registry.interrupt()\n",
        "            pass\n",
        (*KERNELS, "-k", "shows_nothing"),
    ),
    # A7b: pins and forbids
    Break(
        "A7b: a pin that fails falls back in silence",
        CHOICES,
        "            if resolution.pinned:\n                raise",
        "            if False:\n                raise",
        REGISTRY,
    ),
    Break(
        "A7b: a pin that fails under load falls back in silence",
        CHOICES,
        "        if resolution.pinned:\n            raise",
        "        if False:\n            raise",
        (*KERNELS, "-k", "under_load_its_step_fails"),
    ),
    Break(
        "A7b: what is forbidden serves",
        CHOICES,
        "    if implementation.name in choices.forbidden:\n",
        "    if False:\n",
        REGISTRY,
    ),
    # A9: negotiation
    Break(
        "A9: a queue ordering that was asked for is passed over",
        POLICIES,
        "    if asked.queue_ordering is not None:\n",
        "    if False:\n",
        NEGOTIATION,
    ),
    Break(
        "A9: more blocks than fit are taken as asked",
        SETTLE,
        "        if asked.num_blocks > fits:\n",
        "        if False:\n",
        NEGOTIATION,
    ),
    Break(
        "A9: the rank that has most decides",
        SETTLE,
        "    least = min(loaded, key=lambda rank: rank.kv_budget_bytes // rank.kv_bytes_per_block)\n",
        "    least = max(loaded, key=lambda rank: rank.kv_budget_bytes // rank.kv_bytes_per_block)\n",
        NEGOTIATION,
    ),
    Break(
        "A9: declared facts go before measured ones",
        POLICIES,
        "    if capability.concurrent_blocks is not None:\n",
        "    if capability.concurrent_blocks is not None and capability.num_multiprocessors is None:\n",
        NEGOTIATION,
    ),
    Break(
        "A9: short ones first where many blocks run",
        POLICIES,
        "value=QueueOrdering.LONG_FIRST, reason=reason",
        "value=QueueOrdering.SHORT_FIRST, reason=reason",
        NEGOTIATION,
    ),
    Break(
        "A9: lengths do not order the queue",
        "engine_core/waiting_line.py",
        "        insort(self._line, sequence, key=_key)\n",
        "        self._line.append(sequence)\n",
        ("tests/pure/test_queue_ordering.py",),
    ),
    # A10: strategies
    Break(
        "A10: the strategy that was negotiated does not go first",
        CHOICES,
        "        if asked is None:\n",
        "        if True:\n",
        REGISTRY,
    ),
    Break(
        "A10: small devices get large tiles",
        POLICIES,
        "    is_small = multiprocessors is not None and multiprocessors <= _SMALL_MULTIPROCESSORS\n",
        "    is_small = False\n",
        NEGOTIATION,
    ),
    Break(
        "A10: bulk copies are not negotiated",
        POLICIES,
        "    if Feature.BULK_TENSOR_COPY not in capability.features:\n",
        "    if True:\n",
        NEGOTIATION,
    ),
    # A12: live refresh
    Break(
        "A12: a slow clock is told at each reading",
        "device_workers/watcher.py",
        "            if is_slow and is_busy and name not in self._slow:\n",
        "            if is_slow and is_busy:\n",
        WATCHER,
    ),
    Break(
        "A12: what we take counts as taken by others",
        "device_workers/watcher.py",
        "        others = memory.total_bytes - memory.free_bytes - memory.ours_bytes\n",
        "        others = memory.total_bytes - memory.free_bytes\n",
        WATCHER,
    ),
    Break(
        "A12: the control loop waits for the driver",
        "device_workers/worker.py",
        "            self._device_watch.start()\n",
        "            self._device_watch._run()\n",
        ("tests/faults/test_watching.py", "-k", "delays_no_token"),
    ),
    Break(
        "A12: a driver that fails ends the watch",
        "device_workers/watcher.py",
        "        except Exception as error:  # whatever a driver or another package's platform raises\n",
        "        except OSError as error:\n",
        ("tests/faults/test_watching.py", "-k", "fails_costs"),
    ),
    Break(
        "A12: health is read and not exported",
        "device_workers/worker.py",
        "        self._health = health\n",
        "",
        ("tests/faults/test_watching.py", "-k", "logged_once"),
    ),
    Break(
        "A12: a leaking worker is killed under its streams",
        "engine_core/core.py",
        "        if is_idle or now - self._growth_s > self.configuration.drain_timeout_s:\n",
        "        if True:\n",
        ("tests/faults/test_memory_growth.py", "-k", "end_well"),
    ),
    Break(
        "A12: a leaking worker waits for streams without end",
        "engine_core/core.py",
        "        if is_idle or now - self._growth_s > self.configuration.drain_timeout_s:\n",
        "        if is_idle:\n",
        ("tests/faults/test_memory_growth.py", "-k", "drain_limit"),
    ),
    Break(
        "A12: growth counts from the first heartbeat",
        "engine_core/growth_watch.py",
        "            if now < self._settled_s or rank not in self._baseline:\n",
        "            if rank not in self._baseline:\n",
        ("tests/faults/test_memory_growth.py", "-k", "settled"),
    ),
    Break(
        "A12: throttling counts as an error",
        "device_workers/platforms/nvml.py",
        "            throttle_reasons=self._throttling(handle),\n            errors=self._memory_errors(handle),\n",
        "            errors=(*self._throttling(handle), *self._memory_errors(handle)),\n",
        ("tests/contracts/test_surfaces.py", "-k", "health_of_an_nvidia"),
    ),
    # A11: measuring
    Break(
        "A11: what is measured is not written",
        "device_workers/inspecting/diagnose.py",
        "            measured[key] = value\n",
        "            measured.setdefault('launch_latency_us', 1.0)\n",
        (*INSPECTIONS, "-k", "TestDiagnose and accepted"),
    ),
    Break(
        "A11: mistakes are found after minutes of measuring",
        "device_workers/inspecting/diagnose.py",
        "    if unknown:\n",
        "    if False:\n",
        (*INSPECTIONS, "-k", "TestDiagnose and mistakes"),
    ),
    # A17: the doctor
    Break(
        "A17: small shared memory passes with several devices",
        CHECKS,
        "    needed = SHARED_MEMORY_SEVERAL if examined.num_ranks > 1 else SHARED_MEMORY_ONE\n",
        "    needed = SHARED_MEMORY_ONE\n",
        (*INSPECTIONS, "-k", "shared_memory_of_several"),
    ),
    Break(
        "A17: an old C library passes",
        CHECKS,
        "    elif is_older(version, GLIBC_MINIMUM):\n",
        "    elif False:\n",
        (*INSPECTIONS, "-k", "TestHostChecks"),
    ),
    Break(
        "A17: nodes that may not be opened pass",
        CHECKS,
        "    closed = [name for name in nodes if not host.may_use(name)]\n",
        "    closed: list[str] = []\n",
        (*INSPECTIONS, "-k", "TestHostChecks"),
    ),
    Break(
        "A17: hardware that stays unused is no failure",
        "device_workers/inspecting/doctor.py",
        "    level = Level.WARN if detected.decision.overridden else Level.FAIL\n",
        "    level = Level.WARN\n",
        (*INSPECTIONS, "-k", "TestDoctor and (driver or unsupported)"),
    ),
    Break(
        "A17: a failure is exit 1",
        "frontend/launch/inspection_commands.py",
        "        return worst\n",
        "        return min(worst, 1)\n",
        (*INSPECTIONS, "-k", "TestDoctor and architecture"),
    ),
    # A17b: containers
    Break(
        "A17b: small shared memory is served",
        "containers/entrypoint.sh",
        'if [ "$found" -lt "$needed" ]; then',
        "if false; then",
        ("tests/containers",),
    ),
    Break(
        "A17b: the doctor's failures do not count",
        "containers/entrypoint.sh",
        '    if [ "$status" -ge 2 ]; then',
        '    if [ "$status" -ge 3 ]; then',
        ("tests/containers",),
    ),
    Break(
        "A17b: traffic comes before the engine is ready",
        "containers/kubernetes.yaml",
        "httpGet: {path: /ready, port: http}",
        "httpGet: {path: /health, port: http}",
        ("tests/containers",),
    ),
    # A18: explain
    Break(
        "A18: explaining imports torch",
        "device_workers/execution/declared_engine.py",
        "from collections.abc import Callable\n",
        "from collections.abc import Callable\n\nimport torch\n",
        ("tests/process/test_explain.py", "-k", "neither_torch"),
    ),
    Break(
        "A18: pins are not explained",
        "device_workers/boot.py",
        "described.registry.resolve(name, profile, asked, described.choices) for name in kernels",
        "described.registry.resolve(name, profile, asked) for name in kernels",
        ("tests/process/test_explain.py", "-k", "pinned"),
    ),
)
