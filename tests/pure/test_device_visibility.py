"""Which devices a worker may see: entries pass as they were written, and each worker gets its own."""

import pytest

from trimaran.frontend.launch.children import child_environment
from trimaran.frontend.launch.device_visibility import worker_visibility
from trimaran.frontend.launch.options import OptionError, Options, read_options
from trimaran.ipc.conditions import Refusal

UUID = "GPU-11111111-2222-3333-4444-555555555555"
SLICE = "MIG-0a1b2c3d-0000-1111-2222-333344445555"
pytestmark = pytest.mark.user_pain("D2")


def written(options: Options, inherited: dict[str, str] | None = None, rank: int = 0) -> dict[str, str]:
    return worker_visibility(options, rank, inherited or {}).written


def test_nothing_is_written_for_one_worker_that_nobody_gave_a_device() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": f"{SLICE},3", "HOME": "/root"}
    visibility = worker_visibility(Options(), 0, inherited)
    assert visibility.written == {}
    assert visibility.holding == {"CUDA_VISIBLE_DEVICES": f"{SLICE},3"}


def test_an_index_is_written_for_every_vendor() -> None:
    assert written(Options(device=("2",))) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2",
        "HIP_VISIBLE_DEVICES": "2",
        "ZE_AFFINITY_MASK": "2",
        "ASCEND_RT_VISIBLE_DEVICES": "2",
    }


@pytest.mark.parametrize("identifier", [UUID, SLICE])
def test_identifiers_go_to_the_vendors_that_take_them(identifier: str) -> None:
    found = written(Options(device=(identifier,)))
    assert found["CUDA_VISIBLE_DEVICES"] == found["HIP_VISIBLE_DEVICES"] == identifier
    assert "ZE_AFFINITY_MASK" not in found


@pytest.mark.parametrize(
    ("inherited", "asked", "seen"),
    [
        ("3,1,0", "1", "1"),
        ("3,1,0", "0", "3"),
        (f"{UUID},{SLICE}", "1", SLICE),
        (" 5 , 6 ", "1", "6"),
        (f"{UUID},2", UUID, UUID),
    ],
)
def test_an_index_counts_among_what_the_user_shows(inherited: str, asked: str, seen: str) -> None:
    found = written(Options(device=(asked,)), {"CUDA_VISIBLE_DEVICES": inherited})
    assert found["CUDA_VISIBLE_DEVICES"] == seen


def test_each_rank_has_a_device_of_its_own() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": f"7,{UUID}", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    seen = [written(Options(tensor_parallel=2), inherited, rank) for rank in (0, 1)]
    assert [found["CUDA_VISIBLE_DEVICES"] for found in seen] == ["7", UUID]
    assert [found["HIP_VISIBLE_DEVICES"] for found in seen] == ["0", "1"]
    assert seen[0]["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST", "the user's own order stays"
    named = Options(tensor_parallel=2, device=("4", "1"))
    assert [written(named, {}, rank)["ZE_AFFINITY_MASK"] for rank in (0, 1)] == ["4", "1"]


def test_too_few_devices_are_refused_by_the_variables_name() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(Refusal, match="--tensor-parallel 2.*CUDA_VISIBLE_DEVICES=0 shows.*--platform cpu"):
        worker_visibility(Options(tensor_parallel=2), 1, inherited)
    with pytest.raises(Refusal, match="--device 3 needs device 3"):
        worker_visibility(Options(device=("3",), platform="cuda"), 0, inherited)
    assert written(Options(tensor_parallel=2, platform="cpu"), inherited, 1)["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_option() -> None:
    options = read_options(["--device", f"1,{UUID}", "--tensor-parallel", "2"], {}).options
    assert options.device == ("1", UUID)
    assert read_options([], {"TRIMARAN_DEVICE": "3"}).options.device == ("3",)
    with pytest.raises(OptionError, match="--device names 1 devices, and --tensor-parallel 2.*--tensor-parallel 1"):
        read_options(["--device", "1", "--tensor-parallel", "2"], {})
    with pytest.raises(OptionError, match="--device names 2 devices.*--tensor-parallel 2"):
        read_options(["--device", "1", "--device", "2"], {})
    with pytest.raises(OptionError, match="twice"):
        read_options(["--device", "1,1", "--tensor-parallel", "2"], {})


def test_the_childs_environment_holds_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    inherited = {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin"}
    devices = written(Options(device=("1",)), inherited)
    environment = child_environment(inherited, num_threads=1, cache=tmp_path, devices=devices)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert child_environment(inherited, num_threads=1, cache=tmp_path)["CUDA_VISIBLE_DEVICES"] == "0,1"
