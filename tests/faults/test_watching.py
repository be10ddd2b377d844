"""Health of the device while it serves: in the log and in /metrics when it changes, and never in the way of a token."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimaran.tests.contract_suite.site import make_site
from trimaran.tests.faults.crowd import nothing_left
from trimaran.tests.server import Server

HERE = Path(__file__).parent
CLOCK = "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
TEMPERATURE = "sys/class/thermal/thermal_zone0/temp"
BATTERY_STATUS = "sys/class/power_supply/BAT0/status"
MAINS = "sys/class/power_supply/AC/online"
HEALTHY = {
    CLOCK: "3000000",
    "sys/class/thermal/thermal_zone0/type": "x86_pkg_temp",
    TEMPERATURE: "50000",
    "sys/class/power_supply/AC/type": "Mains",
    MAINS: "1",
    "sys/class/power_supply/BAT0/type": "Battery",
    BATTERY_STATUS: "Charging",
    "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
}
MHZ, CELSIUS, BATTERY = (
    'device_clock_mhz{clock="cores",rank="0"}',
    'device_temperature_celsius{rank="0"}',
    'device_on_battery{rank="0"}',
)
CHANGES = [
    (
        {CLOCK: "1200000"},
        "the cores clock fell to 1200 MHz from 3000",
        'device_clock_mhz{clock="cores",rank="0"}',
        1200.0,
    ),
    ({CLOCK: "3000000"}, "the cores clock is back at 3000 MHz", MHZ, 3000.0),
    ({TEMPERATURE: "95500"}, "the device is at 96 degrees C", CELSIUS, 95.5),
    ({TEMPERATURE: "60000"}, "the device has cooled to 60 degrees C", CELSIUS, 60.0),
    (
        {MAINS: "0", BATTERY_STATUS: "Discharging"},
        "runs on battery",
        'device_on_battery{rank="0"}',
        1.0,
    ),
    (
        {MAINS: "1", BATTERY_STATUS: "Charging"},
        "on mains power again",
        'device_on_battery{rank="0"}',
        0.0,
    ),
    (
        {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 8388608 kB\n"},
        "other programs took 8.0 GiB of device memory, 8.0 GiB are free",
        'device_memory_bytes{rank="0",state="free"}',
        float(8 << 30),
    ),
]


class Watched:
    """A server on a machine that is a folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        site = make_site(folder / "site")
        site.declare("watched", {"trimaran.platforms": {"watched": "watched_platform:WatchedPlatform"}})
        shutil.copy(HERE / "watched_platform.py", site.folder)
        self._machine = site.folder / "machine"
        self.change(HEALTHY)
        arguments = ("--platform", "watched", "--watch-interval", "0.1")
        self.server = Server(model, *arguments, script=None, environment=site.environment)

    def change(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self._machine / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_text(text)
            path.with_suffix(".new").replace(path)

    def wait_asked(self) -> None:
        """Until the health is asked for once more."""
        asked = self._machine / "asked"
        asked.unlink(missing_ok=True)
        self.server.until(asked.exists, 5, "a reading")

    def clear(self, name: str) -> None:
        (self._machine / name).unlink()

    def times_said(self, text: str) -> int:
        return sum(text in line for line in list(self.server.lines))


@pytest.fixture
def watched(tmp_path: Path, demo_folder: Path) -> Iterator[Watched]:
    found = Watched(tmp_path, demo_folder)
    with nothing_left(found.server):
        yield found


def test_a_change_is_logged_once_and_exported(watched: Watched) -> None:
    server = watched.server
    server.until(lambda: server.metrics().get('device_temperature_celsius{rank="0"}') == 50.0, 5, "the first reading")
    assert not watched.times_said("null: the ")
    for files, text, metric, value in CHANGES:
        watched.change(files)
        server.until(lambda text=text: watched.times_said(text), 5, text)
        server.until(lambda metric=metric, value=value: server.metrics().get(metric) == value, 5, metric)
    watched.wait_asked()
    watched.wait_asked()
    for _, text, _, _ in CHANGES:
        assert watched.times_said(text) == 1


def test_a_driver_that_does_not_answer_delays_no_token(watched: Watched) -> None:
    """Its reading hangs for as long as the test likes; tokens flow, the engine stays ready, and it can be stopped."""
    server = watched.server
    watched.change({"blocked": ""})
    watched.wait_asked()
    for _ in range(3):
        assert server.complete("tokens", max_tokens=100, ignore_eos=True)["usage"]["completion_tokens"] == 100
        assert server.status("/ready") == 200
    assert not server.printed("not ready")


def test_it_may_be_blocked_for_ever(watched: Watched) -> None:
    """The server ends in order while the driver still hangs: `nothing_left` asks for its exit code."""
    watched.change({"blocked": ""})
    watched.wait_asked()
    assert watched.server.stop(10) == 0
    assert not watched.server.printed("is killed")
    watched.server.start()


def test_a_driver_that_fails_costs_a_line_and_no_worker(watched: Watched) -> None:
    server = watched.server
    worker = server.pids("worker")
    watched.change({"broken": ""})
    server.until(lambda: watched.times_said("the driver is gone"), 5, "a line")
    watched.wait_asked()
    watched.wait_asked()
    assert watched.times_said("the driver is gone") == 1
    watched.clear("broken")
    server.until(lambda: watched.times_said("health can be read again"), 5, "its end")
    assert server.complete("a", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert server.pids("worker") == worker
