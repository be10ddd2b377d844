"""Small rules of the device side: dtype, memory plan, row table, progress."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from trimaran.device_workers.affinity import near_cores
from trimaran.device_workers.dtype_choice import DtypeMeasurements, candidates, choose_dtype
from trimaran.device_workers.execution.progress import Progress, ProgressWatch
from trimaran.device_workers.execution.row_table import RowTable
from trimaran.device_workers.memory.memory_plan import SHARED_MEMORY_KV_LIMIT_BYTES, plan_memory
from trimaran.ipc.conditions import Refusal
from trimaran.ipc.facts import DeviceCapability, DeviceProfile, Feature, MemoryFacts
from trimaran.ipc.plan import RowFlag, StepPlan

GIB = 1 << 30
OLD = DeviceProfile(
    platform="any",
    vendor="any",
    name="an old card",
    capability=DeviceCapability(architecture="old", features=frozenset({Feature.FP16})),
)
NEW = replace(OLD, capability=DeviceCapability(architecture="new", features=frozenset({Feature.FP16, Feature.BF16})))


@pytest.mark.user_pain("D7")
def test_dtype_without_bfloat16() -> None:
    dtype, decision = choose_dtype("auto", "bfloat16", OLD, {})
    assert dtype == "float16"
    assert "bfloat16 is not available on an old card" in decision.reason
    with pytest.raises(Refusal, match="--dtype bfloat16.*float32, float16"):
        choose_dtype("bfloat16", "float16", OLD, {})


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({}, "bfloat16"),
        ({"bfloat16": 1.0, "float32": 0.9}, "bfloat16"),
        ({"bfloat16": 1.0, "float32": 0.8}, "float32"),
        ({"bfloat16": 1.0, "float32": 2.0}, "bfloat16"),
        ({"float32": 0.1}, "bfloat16"),
    ],
)
def test_auto_keeps_the_checkpoints_unless_a_fifth_is_gained(seconds: dict[str, float], chosen: str) -> None:
    dtype, decision = choose_dtype("auto", "bfloat16", NEW, seconds)
    assert (dtype, decision.value) == (chosen, chosen)
    assert decision.reason and not decision.overridden


def test_asked_dtypes() -> None:
    assert choose_dtype("float32", "bfloat16", NEW, {"bfloat16": 0.1, "float32": 9.0})[0] == "float32"
    with pytest.raises(Refusal, match="auto or one of float32, bfloat16, float16"):
        choose_dtype("int3", "bfloat16", NEW, {})
    assert "float16" not in candidates("bfloat16", makes_vectors=False)
    assert candidates("float16", makes_vectors=False)[0] == "float16"


@pytest.mark.user_pain("E3")
def test_vectors_get_no_coarser_dtype_for_speed() -> None:
    assert candidates("float32", makes_vectors=True) == ("float32",)
    assert candidates("bfloat16", makes_vectors=True) == ("bfloat16", "float32")
    seconds = {"float32": 1.0, "bfloat16": 0.1}
    dtype, decision = choose_dtype("auto", "float32", NEW, seconds, makes_vectors=True)
    assert dtype == "float32" and "vectors" in decision.reason
    assert choose_dtype("auto", "float32", NEW, seconds)[0] == "bfloat16"
    assert choose_dtype("auto", "bfloat16", NEW, {"float32": 0.1, "bfloat16": 1.0}, makes_vectors=True)[0] == "float32"
    assert choose_dtype("bfloat16", "float32", NEW, {}, makes_vectors=True)[0] == "bfloat16"


@pytest.mark.user_pain("M9")
def test_measurements_are_kept_per_device(tmp_path: Path) -> None:
    warnings: list[str] = []
    DtypeMeasurements(tmp_path, NEW, 2, warnings.append).write({"float32": 0.5})
    assert DtypeMeasurements(tmp_path, NEW, 2, warnings.append).read() == {"float32": 0.5}
    assert DtypeMeasurements(tmp_path, NEW, 4, warnings.append).read() == {}
    assert DtypeMeasurements(tmp_path, replace(NEW, name="other"), 2, warnings.append).read() == {}
    next(tmp_path.glob("dtype-speed-*")).write_text("{")
    assert not warnings
    assert DtypeMeasurements(tmp_path, NEW, 2, warnings.append).read() == {}
    assert len(warnings) == 1


def plan(total: int, free: int, *, utilization: float = 0.9, asked: int | None = None, shared: bool = False) -> int:
    facts = MemoryFacts(total_bytes=total, free_bytes=free, ours_bytes=0)
    made = plan_memory(
        facts,
        weight_bytes=GIB,
        activation_bytes=GIB,
        utilization=utilization,
        kv_memory_bytes=asked,
        shared_limit_bytes=SHARED_MEMORY_KV_LIMIT_BYTES if shared else None,
    )
    assert made.decision.reason
    return made.kv_budget_bytes


def test_memory_plan() -> None:
    assert plan(10 * GIB, 8 * GIB) == 7 * GIB
    assert plan(10 * GIB, 8 * GIB, asked=GIB) == GIB
    assert plan(10 * GIB, 8 * GIB, shared=True) == SHARED_MEMORY_KV_LIMIT_BYTES
    assert plan(10 * GIB, GIB) == 0


def columns(**values: object) -> StepPlan:
    dtypes = dict(zip(StepPlan.SCHEMA.names, StepPlan.SCHEMA.dtypes, strict=True))
    return StepPlan(**{name: np.array(value, dtypes[name]) for name, value in values.items()})


def new_rows(rows: list[int], flags: int = 0, **values: object) -> dict[str, object]:
    zeros = [0] * len(rows)
    names = (
        "choices temperatures top_ps top_ks min_ps presence_penalties frequency_penalties repetition_penalties seeds "
        "num_logprobs num_prompt_logprobs prompt_lengths min_lengths bias_counts banned_counts"
    )
    return dict.fromkeys(names.split(), zeros) | {"new_rows": rows, "row_flags": [flags] * len(rows)} | values


def test_block_grants_extend_rows() -> None:
    table = RowTable(8, 2)
    table.apply(
        columns(block_rows=[0, 9, 0], block_firsts=[0, 0, 2], block_counts=[2, 1, 2], block_ids=[5, 6, 7, 8, 9])
    )
    assert table.num_rows >= 10
    assert table.blocks[0, :4].tolist() == [5, 6, 8, 9]
    assert table.blocks[9, :1].tolist() == [7]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"block_ids": [5, 20]}, "unknown blocks"),
        ({"block_ids": [-1, 5]}, "unknown blocks"),
        ({"starts": [31], "counts": [2]}, "without blocks"),
        ({"rows": [2]}, "without blocks"),
        ({"starts": [-3]}, "malformed"),
        ({"counts": [0]}, "malformed"),
    ],
)
def test_a_plan_cannot_reach_outside_its_blocks(changes: dict[str, list[int]], complaint: str) -> None:
    """Kernels take block ids on trust; a wrong one must stop on the host."""

    def run(**values: list[int]) -> None:
        plan = columns(step=[7], **{"rows": [1], "starts": [16], "counts": [16]} | granted | values)
        table.apply(plan)
        table.check(plan, num_blocks=20, block_size=16)

    table = RowTable(8, 4)
    granted = {"block_rows": [1], "block_firsts": [0], "block_counts": [2], "block_ids": [5, 19]}
    run()
    with pytest.raises(AssertionError, match=complaint):
        run(**changes)


def test_a_rows_next_tenant_has_no_blocks() -> None:
    table = RowTable(8, 4)
    work = {"rows": [1], "starts": [0], "counts": [1], "step": [1]}
    table.apply(columns(block_rows=[1], block_firsts=[0], block_counts=[2], block_ids=[5, 19]))
    table.check(columns(**work), num_blocks=20, block_size=16)
    table.apply(columns(**new_rows([1], 0)))
    with pytest.raises(AssertionError, match="without blocks"):
        table.check(columns(**work), num_blocks=20, block_size=16)


def test_biases_bans_and_histories_come_apart_and_go_with_their_row() -> None:
    table = RowTable(8, 4)
    added = new_rows(
        [2, 1],
        RowFlag.PENALTIES,
        bias_counts=[0, 2],
        bias_ids=[7, 8],
        bias_values=[0.5, -1.0],
        banned_counts=[1, 0],
        banned_ids=[3],
        history_prompt_counts=[2, 1],
        history_output_counts=[1, 0],
        history_ids=[11, 12, 13, 14],
    )
    histories = table.apply(columns(**added))
    assert [(h.row, h.prompt_ids.tolist(), h.output_ids.tolist()) for h in histories] == [
        (2, [11, 12], [13]),
        (1, [14], []),
    ]
    assert table.biases[1].ids.tolist() == [7, 8]
    assert table.banned[2].tolist() == [3]
    table.apply(columns(freed_rows=[1, 2]))
    assert not table.biases and not table.banned


def test_progress_tells_a_long_step_from_a_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress()
    watch = ProgressWatch(progress)
    progress.begin(7)
    now[0] += 5
    assert watch.look() == (7, 5.0, 0.0)
    now[0] += 5
    assert watch.look() == (7, 10.0, 5.0)
    progress.bump()
    assert watch.look() == (7, 10.0, 0.0)
    progress.end()
    now[0] += 50
    assert watch.look()[0] is None
    assert watch.look()[2] == 0.0


def test_a_worker_stays_near_its_device(tmp_path: Path) -> None:
    for node, cores in ((0, "0-3,8"), (1, "4-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    device = replace(NEW, platform="cuda", numa_node=1)
    everything = frozenset(range(9))
    assert near_cores(device, everything, tmp_path) == {4, 5, 6, 7}
    assert near_cores(device, frozenset({0, 1, 5}), tmp_path) == {5}
    assert near_cores(device, frozenset({0, 1}), tmp_path) is None, "none of the near cores may be used"
    assert near_cores(device, frozenset({4, 5}), tmp_path) is None, "nothing to choose"
    assert near_cores(replace(device, numa_node=None), everything, tmp_path) is None
    assert near_cores(replace(device, numa_node=7), everything, tmp_path) is None
    assert near_cores(replace(device, platform="cpu"), everything, tmp_path) is None
