"""The deliberate breaks of the life cycle."""

from broken import Break

DEATHS = ("tests/faults/test_deaths.py",)
STALLS = ("tests/faults/test_stalls.py", "-m", "not long")
SCRIPTED = ("tests/faults/test_scripted_faults.py",)
SHUTDOWN = ("tests/faults/test_shutdown.py",)
LOAD = ("tests/faults/test_load.py", "-m", "not long")

FAULT_BREAKS = (
    Break(
        "C1: a dead frontend's requests run on",
        "engine_core/core.py",
        "                self._lose_frontend(message)\n",
        "                pass\n",
        (*DEATHS, "-k", "dead_frontend and 1-decode"),
    ),
    Break(
        "C3: a lost worker's requests get no terminal",
        "engine_core/core.py",
        "            self._fail(engine.fail_all(",
        "            (engine.fail_all(",
        (*DEATHS, "-k", "engine and worker-decode"),
    ),
    Break(
        "C3: frontends do not hear of a dead core",
        "frontend/launch/supervisor.py",
        "        self._tell_frontends(CoreLost(self.core_incarnation, child.cause()))\n",
        "",
        (*DEATHS, "-k", "engine and core-decode"),
    ),
    Break(
        "C3: one dead rank leaves the others alone",
        "frontend/launch/supervisor.py",
        "            other.kill()\n        if self._core",
        "            pass\n        if self._core",
        (*DEATHS, "-k", "rank and idle"),
    ),
    Break(
        "C5: a long step is a stall, whatever its progress",
        "engine_core/worker_group.py",
        "beat.progress_age_s > limit_s",
        "beat.step_age_s > limit_s",
        (*STALLS, "-k", "long_prefill"),
    ),
    Break(
        "C5: a silent worker is no stall",
        "engine_core/worker_group.py",
        "            if silent_s > limit_s:\n",
        "            if False:\n",
        (*STALLS, "-k", "while_idle"),
    ),
    Break(
        "C5: a hung group is not restarted",
        "engine_core/core.py",
        '            self._control.send(GroupFault(self.group.generation, f"it hung: {stall}"))\n',
        "",
        (*STALLS, "-k", "hung_step"),
    ),
    Break(
        "C5: only a ready engine can hang",
        "engine_core/core.py",
        "        stall = self.group.stall(limit_s, now) if self.group.is_ready else None\n",
        "        stall = self.group.stall(limit_s, now) if self._is_booted else None\n",
        ("tests/faults/test_stalls.py", "-k", "boot_token"),
    ),
    Break(
        "C5: a hung core is not restarted",
        "frontend/launch/supervisor.py",
        "            self._kill_silent()\n",
        "",
        (*STALLS, "-k", "core_that_hangs"),
    ),
    Break(
        "C8: ranks are not compared",
        "engine_core/worker_group.py",
        "            if other.tokens_hash[0] != first.tokens_hash[0]:\n",
        "            if False:\n",
        (*SCRIPTED, "-k", "disagree"),
    ),
    Break(
        "M6: a failed step fails nobody",
        "engine_core/commit.py",
        "        return News([], failures, [failure.request for failure in failures])\n",
        "        return News([], [], [failure.request for failure in failures])\n",
        (*SCRIPTED, "-k", "failed_step and fail_at"),
    ),
    Break(
        "one broken row fails the whole step",
        "engine_core/commit.py",
        "        for row in result.rows[(result.flags & ResultFlag.INVALID) != 0]:\n",
        "        for row in result.rows if (result.flags & ResultFlag.INVALID).any() else ():\n",
        (*SCRIPTED, "-k", "numbers"),
    ),
    Break(
        "C6: a drain leaves /ready as it was",
        "frontend/http/process.py",
        "                self._serving.is_draining = True\n                self.start_task(self._drain()",
        "                self.start_task(self._drain()",
        (*SHUTDOWN, "-k", "lets_live and 1"),
    ),
    Break(
        "C6: the limit of a drain cuts streams without a word",
        "frontend/http/process.py",
        '        self._client.fail_all(RequestFailed(FailKind.SHUTDOWN, "the server is shutting down"))\n',
        "        os._exit(0)\n",
        (*SHUTDOWN, "-k", "outlasts and limit"),
    ),
    Break(
        "O4: each frontend tells its own numbers",
        "frontend/http/routes/state.py",
        "            self._last_metrics = render(await serving.client.metrics())\n",
        "            await serving.client.metrics()\n            self._last_metrics = render(families)\n",
        (*LOAD, "-k", "o4"),
    ),
    Break(
        "P6: the queue has no end",
        "engine_core/admission.py",
        "    if door.max_queued_requests is not None and num_queued >= door.max_queued_requests:\n",
        "    if False:\n",
        (*LOAD, "-k", "p6"),
    ),
    Break(
        "an unread output stops the server",
        "frontend/launch/outlet.py",
        "    return bool(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))\n",
        "    return True\n",
        ("tests/faults/test_unread_output.py", "-k", "stops", "--timeout", "30"),
    ),
    Break(
        "M9: a library built for one start is left behind",
        "kernels/in_cpp/library.py",
        "        discard_temporary(path)\n",
        "",
        ("tests/faults/test_storage.py", "-k", "read_only"),
    ),
)
