"""Deliberate breaks of live devices, streams and out-of-tree platforms (rows A4, A8, A15), and of the suite that judges
them: a clause that no longer judges lets a broken platform pass.
"""

from broken import Break

COMMAND_LINE = "trimaran.device_workers.contract_suite.command_line"
"""The plug-in that an installation loads: broken, it would keep the run that shall notice from starting."""
SUITE = "device_workers/contract_suite"
PROCESSOR = ("tests/contract_suite/test_suite.py::test_the_processor",)
NULL = ("tests/contract_suite/test_suite.py::test_the_null_platform_keeps_its_life_cycle",)
EXAMPLE = ("tests/contract_suite/test_example_platform.py",)


def broken_one(name: str) -> tuple[str, ...]:
    return (f"tests/contract_suite/test_broken_platforms.py::test_a_broken_one_fails_by_name[{name}]",)


SUITE_BREAKS = (
    Break(
        "A4: memory lies where it lies",
        "device_workers/memory/memory_pool.py",
        "        begin = -whole.data_ptr() % alignment_bytes\n",
        "        begin = 0\n",
        PROCESSOR,
    ),
    Break(
        "A4: released memory still counts",
        "device_workers/memory/memory_pool.py",
        "        self._held[kind] -= num_bytes\n",
        "        self._held[kind] -= 0\n",
        PROCESSOR,
    ),
    Break(
        "A4: exhaustion in torch's words",
        "device_workers/memory/exhaustion.py",
        "        raise MemoryError(str(error)) from None\n",
        "        raise RuntimeError(str(error)) from None\n",
        PROCESSOR,
    ),
    Break(
        "A4: an empty recording is taken",
        "device_workers/platforms/cpu.py",
        "        if recording.num_launches == 0:\n",
        "        if recording.num_launches < 0:\n",
        PROCESSOR,
    ),
    Break(
        "A4: the sum of halves stays in the wider copy",
        "device_workers/platforms/gloo.py",
        "        tensor.copy_(wide)\n",
        "",
        PROCESSOR,
    ),
    Break(
        "A4: the suite passes a leak over",
        f"{SUITE}/test_memory.py",
        "        except MemoryError as error:\n",
        "        except MemoryError as error:\n            return\n",
        broken_one("leaking"),
    ),
    Break(
        "A4: the suite compares a replay with nothing",
        f"{SUITE}/test_graphs.py",
        "        self.out.fill_(_POISON)\n        self.subject",
        "        self.subject",
        broken_one("silent"),
    ),
    Break(
        "A8: the suite waits for the device before it believes an event",
        f"{SUITE}/test_streams.py",
        '        found = subject.seen_elsewhere(place)\n        demand(_all(found, value), "an event said',
        '        found = subject.read(place)\n        demand(_all(found, value), "an event said',
        broken_one("early"),
    ),
    Break(
        "A8: the suite waits for the device between streams",
        f"{SUITE}/test_streams.py",
        "        subject.streams.wait(reader, event)\n",
        "        subject.streams.wait(reader, event)\n        subject.backend.synchronize()\n",
        broken_one("deaf"),
    ),
    Break(
        "A8: the suite waits for each stream after a fence of all",
        f"{SUITE}/test_streams.py",
        "    subject.backend.synchronize(FenceScope.DEVICE)\n",
        "    subject.backend.synchronize(FenceScope.DEVICE)\n"
        "    _ = [subject.streams.synchronize(each) for each in streams]\n",
        broken_one("half_fenced"),
    ),
    Break(
        "A8: the suite compares a copy with itself",
        f"{SUITE}/test_copies.py",
        "torch.equal(subject.read(target), source + number % 2)",
        "torch.equal(subject.read(target), subject.read(target) + number * 0)",
        broken_one("unordered"),
    ),
    Break(
        "A8: high priority is the least",
        "device_workers/streams/torch_streams.py",
        "{StreamPriority.LOW: least, StreamPriority.HIGH: greatest}",
        "{StreamPriority.LOW: greatest, StreamPriority.HIGH: least}",
        ("tests/contracts/test_surfaces.py",),
    ),
    Break(
        "A15: platforms of other packages are not asked",
        "device_workers/platforms/detection.py",
        "    return (*accelerators, *plugins, *others)\n",
        "    return (*accelerators, *others)\n",
        EXAMPLE,
    ),
    Break(
        "A15: kernels of other packages stand behind ours",
        "device_workers/boot.py",
        "    catalog = (*plugin_kernels(plain.kernels, warn), *CATALOG)\n",
        "    catalog = (*CATALOG, *plugin_kernels(plain.kernels, warn))\n",
        EXAMPLE,
    ),
    Break(
        "A15: a strategy passes another package's kernel over",
        "kernels/registry.py",
        "        following = (candidate for candidate in chain if candidate.metadata.strategy is not None)\n",
        "        return sorted(chain, key=lambda candidate: candidate.metadata.strategy is not asked)\n"
        "        following = (candidate for candidate in chain if candidate.metadata.strategy is not None)\n",
        ("tests/pure/test_kernel_registry.py",),
    ),
    Break(
        "A15: a decline counts as a pass",
        f"{SUITE}/plugin.py",
        '    return "passed" in seen and "failed" not in seen\n',
        '    return "failed" not in seen\n',
        NULL,
    ),
    Break(
        "A15: declines go unsaid",
        f"{SUITE}/plugin.py",
        '    _section(terminalreporter, "declined: a decline is not a pass", declined)\n',
        "",
        NULL,
    ),
    Break(
        "A15: a failure does not name its clause",
        f"{SUITE}/plugin.py",
        '        report.longrepr = f"{name}: {text}{trace}"\n',
        '        report.longrepr = f"{text}{trace}"\n',
        broken_one("curt"),
    ),
    Break(
        "A15: a shrug is a reason",
        f"{SUITE}/test_life_cycle.py",
        "len(reason.strip()) >= _SHORTEST_REASON",
        "len(reason.strip()) >= 1",
        broken_one("curt"),
    ),
    Break(
        "A15: every test run gets the suite's options",
        f"{SUITE}/command_line.py",
        "    if asks_for_the_suite(args):\n",
        "    if args is not None:\n",
        ("-p", f"no:{COMMAND_LINE}", "tests/contract_suite/test_suite.py::test_other_test_runs_see_nothing_of_it"),
    ),
    Break(
        "A15: the device judges its own arithmetic",
        f"{SUITE}/test_kernels.py",
        'make_trials(kernel, problem, "cpu")\n',
        "make_trials(kernel, problem, str(subject.device))\n",
        broken_one("wrong_math"),
    ),
)
