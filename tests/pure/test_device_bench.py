"""What the device benchmark makes of measured times: figures, the record, verdicts, the page."""

from pathlib import Path
from typing import Any

import pytest

from trimaran.tools.bench_device import GROUPS
from trimaran.tools.device_bench import offline, page, profiling, record, requirements, serving, startup
from trimaran.tools.device_bench.http_client import Answer, figures
from trimaran.tools.device_bench.model_shapes import SHAPES, Work, work_of
from trimaran.tools.device_bench.requirements import ROWS, Row, verdict
from trimaran.tools.device_bench.samples import percentile
from trimaran.tools.device_bench.step_profile_child import kind_of

ABOUT: dict[str, Any] = {
    "command": "python tools/bench_device.py",
    "versions": {"python": "3.12.3", "vllm": "0.26.0"},
    "date": "2026-11-30",
    "host": {"cpu": "a processor", "cores": 16, "gpus": ["NVIDIA H200"]},
    "is_comparable": True,
    "notes": [],
    "failed": [],
}


def entry(found: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**ABOUT, "figures": found, **fields}


def row(test: str) -> Row:
    return next(row for row in ROWS if row.test == test)


def served(rate: float, ttft: float) -> dict[str, Any]:
    run = {"out_tok_s": rate, "ttft_ms_median": ttft}
    return {"loads": {"64": {**run, "runs": [run]}}}


def test_a_group_replaces_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "below" / "h200.json"
    record.merge(file, "startup", entry({"trimaran": 1}))
    record.merge(file, "http-m1", entry({"trimaran": 2}))
    found = record.merge(file, "startup", entry({"trimaran": 3}))
    assert record.read(file) == found
    assert {group: found[group]["figures"] for group in found} == {
        "http-m1": {"trimaran": 2},
        "startup": {"trimaran": 3},
    }
    assert list(file.parent.iterdir()) == [file]


def test_a_record_that_is_none_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text("[]")
    with pytest.raises(SystemExit, match="holds no record"):
        record.merge(file, "startup", {})
    assert file.read_text() == "[]"


@pytest.mark.parametrize(("rate", "said"), [(33_999, "missed"), (34_000, "met must"), (40_000, "met aim")])
def test_more_tokens_are_better(rate: float, said: str) -> None:
    found = {"offline": entry({"trimaran": {"m1": {"throughput": {"out_tok_s": rate}}}})}
    assert verdict(found, row("M1 offline 512/256: out tok/s")) == said


@pytest.mark.parametrize(("itl", "said"), [(0.76, "missed"), (0.75, "met must"), (0.56, "met aim")])
def test_less_time_is_better(itl: float, said: str) -> None:
    found = {"offline": entry({"trimaran": {"m1": {"batch": {"1": {"itl_ms_median": itl}}}}})}
    assert verdict(found, row("M1 batch 1: ITL")) == said


@pytest.mark.parametrize(("rate", "ttft", "said"), [(114, 91, "missed"), (115, 90, "met must"), (140, 60, "met aim")])
def test_ratios_are_to_the_peer_of_the_same_run(rate: float, ttft: float, said: str) -> None:
    found = {"http-m1": entry({"trimaran": served(rate, ttft), "vllm": served(100, 100)})}
    assert verdict(found, row("M1 HTTP 64 clients: out tok/s")) == said
    assert verdict(found, row("M1 HTTP 64 clients: TTFT")) == said


def test_no_verdict_without_its_grounds() -> None:
    test = row("M1 HTTP 64 clients: out tok/s")
    alone = entry({"trimaran": served(100, 100)})
    assert verdict({}, test) == "not measured"
    assert verdict({"http-m1": entry({"vllm": served(100, 100)})}, test) == "not measured"
    assert verdict({"http-m1": alone}, test) == "no peer"
    assert verdict({"http-m1": alone | {"is_comparable": False}}, test) == "not comparable"


