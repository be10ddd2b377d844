"""Kernels that are replaced while they serve: down their chain, to what ends it."""

from typing import Any

import pytest

from trimaran.device_workers.execution.guarded_kernels import KernelReplaced, KernelSet
from trimaran.ipc.conditions import DeviceFault, StepFailed
from trimaran.ipc.facts import DeviceCapability, DeviceProfile, Problem
from trimaran.kernels.implementation import DeclaredImplementation, Kernel, Services
from trimaran.kernels.registry import KernelChoices, Registry

CPU = DeviceProfile(platform="cpu", vendor="any", name="a CPU", capability=DeviceCapability(architecture="x86_64"))
PROBLEM = Problem(dtype="float32", head_dim=48)


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


class Noted:
    """A kernel that notes its calls, and raises what it is told to."""

    workspace_bytes = 0

    def __init__(self, name: str, calls: list[str], error: BaseException | None, *, capturable: bool) -> None:
        self._name, self._calls, self._error = name, calls, error
        self.capturable = capturable

    def __call__(self, *arguments: Any) -> None:
        self._calls.append(self._name)
        if self._error is not None:
            raise self._error

    def pack(self, weight: Any, bias: Any) -> str:
        return f"packed for {self._name}"


class Bench:
    """A set with one kernel, whose links `first`, `second`, ... raise these errors."""

    def __init__(self, kernel: str, *errors: BaseException | None, num_ranks: int = 1, pin: str | None = None) -> None:
        self.calls: list[str] = []
        self.changed: list[str] = []
        names = ("first", "second", "third")[: len(errors)]
        catalog = [self._link(kernel, name, error) for name, error in zip(names, errors, strict=True)]
        choices = KernelChoices({} if pin is None else {kernel: pin}, frozenset())
        self.is_broken = False
        self.kernels = KernelSet(
            Registry(catalog),
            CPU,
            Services(),
            choices,
            num_ranks=num_ranks,
            on_changed=self.changed.append,
            synchronize=self._synchronize,
        )
        self.kernels.load(kernel, PROBLEM)
        self.kernel: Any = self.kernels[kernel]

    def _synchronize(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand many lines more")

    def _link(self, kernel: str, name: str, error: BaseException | None) -> DeclaredImplementation:
        def load(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
            return Noted(name, self.calls, error, capturable=name == "first")

        return DeclaredImplementation(name=name, kernel=kernel, loader=load)

    @property
    def demoted(self) -> dict[str, str]:
        (resolution,) = self.kernels.resolutions
        return dict(resolution.demoted)


BAD = ValueError("broken\nand more")
REASON = "failed while serving: ValueError: broken"


def test_down_to_the_last_link_in_one_call() -> None:
    bench = Bench("embed", BAD, BAD, None)
    bench.kernel(1, 2)
    bench.kernel(1, 2)
    assert bench.calls == ["first", "second", "third", "third"]
    assert bench.demoted == {"first": REASON, "second": REASON}
    assert bench.changed == ["embed", "embed"]
    assert bench.kernel.capturable is False, "what may be recorded is asked of the one that serves"


def test_in_place_the_caller_begins_anew() -> None:
    bench = Bench("apply_penalties", BAD, BAD, None)
    for _ in range(2):
        with pytest.raises(KernelReplaced):
            bench.kernel()
    bench.kernel()
    assert bench.calls == ["first", "second", "third"]


def test_where_nothing_is_left_the_step_fails() -> None:
    bench = Bench("embed", BAD, BAD)
    with pytest.raises(StepFailed, match=r"kernel embed: second failed while serving.*nothing takes over") as failed:
        bench.kernel()
    assert "\n" not in str(failed.value)
    with pytest.raises(StepFailed):
        bench.kernel()


def test_a_pin_holds() -> None:
    bench = Bench("embed", BAD, None, pin="first")
    with pytest.raises(StepFailed, match=r"--kernel embed=first failed.*drop the pin"):
        bench.kernel()
    assert bench.calls == ["first"] and not bench.changed


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory"),
        RuntimeError("can't allocate memory"),
        RuntimeError("NPU out of memory. Tried to allocate 64.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GB)"),
        RuntimeError("level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        StepFailed("x"),
    ],
    ids=repr,
)
def test_memory_that_runs_out_is_no_fault_of_a_kernel(error: Exception) -> None:
    bench = Bench("embed", error, None)
    with pytest.raises(type(error)):
        bench.kernel()
    assert bench.calls == ["first"] and not bench.demoted


@pytest.mark.parametrize(("kernel", "num_ranks"), [("linear", 1), ("embed", 2)])
def test_packed_weights_and_ranks_need_new_workers(kernel: str, num_ranks: int) -> None:
    bench = Bench(kernel, BAD, None, num_ranks=num_ranks)
    with pytest.raises(DeviceFault, match=rf"kernel {kernel}: first failed while serving: .*start again without it"):
        bench.kernel()
    assert bench.demoted == {"first": REASON} and not bench.changed


def test_weights_are_packed_by_the_one_that_serves() -> None:
    assert Bench("linear", None, None).kernel.pack(1, 2) == "packed for first"


def test_in_a_recording_nothing_is_replaced_until_its_end() -> None:
    bench = Bench("embed", BAD, None)
    with pytest.raises(KernelReplaced), bench.kernels.recording():
        try:
            bench.kernel()
        finally:
            assert not bench.demoted and bench.calls == ["first"]
    assert bench.demoted == {"first": REASON}
    with bench.kernels.recording():
        bench.kernel()
    bench.kernel()
    assert bench.calls == ["first", "second", "second"]


def test_a_recording_of_a_pinned_one_fails_with_its_reason() -> None:
    bench = Bench("embed", BAD, None, pin="first")
    with pytest.raises(StepFailed, match="drop the pin"), bench.kernels.recording():
        bench.kernel()


@pytest.mark.user_pain("C8")
def test_a_broken_device_is_no_fault_of_the_kernel_that_met_it() -> None:
    """Nothing is demoted: the kernel that broke it was another one, and nothing can run there any more."""
    bench = Bench("embed", BAD, None)
    bench.is_broken = True
    with pytest.raises(DeviceFault, match=r"the launch of kernel embed showed: RuntimeError: CUDA error: an illegal"):
        bench.kernel()
    assert not bench.changed and not bench.kernels.resolutions[0].demoted
