"""Deliberate breaks of profiles and capability files (rows A1, A2 and the file of A11)."""

from broken import Break

FILES = ("tests/pure/test_capability_files.py",)
FORMAT = ("tests/pure/test_capability_format.py",)
SETTLING = ("tests/pure/test_profile_settling.py",)

PROFILE_BREAKS = (
    Break(
        "A1: what is declared goes before what is detected",
        "device_workers/profiles/merging.py",
        "    values.put_profile(detected)\n",
        "    values.put_profile(detected)\n"
        "    if declared is not None:\n"
        "        put_file(values, declared, product_of_profile(declared, detected))\n",
        SETTLING,
    ),
    Break(
        "A1: provenance says detected of what was declared",
        "device_workers/profiles/profile_values.py",
        "        self.provenance[key] = provenance\n",
        "        self.provenance[key] = Provenance.DETECTED\n",
        SETTLING,
    ),
    Break(
        "A1: a field of the profile that no file can say",
        "device_workers/profiles/vocabulary.py",
        '    _count("num_copy_engines", 0, 256),\n',
        "",
        FILES,
    ),
    Break(
        "A1: a slice of a device takes the whole device's rates",
        "device_workers/profiles/packaged.py",
        "    return None if is_part else product\n",
        "    return product\n",
        SETTLING,
    ),
    Break(
        "A1: the engine sees what is detected only",
        "device_workers/boot.py",
        "    profile, decision = settle_profile(detected, configuration.device_config, configuration.allow_mismatch)\n",
        "    profile, decision = detected, settle_profile(detected, None, True)[1]\n",
        SETTLING,
    ),
    Break(
        "A1: the processor's family is its bare machine",
        "device_workers/profiles/processor.py",
        "        if flags.issuperset(file.match.flags):\n",
        "        if flags == set(file.match.flags):\n",
        SETTLING,
    ),
    Break(
        "A2: a key that does not exist is passed over",
        "device_workers/profiles/reading.py",
        "        if name not in allowed:\n",
        "        if name not in allowed and not allowed:\n",
        FORMAT,
    ),
    Break(
        "A2: a figure without a source is taken",
        "device_workers/profiles/reading.py",
        "    if source not in documents:\n",
        "    if source not in documents and documents == {}:\n",
        FORMAT,
    ),
    Break(
        "A2: gigabytes pass for bytes",
        "device_workers/profiles/reading.py",
        "    if not is_plausible or content < 0 or content > key.high:\n",
        "    if content < 0 or content > key.high:\n",
        FORMAT,
    ),
    Break(
        "A2: the second of two equal keys wins",
        "device_workers/profiles/yaml_text.py",
        "                if key in seen:\n",
        "                if key in seen and False:\n",
        FORMAT,
    ),
    Break(
        "A2: a file of another architecture is served",
        "device_workers/profiles/merging.py",
        "    if allow_mismatch or (override.names_architecture(found) and not other_platform):\n",
        "    if True:\n",
        SETTLING,
    ),
    Break(
        "A2: a file installs Triton",
        "device_workers/profiles/merging.py",
        "        values.drop(_feature_key(feature))\n",
        "        pass\n",
        SETTLING,
    ),
    Break(
        "A2: a sparse rate is declared",
        "device_workers/profiles/ada.yaml",
        "      float16: [165.2, whitepaper]\n",
        "      float16: [330.4, whitepaper]\n",
        FILES,
    ),
    Break(
        "A2: more shared memory than a block can have",
        "device_workers/profiles/hopper.yaml",
        "shared_memory_per_block_bytes: [227 KiB, guide]",
        "shared_memory_per_block_bytes: [228 KiB, guide]",
        FILES,
    ),
    Break(
        "A2: only architectures that the engine knows are found",
        "device_workers/profiles/packaged.py",
        '    return tuple(sorted(path.stem for path in FOLDER.glob(f"*{_ENDING}")))\n',
        '    return tuple(sorted(path.stem for path in Path(__file__).parent.glob(f"*{_ENDING}")))\n',
        SETTLING,
    ),
    Break(
        "A11: a measured value does not go before the detected one",
        "device_workers/profiles/settling.py",
        "    profile = merged(declared, detected, override)\n",
        "    profile = merged(override or declared, detected)\n",
        SETTLING,
    ),
    Break(
        "A11: the file written misnames the tool that measured",
        "device_workers/profiles/writing.py",
        '    suffix = f"source: {MEASURED}, date: {date.isoformat()}, tool: {_text(tool)}}}"\n',
        '    suffix = f"source: {MEASURED}, date: {date.isoformat()}, tool: {_text(tool[:1])}}}"\n',
        FORMAT,
    ),
    Break(
        "A11: the file written does not say which device was measured",
        "device_workers/profiles/writing.py",
        '        f"  name: {_text(profile.name)}",\n',
        '        f"  name: {_text(profile.vendor)}",\n',
        FORMAT,
    ),
)