def test_every_row_is_of_a_group_and_asks_more_in_its_aim() -> None:
    assert {row.group for row in ROWS} == set(GROUPS) - {"profile"}, "a profile explains, it asks nothing"
    for one in ROWS:
        assert one.is_rate == (one.aim > one.must), one.test
        assert one.floor is None or (one.floor > one.aim) == one.is_rate, one.test
    assert len({one.test for one in ROWS}) == len(ROWS)


def test_the_page_of_nothing_lists_what_is_required() -> None:
    text = page.render({})
    assert requirements.BASELINE_SOURCE in text
    assert text.count("not measured") == len(ROWS)


def test_the_page_shows_both_engines_ratios_and_grounds() -> None:
    ratio = {"64": {"out_tok_s": 1.5, "ttft_ms_median": 0.5}}
    figures_ = {"trimaran": served(27_000, 24), "vllm": served(18_000, 48), "ratio": ratio}
    found = {"http-m1": entry(figures_, notes=["something was left out"], failed=["vllm 256 clients: not done"])}
    lines = page.render(found).splitlines()
    assert (
        "| M1 HTTP 64 clients: out tok/s | 17.6-17.9 k | 18 k | - | x 1.15 | x 1.4 | 27 k (x 1.50) | met aim |" in lines
    )
    assert any(line.startswith("| 64 | ratio | 1.5 | 0.5 |") for line in lines)
    assert "Note: something was left out." in lines
    assert "Failed: vllm 256 clients: not done" in lines
    assert any("NVIDIA H200, a processor, 16 cores" in line and "vllm 0.26.0" in line for line in lines)
    short = page.summary(found, "http-m1")
    assert "met aim" in short
    assert "startup" not in short


def test_medians_of_runs_are_what_is_compared() -> None:
    ours = {"loads": {"64": {"out_tok_s": 150.0, "itl_ms_median": None}, "512": {"out_tok_s": 1.0}}}
    assert serving.ratios({"trimaran": ours, "vllm": served(100, 10)}) == {"64": {"out_tok_s": 1.5}}
    assert serving.ratios({"trimaran": ours}) == {}


def test_figures_of_a_load_leave_bad_answers_out() -> None:
    good = [Answer(0.0, 1.1, [0.1, 0.2, 0.4], 3), Answer(0.5, 2.0, [0.8, 1.0, 1.2], 3, num_empty=1)]
    bad = [Answer(0.0, 9.0, [0.1], 1), Answer(0.0, 9.0, error="HTTP/1.1 429"), Answer(0.0, 9.0)]
    found = figures(good + bad, 3)
    assert (found["requests"], found["num_bad"], found["s"], found["out_tok_s"]) == (2, 3, 2.0, 3.0)
    assert "1 tokens came, 3 were asked for" in found["first_bad"]
    assert found["ttft_ms_median"] == 300
    assert found["itl_ms_p99"] == 200
    assert found["empty_chunks"] == 1
    assert figures(bad, 3)["requests"] == 0


def test_figures_of_the_offline_tests() -> None:
    rates = [{"test": "throughput", "s": s, "tokens": 100, "prompt_tokens": 200} for s in (1.0, 2.0, 4.0)]
    times = {"test": "times", "size": 2, "prompt": 128, "output": 3, "first_us": [5000, 7000], "gaps_us": [1000, 2000]}
    long = {"test": "times", "size": 1, "prompt": 16384, "output": 1, "first_us": [400_000], "gaps_us": []}
    found = offline.figures([{"test": "start", "first_output_s": 9.5}, *rates, times, long])
    assert found["first_output_s"] == 9.5
    assert found["throughput"] == {"out_tok_s": 50.0, "total_tok_s": 150.0, "runs": [100.0, 50.0, 25.0]}
    assert found["batch"]["2"]["ttft_ms_max"] == 7
    assert found["batch"]["2"]["itl_ms_median"] == 2
    assert found["prompt"]["16384"]["ttft_ms_median"] == 400
    assert "itl_ms_median" not in found["prompt"]["16384"]
    assert offline.figures([]) == {}


