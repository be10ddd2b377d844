"""What a host shows: the processor's health, links, memory under a control group; all from files in a folder."""

from pathlib import Path

import pytest

from trimaran.device_workers.platforms.host import Host, resident_bytes
from trimaran.device_workers.platforms.host_health import HostHealth
from trimaran.device_workers.platforms.visibility import hiding

MEMINFO = "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n"


def host(root: Path, files: dict[str, str], machine: str = "x86_64") -> Host:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root=root, machine=machine)


def test_health_of_a_processor_over_time(tmp_path: Path) -> None:
    now = [10.0]
    files = {
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2000000",
        "/sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "3000000",
        "/sys/class/thermal/thermal_zone0/type": "acpitz",
        "/sys/class/thermal/thermal_zone0/temp": "90000",
        "/sys/class/thermal/thermal_zone1/type": "x86_pkg_temp",
        "/sys/class/thermal/thermal_zone1/temp": "61500",
        "/sys/class/powercap/intel-rapl:0/energy_uj": "5000000",
        "/sys/class/powercap/intel-rapl:0/max_energy_range_uj": "100000000",
        "/proc/stat": "cpu 100 0 0 800 100 0 0 0 0 0\n",
    }
    reader = HostHealth(host(tmp_path, files), clock=lambda: now[0])
    first = reader.read()
    assert first.clocks == {"cores": 2500.0} and first.temperature == 61.5
    assert first.power is None and first.compute_utilization is None, "differences need two readings"
    now[0] += 2
    host(
        tmp_path,
        {
            "/sys/class/powercap/intel-rapl:0/energy_uj": "85000000",
            "/proc/stat": "cpu 175 0 0 825 100 0 0 0 0 0\n",
        },
    )
    second = reader.read()
    assert second.power == 40.0
    assert second.compute_utilization == 0.75
    now[0] += 1
    host(tmp_path, {"/sys/class/powercap/intel-rapl:0/energy_uj": "5000000"})
    assert reader.read().power == 20.0, "the counter went round"


def test_a_host_that_shows_nothing_gives_nothing(tmp_path: Path) -> None:
    health = HostHealth(Host(root=tmp_path)).read()
    assert (health.clocks, health.power, health.temperature, health.compute_utilization) == ({}, None, None, None)
    assert Host(root=tmp_path).pcie("0000:01:00.0") == {}


def test_memory_is_what_the_control_group_allows(tmp_path: Path) -> None:
    files = {"/proc/meminfo": MEMINFO}
    assert host(tmp_path, files).memory_facts().total_bytes == 32 << 30
    files |= {"/sys/fs/cgroup/memory.max": str(4 << 30), "/sys/fs/cgroup/memory.current": str(1 << 30)}
    facts = host(tmp_path, files).memory_facts()
    assert (facts.total_bytes, facts.free_bytes) == (4 << 30, 3 << 30)
    files["/sys/fs/cgroup/memory.max"] = "max"
    assert host(tmp_path, files).memory_facts().total_bytes == 32 << 30


@pytest.mark.user_pain("D2")
@pytest.mark.parametrize(
    ("value", "hides"),
    [
        ("", True),
        ("-1", True),
        ("-1,0", True),
        ("NoDevFiles", True),
        ("0", False),
        ("2,0", False),
        ("GPU-11111111", False),
        ("MIG-0a1b", False),
    ],
)
def test_which_values_hide_every_device(value: str, hides: bool) -> None:
    assert (hiding({"CUDA_VISIBLE_DEVICES": value}, ("CUDA_VISIBLE_DEVICES",)) is not None) is hides


SUPPLIES = "/sys/class/power_supply"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"AC/type": "Mains", "AC/online": "1"}, None),
        ({"BAT0/type": "Battery", "BAT0/status": "Discharging"}, True),
        ({"BAT0/type": "Battery", "BAT0/status": "Charging"}, False),
        ({"BAT0/type": "Battery", "BAT0/status": "Not charging"}, False),
        ({"BAT0/type": "Battery", "BAT0/status": "Full", "BAT1/type": "Battery", "BAT1/status": "Discharging"}, True),
        ({"mouse/type": "Battery", "mouse/scope": "Device", "mouse/status": "Discharging"}, None),
    ],
)
def test_what_feeds_the_machine(tmp_path: Path, files: dict[str, str], expected: bool | None) -> None:
    shown = host(tmp_path, {f"{SUPPLIES}/{name}": text for name, text in files.items()})
    assert shown.on_battery() is expected
    assert HostHealth(shown).read().on_battery is expected


def test_memory_of_the_host_in_its_health(tmp_path: Path) -> None:
    """Pages of mapped files are left out of what is ours: the kernel counts them as free to take."""
    memory = HostHealth(host(tmp_path, {"/proc/meminfo": MEMINFO})).read().memory
    assert memory is not None and (memory.total_bytes, memory.free_bytes) == (32 << 30, 16 << 30)
    assert 0 < memory.ours_bytes < resident_bytes()
    assert HostHealth(Host(root=tmp_path / "nothing")).read().memory is None
