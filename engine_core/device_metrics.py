"""What `/metrics` says of devices, workers and kernels, from heartbeats and resolutions."""

from collections.abc import Iterable, Mapping, Sequence

from ..ipc.facts import DeviceHealth, DeviceProfile, Resolution
from ..ipc.metrics import MetricFamily, MetricKind, Sample
from ..ipc.worker_messages import Heartbeat


def device_families(
    profiles: Sequence[DeviceProfile],
    heartbeats: Mapping[int, Heartbeat],
    resolutions: Mapping[int, Iterable[Resolution]],
) -> list[MetricFamily]:
    """Gauges by rank; a value that a device does not report has no sample."""
    families = [
        _family(
            "device_info",
            "1 for the device of each rank",
            [
                Sample({"rank": str(rank), "platform": profile.platform, "name": profile.name}, 1.0)
                for rank, profile in enumerate(profiles)
            ],
        ),
        _family(
            "worker_resident_bytes",
            "Host memory of each worker process",
            [Sample({"rank": str(rank)}, float(beat.resident_bytes)) for rank, beat in heartbeats.items()],
        ),
    ]
    health = {rank: beat.health for rank, beat in heartbeats.items() if beat.health is not None}
    return [family for family in (*families, *_health(health), *_kernels(resolutions)) if family.samples]


def _health(health: Mapping[int, DeviceHealth]) -> list[MetricFamily]:
    clocks = [
        Sample({"rank": str(rank), "clock": name}, value)
        for rank, found in health.items()
        for name, value in found.clocks.items()
    ]
    utilizations = [
        Sample({"rank": str(rank), "of": of}, value)
        for rank, found in health.items()
        for of, value in (("compute", found.compute_utilization), ("memory_bandwidth", found.memory_utilization))
        if value is not None
    ]
    memory = [
        Sample({"rank": str(rank), "state": state}, float(size))
        for rank, found in health.items()
        if found.memory is not None
        for state, size in (("free", found.memory.free_bytes), ("total", found.memory.total_bytes))
    ]
    throttled = [
        Sample({"rank": str(rank), "reason": reason}, 1.0)
        for rank, found in health.items()
        for reason in found.throttle_reasons
    ]
    return [
        _family("device_clock_mhz", "Clocks of each device", clocks),
        _family("device_power_watts", "Power drawn", _each({rank: found.power for rank, found in health.items()})),
        _family(
            "device_temperature_celsius",
            "Temperature",
            _each({rank: found.temperature for rank, found in health.items()}),
        ),
        _family("device_utilization_ratio", "Share of time in which a part of the device worked", utilizations),
        _family("device_memory_bytes", "Device memory", memory),
        _family("device_throttled", "1 while the driver holds clocks down for this reason", throttled),
        _family(
            "device_on_battery",
            "1 while a battery feeds the machine",
            _each({rank: found.on_battery for rank, found in health.items()}),
        ),
        _family(
            "device_errors",
            "Errors that the driver reports",
            [Sample({"rank": str(rank)}, float(len(found.errors))) for rank, found in health.items()],
        ),
    ]


def _kernels(resolutions: Mapping[int, Iterable[Resolution]]) -> list[MetricFamily]:
    chosen, demoted = [], []
    for rank, found in resolutions.items():
        for resolution in found:
            names = {"rank": str(rank), "kernel": resolution.kernel}
            chosen.append(Sample({**names, "implementation": resolution.chosen}, 1.0))
            for name, reason in resolution.demoted.items():
                demoted.append(Sample({**names, "implementation": name, "reason": reason[:200]}, 1.0))
    return [
        _family("kernel_info", "1 for the implementation that serves each kernel", chosen),
        _family("kernel_demoted", "1 for an implementation that failed, with its reason", demoted),
    ]


def _each(values: Mapping[int, float | None]) -> list[Sample]:
    return [Sample({"rank": str(rank)}, float(value)) for rank, value in values.items() if value is not None]


def _family(name: str, text: str, samples: list[Sample]) -> MetricFamily:
    return MetricFamily(name, MetricKind.GAUGE, text, tuple(samples))
