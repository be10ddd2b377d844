"""Breaks of the hardware layer: detection, devices, memory, order, plug-ins."""

from broken import Break

SURFACES = ("tests/contracts/test_surfaces.py",)
CHOICE = ("tests/process/test_platform_choice.py",)
ENGINES = ("tests/numerics/test_accelerator_engines.py",)
VISIBILITY = ("tests/pure/test_device_visibility.py",)
ACCELERATOR = "device_workers/platforms/torch_accelerator.py"
DETECTION = "device_workers/platforms/detection.py"

PLATFORM_BREAKS = (
    # A3: detection with reasons, in order
    Break(
        "other vendors in the machine are not listed",
        DETECTION,
        'return Tried(name=platform.name, verdict="present, not used", reason=reason)',
        'return Tried(name=platform.name, verdict="absent", reason="nothing is there")',
        (*SURFACES, "-k", "other_vendors"),
    ),
    Break(
        "basic mode keeps the kernels made for the device",
        ACCELERATOR,
        "        if self.basic_mode(devices) is None:\n            features.add(Feature.TRITON)",
        "        if True:\n            features.add(Feature.TRITON)",
        (*SURFACES, "-k", "basic_mode"),
    ),
    Break(
        "a busy device ends the start",
        "device_workers/platforms/device_choice.py",
        "    if len(devices) > 1 and wish.device is None and wish.num_ranks == 1:",
        "    if False:",
        (*SURFACES, "-k", "busy"),
    ),
    # A4: the backend
    Break(
        "memory is as aligned as it happens to be",
        "device_workers/memory/memory_pool.py",
        "begin = -whole.data_ptr() % alignment_bytes",
        "begin = 0",
        (*SURFACES, "-k", "aligned"),
    ),
    Break(
        "pinned memory is forgotten in the account",
        "device_workers/memory/memory_pool.py",
        "        self._held[kind] += num_bytes\n",
        "",
        (*SURFACES, "-k", "pinned"),
    ),
    Break(
        "fragments stay after memory ran out",
        "device_workers/memory/exhaustion.py",
        "        release()\n",
        "",
        (*SURFACES, "-k", "exhaustion"),
    ),
    Break(
        "an empty recording passes for a graph",
        ACCELERATOR,
        "        if any(_EMPTY_RECORDING in str(warning.message) for warning in said):",
        "        if False:",
        (*SURFACES, "-k", "empty_recording"),
    ),
    Break(
        "a recording of one size is replayed for all",
        ACCELERATOR,
        "    graphs_take_any_size = False",
        "    graphs_take_any_size = True",
        (*SURFACES, "-k", "replays_the_same"),
    ),
    Break(
        "a launch goes to whatever stream is current",
        ACCELERATOR,
        "        with self.streams.use(stream):\n            kernel(*tensors)",
        "        if stream:\n            kernel(*tensors)",
        (*SURFACES, "-k", "launches"),
    ),
    # A8: streams
    Break(
        "a stream does not wait for the event",
        "device_workers/streams/torch_streams.py",
        "        native.wait_event(event.native)",
        "        assert native",
        (*SURFACES, "-k", "hold_others_back"),
    ),
    Break(
        "the greatest priority goes to copies",
        "device_workers/streams/torch_streams.py",
        "self._numbers = {StreamPriority.LOW: least, StreamPriority.HIGH: greatest}",
        "self._numbers = {StreamPriority.LOW: greatest, StreamPriority.HIGH: least}",
        (*SURFACES, "-k", "priorities"),
    ),
    Break(
        "step inputs are overwritten while their copy waits",
        "device_workers/memory/staging.py",
        "            event.wait_blocking()\n",
        "            pass\n",
        (*SURFACES, "-k", "step_inputs"),
    ),
    # D1 to D9
    Break(
        "D1: a refusal does not say what the others were",
        DETECTION,
        '    lines = [f"  {entry}" for entry in tried]\n',
        '    lines = [f"  {entry}" for entry in tried if entry.verdict == "refused"]\n',
        (*CHOICE, "-k", "not_there"),
    ),
    Break(
        "D1: hardware that is there passes for absent",
        ACCELERATOR,
        "            return Refused(reason=reason, hardware=look.hardware)\n        try:\n            devices, refused",
        "            return Refused(reason=reason)\n        try:\n            devices, refused",
        (*SURFACES, "-k", "says_why"),
    ),
    Break(
        "D2: an index ignores what the user shows",
        "frontend/launch/device_visibility.py",
        "        return entries[int(asked)]\n",
        "        return asked\n",
        VISIBILITY,
    ),
    Break(
        "D2: identifiers are read as numbers",
        "device_workers/platforms/device_choice.py",
        "    named = [device for device in devices if device.uuid is not None and _same(device.uuid, wish.device)]",
        "    named = [device for device in devices if device.index == int(wish.device)]",
        (*SURFACES, "-k", "identifier"),
    ),
    Break(
        "D3: the integrated GPU does the work",
        DETECTION,
        "    real = tuple(device for device in outcome.devices if not device.is_integrated)",
        "    real = outcome.devices",
        (*SURFACES, "-k", "discrete or integrated"),
    ),
    Break(
        "D3: the CPU takes over in silence",
        DETECTION,
        '        warning = f"running on the CPU because {why}"',
        "        warning = None",
        (*SURFACES, "-k", "silently"),
    ),
    Break(
        "D4: code of another architecture will do",
        "device_workers/platforms/cuda.py",
        "            fits = own[0] == major and own[1] <= minor",
        "            fits = own <= (major, minor)",
        (*SURFACES, "-k", "which_code"),
    ),
    Break(
        "D6: versions compare as text",
        "device_workers/platforms/versions.py",
        "    return have + (0,) * (width - len(have)) < want + (0,) * (width - len(want))",
        "    return installed < minimum and width > 0",
        (*SURFACES, "-k", "versions_compare"),
    ),
    Break(
        "D6: nobody looks at the driver",
        ACCELERATOR,
        "        reason = self.misbuilt() or self.outdated()",
        "        reason = self.misbuilt()",
        (*SURFACES, "-k", "old"),
    ),
    Break(
        "D7: another dtype than the checkpoint's in silence",
        "device_workers/boot.py",
        '        services.warn(f"the model runs in {dtype}: {dtype_decision.reason}")',
        "        assert dtype",
        (*ENGINES, "-k", "bfloat16"),
    ),
    Break(
        "D9: a plug-in that fails to import ends the start",
        "device_workers/platforms/plugins.py",
        "    except Exception as error:  # whatever somebody else's package raises\n        return BrokenPlatform(",
        "    except ZeroDivisionError as error:\n        return BrokenPlatform(",
        (*CHOICE, "-k", "order_names"),
    ),
    Break(
        "D9: the order of plug-ins is that of the file system",
        "device_workers/platforms/detection.py",
        "    return (*accelerators, *plugins, *others)",
        "    return (*accelerators, *others, *plugins)",
        (*CHOICE, "-k", "order_names"),
    ),
    # M
    Break(
        "M2: a shortage does not say who holds the memory",
        "engine_core/negotiation.py",
        '    return f"; {told}"\n',
        '    return ""\n',
        (*SURFACES, "-k", "shortage"),
    ),
    Break(
        "M6: memory that ran out ends the worker",
        "device_workers/memory/exhaustion.py",
        "        if not is_exhaustion(error):\n            raise",
        "        if is_exhaustion(error):\n            raise",
        (*ENGINES, "-k", "without_memory"),
    ),
    # any torch device
    Break(
        "an index stays on the host",
        "device_workers/memory/staging.py",
        "        return (tensor.pin_memory() if self._pins else tensor).to(self._device, non_blocking=True)\n",
        "        return tensor\n",
        ("tests/numerics/test_any_device.py", "-k", "qwen3"),
    ),
    Break(
        "a device without float64 draws all the same",
        "device_workers/execution/tensor_engine.py",
        "draws_on_device = Feature.FP64 in self.profile.capability.features",
        "draws_on_device = True",
        (*ENGINES, "-k", "float64"),
    ),
)