def test_phases_are_told_since_the_process_began() -> None:
    told = [
        {"name": "weights", "process": "worker 0", "began_s": 105.0, "took_s": 2.0},
        {"name": "process", "process": "worker 0", "began_s": 101.0, "took_s": 3.0},
        {"name": "still", "process": "core", "began_s": 106.0, "took_s": None},
    ]
    found = startup.phases(told, 100.0)
    assert [(one["phase"], one["began_s"]) for one in found] == [("worker 0: process", 1.0), ("worker 0: weights", 5.0)]


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([1, 2], 0.5) == 2
    assert percentile([1, 2], 1.0) == 2


def test_work_of_a_model() -> None:
    """Against the sums by hand: 28 layers of 15,728,640 numbers and a head of 155,582,464 (Qwen3-0.6B's shape)."""
    work = work_of(SHAPES["m1"])
    assert work.weight_bytes == 2 * (28 * 15_728_640 + 155_582_464)
    assert work.cache_bytes(sequences=3, length=10) == 3 * 10 * 114_688
    alone = Work(num_layers=1, layer=(2, 3), head=5, query_channels=7, kv_channels=7)
    assert alone.linear_operations(tokens=4) == 2 * (2 * 4 + 3 + 5)
    assert alone.attention_operations(tokens=4, length=6) == 4 * 7 * 10, "the last layer's one token sees all ten"
    two = Work(num_layers=2, layer=(2, 3), head=5, query_channels=7, kv_channels=7)
    assert two.linear_operations(4) - alone.linear_operations(4) == 2 * 5 * 4
    assert two.attention_operations(4, 6) - alone.attention_operations(4, 6) == 4 * 7 * (7 + 8 + 9 + 10)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("norm_linear_kernel", "linear"),
        ("nvjet_tst_64x8_64x16_1x2_h_bz_TNT", "linear"),
        ("void cutlass::Kernel2<cutlass_80_wmma>", "linear"),
        ("decode_attention_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("norm_rotary_write_kernel", "rotary"),
        ("add_rms_norm_kernel", "norm"),
        ("silu_and_mul_kernel", "activation"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("vectorized_elementwise_kernel", "other"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_a_profile_tells_what_kernels_reach_and_how_much_of_a_step_is_idle() -> None:
    work = Work(num_layers=1, layer=(200, 300), head=500, query_channels=64, kv_channels=32)
    told: list[dict[str, Any]] = [
        {"what": "start", "marks": {}},
        {
            "what": "decode",
            "sequences": 64,
            "length": 8,
            "busy_us_per_step": 900.0,
            "build_ms": 0.1,
            "kinds": {"linear": 2.0},
        },
        {"what": "prompt", "tokens": 4, "length": 0, "kinds": {"linear": 0.001, "attention": 0.002}},
    ]
    found = profiling.cases(told, work)
    decode, prompt = found["decodes"]["64 x 8"], found["prompts"]["4 behind 0"]
    assert decode["linear_gb_s"] == 1.0, "2,000 bytes in 2 us"
    assert decode["attention_gb_s"] is None, "no attention was seen"
    assert (prompt["linear_tflop_s"], prompt["attention_tflop_s"]) == (3.2, 0.5)
    seen = profiling.shares({"m1": found, "core": {"64": {"total_ms": 0.3}}}, "64", itl_ms=1.2)
    assert seen == {"itl_ms": 1.2, "device_ms": 0.9, "idle_share": 0.25, "build_ms": 0.1, "core_ms": 0.3}
    unseen = profiling.shares({"m1": found}, "1", itl_ms=1.2)
    assert unseen["idle_share"] is None
    figures = {"trimaran": {"m1": found, "seen": {"64": seen}, "ceilings": {"copy_gb_s": 4200.0}}}
    shown = page.render({"profile": entry(figures)})
    assert "4200" in shown and "m1 64 x 8" in shown and "| 0.25 |" in shown


def test_ceilings_are_the_measured_ones() -> None:
    measured = {"bandwidth": {"value": 4.2e3}, "rates": {"bfloat16": {"value": 700.0}, "float32": {"value": 50.0}}}
    assert profiling.ceilings(measured) == {"copy_gb_s": 4.2e3, "matrix_tflop_s": 700.0}
