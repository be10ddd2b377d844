"""The format of capability files: what is refused, with which words, and that what is written reads back."""

import datetime
from pathlib import Path

import pytest

from trimaran.device_workers.profiles.packaged import packaged_names, read_capability_file
from trimaran.device_workers.profiles.writing import write_capability_file
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.facts import DeviceCapability, DeviceProfile, Feature

HEAD = """\
schema: 1
architecture: sm_90
platform: cuda
vendor: NVIDIA
documents:
  guide:
    title: A guide
"""
DAY = datetime.date(2026, 11, 30)
H200 = DeviceProfile(
    platform="cuda",
    vendor="NVIDIA",
    name='NVIDIA "H200" ü',
    uuid="GPU-0",
    driver="580.1",
    bandwidth=1.0,
    capability=DeviceCapability(architecture="sm_90a", features=frozenset({Feature.BF16})),
)


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def refusal(folder: Path, text: str) -> str:
    path = written(folder, text)
    with pytest.raises(Refusal) as caught:
        read_capability_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_misspelt_key_word_for_word(tmp_path: Path) -> None:
    text = HEAD + "products:\n  - name: X\n    bandwith: [4800, guide]\n"
    assert refusal(tmp_path, text) == (
        "products[0].bandwith: there is no such key (did you mean 'bandwidth'?); take one of name, device_names, "
        "memory_bytes, memory_is_shared, is_integrated, bandwidth, clocks, pcie_generation, pcie_width, numa_node, "
        "links, compute_capability, warp_width, num_multiprocessors, shared_memory_per_block_bytes, "
        "shared_memory_per_multiprocessor_bytes, registers_per_multiprocessor, max_threads_per_multiprocessor, "
        "max_blocks_per_multiprocessor, l2_bytes, allocation_alignment_bytes, num_copy_engines, rates, "
        "concurrent_blocks, launch_latency_us, graph_capture_ms, graph_launch_us, copy_to_device, copy_from_device, "
        "best, features"
    )


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("memory_bytes: [80, guide]", "memory_bytes", ["80 is outside 268435456 to", "write a unit (227 KiB, 80 GiB)"]),
        ("memory_bytes: [80 GB, guide]", "memory_bytes", ["'80 GB' is no size", "80 GiB"]),
        ("memory_bytes: [0.5 KiB, guide]", "memory_bytes", ["512 is outside"]),
        ("memory_bytes: [1.00001 KiB, guide]", "memory_bytes", ["not a whole number of bytes"]),
        ("shared_memory_per_block_bytes: [227, guide]", "shared_memory_per_block_bytes", ["227 is outside 4096"]),
        ("bandwidth: [4.8, guide]", "bandwidth", ["4.8 is outside 10 to 200000 GB/s", "3.35 TB/s is 3350"]),
        ("bandwidth: [4800000000000, guide]", "bandwidth", ["is outside"]),
        ("bandwidth: [.nan, guide]", "bandwidth", ["nan must be a number (GB/s)"]),
        ("bandwidth: [true, guide]", "bandwidth", ["True must be a number"]),
        ("bandwidth: [fast, guide]", "bandwidth", ["'fast' must be a number"]),
        ("clocks:\n  sm: [1.98, guide]", "clocks.sm", ["1.98 is outside 50 to 20000 MHz", "1.98 GHz is 1980"]),
        ("clocks:\n  boost: [1980, guide]", "clocks.boost", ["no such clock", "sm, memory, cpu"]),
        ("rates:\n  bf16: [989, guide]", "rates.bf16", ["no such dtype", "bfloat16, float8_e4m3"]),
        (
            "rates:\n  int8: [989e12, guide]",
            "rates.int8",
            ["a number (TFLOP/s, dense)", "write the number out"],
        ),
        ("rates:\n  int8: [989000000000000, guide]", "rates.int8", ["outside 0.01 to 1000000 TFLOP/s, dense"]),
        ("rates: [989, guide]", "rates", ["is no mapping", "a figure for each dtype"]),
        ("warp_width: [33, guide]", "warp_width", ["33 is not a power of two"]),
        ("warp_width: [32.0, guide]", "warp_width", ["32.0 must be a whole number"]),
        ("compute_capability: [9.0, guide]", "compute_capability", ['write it in quotes: "9.0"']),
        ("is_integrated: [1, guide]", "is_integrated", ["1 must be true or false"]),
        ("bandwidth: 4800", "bandwidth", ["4800 has no source", "write [4800, ID]"]),
        ("bandwidth: [4800]", "bandwidth", ["must be [value, source]"]),
        (
            "bandwidth: [4800, giude]",
            "bandwidth",
            ["'giude' is not one", "did you mean 'guide'?", "documents:"],
        ),
        ("bandwidth: {value: 4800}", "bandwidth", ["source is missing"]),
        ("bandwidth: {source: guide}", "bandwidth", ["value is missing; leave the whole figure out"]),
        ("bandwidth: {value: 4800, source: guide, unit: TB}", "bandwidth.unit", ["value, source, note, tool, date"]),
        ("bandwidth: [4800, measured]", "bandwidth", ["tool is missing"]),
        ("bandwidth: {value: 4800, source: measured, tool: t}", "bandwidth.date", ["is missing", "YYYY-MM-DD"]),
        (
            "bandwidth: {value: 4800, source: measured, tool: t, date: 30.11.2026}",
            "bandwidth.date",
            ["'30.11.2026' is no date", "YYYY-MM-DD"],
        ),
        ("bandwidth: {value: -1, source: measured, tool: t, date: 2026-11-30}", "bandwidth", ["-1 is outside"]),
        ("bandwidth: {value: 0, source: measured, tool: t, date: 2026-11-30}", "bandwidth", ["0 is outside"]),
        ("features:\n  bf61: guide", "features.bf61", ["no such feature (did you mean 'bf16'?)"]),
        ("features:\n  bf16: giude", "features.bf16", ["did you mean 'guide'?"]),
        ("features:\n  bf16: true", "features.bf16", ["has no source"]),
        ("best:\n  rms_norm: [{num_warps: 0}, guide]", "best.rms_norm.num_warps", ["0 must be a whole number from 1"]),
        ("best:\n  rms_norm: [4, guide]", "best.rms_norm", ["num_warps: 4"]),
        ("match:\n  flag: [avx2]", "match.flag", ["did you mean 'flags'?"]),
        ("match:\n  flags: avx2", "match.flags", ["must be a list of texts: [avx2]"]),
        ("device:\n  nmae: x", "device.nmae", ["did you mean 'name'?"]),
        ("products:\n  name: X", "products", ["must be a list"]),
        ("products:\n  - memory_bytes: [80 GiB, guide]", "products[0].name", ["is missing"]),
        ("products:\n  - name: X\n  - name: x", "products[1].name", ["the name of an earlier product"]),
        ("products:\n  - X", "products[0]", ["is no mapping"]),
        ("products:\n  - name: 5090", "products[0].name", ['write it in quotes: "5090"']),
        ("vendour: x", "vendour", ["did you mean 'vendor'?"]),
        ("title: 5", "title", ['"5"']),
    ],
)
def test_refusals_name_the_key_and_the_cure(text: str, path: str, words: list[str], tmp_path: Path) -> None:
    message = refusal(tmp_path, HEAD + text + "\n")
    assert message.startswith(f"{path}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema: 2\narchitecture: sm_90\n", ["schema: is 2", "reads schema 1", "schema: 1"]),
        ("architecture: sm_90\n", ["schema: is missing"]),
        ("schema: true\narchitecture: sm_90\n", ["schema: is True"]),
        ("schema: 1\n", ["architecture: is missing", "such as sm_90 or gfx942"]),
        ("schema: 1\narchitecture: SM 90\n", ["architecture: 'SM 90' is no name"]),
        ("", ["is empty", "a capability file"]),
        ("- 1\n", ["is no mapping"]),
        ("schema: 1\nschema: 1\n", ["not YAML: line 2: 'schema' is given twice, first in line 1"]),
        ("schema: [1\n", ["not YAML: line 2"]),
        ("schema: 1\n\tarchitecture: sm_90\n", ["not YAML: line 2"]),
        ("schema: 1\n1: 2\n", ["line 2: the key 1 is not a text"]),
        ("schema: !!python/object/apply:os.system [id]\n", ["not YAML: line 1"]),
        (HEAD.replace("guide", "measured"), ["documents.measured: is what measured figures name"]),
        (HEAD.replace("title", "titel"), ["documents.guide.titel", "did you mean 'title'?"]),
        (HEAD.replace("title: A guide", "section: 4"), ["documents.guide.section: 4 must be a text"]),
        (HEAD.replace("title: A guide", "section: four"), ["documents.guide: title is missing"]),
    ],
)
def test_refusals_of_the_whole_file(text: str, words: list[str], tmp_path: Path) -> None:
    message = refusal(tmp_path, text)
    for word in words:
        assert word in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"hoper: there is no such file \(did you mean 'hopper'\?\); .* ada, ampere,"):
        read_capability_file("hoper")
    with pytest.raises(Refusal, match="/nowhere.yaml: there is no such file; --device-config takes a path or one of"):
        read_capability_file(f"{tmp_path}/nowhere.yaml")
    with pytest.raises(Refusal, match="is a folder"):
        read_capability_file(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refusal, match="binary.yaml: cannot be read"):
        read_capability_file(f"{tmp_path}/binary.yaml")
    (tmp_path / "long.yaml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(Refusal, match="a capability file has a few thousand"):
        read_capability_file(f"{tmp_path}/long.yaml")


def test_products_by_name(tmp_path: Path) -> None:
    for spelling in ("hopper:H100 SXM", "hopper:h100-sxm", "hopper:H100SXM"):
        chosen = read_capability_file(spelling).chosen
        assert chosen is not None and chosen.name == "H100 SXM"
    with pytest.raises(Refusal, match=r"hopper: has no product 'H20O' \(did you mean 'H200'\?\).*NAME with one of"):
        read_capability_file("hopper:H20O")
    path = written(tmp_path, HEAD)
    with pytest.raises(Refusal, match="has no products"):
        read_capability_file(f"{path}:X")
    odd = tmp_path / "a:b.yaml"
    odd.write_text(HEAD)
    assert read_capability_file(str(odd)).chosen is None


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    measured = {
        "bandwidth": 4123.456,
        "rates.bfloat16": 712.5,
        "rates.float16": 700.0,
        "features.stream_priorities": True,
        "features.graph_capture": False,
        "concurrent_blocks": 1056,
        "launch_latency_us": 0.00217,
        "best.rms_norm": {"num_warps": 8, "block": 1024},
    }
    path = tmp_path / "made" / "h200.yaml"
    file = write_capability_file(path, H200, measured, tool="trimaran diagnose", date=DAY)
    assert file == read_capability_file(str(path))
    assert (file.architecture, file.platform, file.vendor) == ("sm_90", "cuda", "NVIDIA")
    assert file.device == {"name": 'NVIDIA "H200" ü', "uuid": "GPU-0", "driver": "580.1"}
    held = ((key, entry, figure) for key, entries in file.figures.items() for entry, figure in entries.items())
    found = {f"{key}.{entry}".strip("."): figure for key, entry, figure in held}
    for key, value in measured.items():
        assert found[key].value == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
        assert (found[key].source, found[key].tool, found[key].date) == ("measured", "trimaran diagnose", "2026-11-30")
    assert set(found) == set(measured)  # neither the declared bandwidth nor the detected feature
    text = path.read_text()
    assert text.startswith("# Measured on one device by trimaran diagnose on 2026-11-30.")
    assert 'bandwidth: {value: 4123.46, source: measured, date: 2026-11-30, tool: "trimaran diagnose"}  # GB/s' in text


def test_a_measurement_may_be_small_but_not_impossible(tmp_path: Path) -> None:
    slow = write_capability_file(tmp_path / "a.yaml", H200, {"bandwidth": 0.5}, tool="t", date=DAY)
    assert slow.figures["bandwidth"][""].value == 0.5
    with pytest.raises(Refusal, match="bandwidth: 0.0 is outside"):
        write_capability_file(tmp_path / "b.yaml", H200, {"bandwidth": 0.0}, tool="t", date=DAY)
    with pytest.raises(AssertionError, match=r"rates is no figure"):
        write_capability_file(tmp_path / "b.yaml", H200, {"rates": 0.0}, tool="t", date=DAY)
    assert not (tmp_path / "b.yaml").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="cannot be written"):
        write_capability_file(tmp_path / "file" / "c.yaml", H200, {"bandwidth": 5.0}, tool="t", date=DAY)


def test_packaged_names_are_plain() -> None:
    assert all(name == name.lower() and ":" not in name for name in packaged_names())
