"""The registry: order, reasons, pins, forbids, demotion, verdicts. No torch needed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimaran.ipc.conditions import Refusal
from trimaran.ipc.facts import AttentionStrategy, DeviceCapability, DeviceProfile, Feature, Problem
from trimaran.kernels.catalog import CATALOG
from trimaran.kernels.implementation import DeclaredImplementation, FunctionKernel, Kernel, KernelMetadata, Services
from trimaran.kernels.registry import KernelChoices, Registry
from trimaran.kernels.verification import VerdictCache, verdict_key

CPU = DeviceProfile(platform="cpu", vendor="any", name="a CPU", capability=DeviceCapability(architecture="x86_64"))
PROBLEM = Problem(dtype="float32", head_dim=48, num_heads=2, num_kv_heads=1, block_size=16, hidden_size=96)


def make(name: str, *, fails: str = "", **metadata: Any) -> DeclaredImplementation:
    def load(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
        if fails:
            raise RuntimeError(fails)
        return FunctionKernel(lambda: None)

    return DeclaredImplementation(name=name, kernel="twist", loader=load, metadata=KernelMetadata(**metadata))


def test_first_fit_with_the_reasons_of_those_before() -> None:
    chain = (
        make("wide", head_dim_multiple=64),
        make("halves", dtypes=frozenset({"float16"})),
        make("newer", min_compute_capability="9.0"),
        make("int8", features=frozenset({Feature.INT8})),
        make("elsewhere", platforms=frozenset({"cuda"})),
        make("plain"),
    )
    resolution = Registry(chain).resolve("twist", CPU, PROBLEM)
    assert resolution.chosen == "plain"
    assert resolution.rejected == {
        "wide": "needs a head size that is a multiple of 64, not 48",
        "halves": "takes dtype float16, not float32",
        "newer": "needs compute capability 9.0, device has none",
        "int8": "needs int8, which a CPU does not have",
        "elsewhere": "needs platform cuda, device is on cpu",
    }


def test_what_a_device_must_have_and_where_one_is_not_offered() -> None:
    from msgspec.structs import replace

    chain = (
        make("wide", min_shared_memory_bytes=96 << 10),
        make("picky", not_offered={"x86_64": "its compiler fails there"}),
        make("shy", not_platforms=frozenset({"cpu"})),
        make("narrow", same_kv_dtype=True),
        make("plain"),
    )
    profile = replace(CPU, capability=replace(CPU.capability, shared_memory_per_block_bytes=64 << 10))
    resolution = Registry(chain).resolve("twist", profile, replace(PROBLEM, kv_dtype="fp8"))
    assert resolution.chosen == "plain"
    assert resolution.rejected == {
        "wide": "needs 98304 bytes of shared memory per block, device has 65536",
        "picky": "not offered on x86_64: its compiler fails there",
        "shy": "does not run on platform cpu",
        "narrow": "needs a cache of the model's dtype float32, not fp8",
    }


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        (None, ["tiled", "bulk", "lean", "plain"]),
        (AttentionStrategy.LOW_OCCUPANCY, ["lean", "tiled", "bulk", "plain"]),
        (AttentionStrategy.BULK_COPY, ["bulk", "tiled", "lean", "plain"]),
        (AttentionStrategy.PLAIN, ["tiled", "bulk", "lean", "plain"]),
    ],
)
def test_the_strategy_asked_for_goes_first(asked: AttentionStrategy | None, order: list[str]) -> None:
    """The others stay behind it in their order, so that it falls back like any other."""
    from msgspec.structs import replace

    chain = (
        make("tiled", strategy=AttentionStrategy.TILED),
        make("bulk", strategy=AttentionStrategy.BULK_COPY, platforms=frozenset({"cuda"})),
        make("lean", strategy=AttentionStrategy.LOW_OCCUPANCY),
        make("plain"),
    )
    registry = Registry(chain)
    problem = replace(PROBLEM, attention_strategy=asked)
    assert [implementation.name for implementation in registry.order("twist", problem)] == order
    chosen = registry.resolve("twist", CPU, problem).chosen
    assert chosen == ("lean" if order[0] == "lean" else "tiled")


def test_what_names_no_strategy_keeps_its_place() -> None:
    """Another package's kernel at the head of the chain is not passed over for ours of the strategy asked for."""
    from msgspec.structs import replace

    tiled, lean = (make(name, strategy=AttentionStrategy(name)) for name in ("tiled", "low_occupancy"))
    registry = Registry((make("vendor"), tiled, lean, make("plain")))
    problem = replace(PROBLEM, attention_strategy=AttentionStrategy.LOW_OCCUPANCY)
    names = [candidate.name for candidate in registry.order("twist", problem)]
    assert names == ["vendor", "low_occupancy", "tiled", "plain"]


def test_the_catalog_offers_each_strategy() -> None:
    by_strategy = {implementation.metadata.strategy for implementation in Registry(CATALOG).chain("paged_attention")}
    assert by_strategy == {*AttentionStrategy, None}


def test_one_that_fails_to_load_is_demoted() -> None:
    registry = Registry((make("fast", fails="no such instruction"), make("plain")))
    _, resolution = registry.load("twist", CPU, PROBLEM, Services())
    assert resolution.chosen == "plain"
    assert resolution.demoted == {"fast": "RuntimeError: no such instruction"}


def test_a_match_that_raises_is_a_reason() -> None:
    class Odd(DeclaredImplementation):
        def misfit(self, profile: DeviceProfile, problem: Problem) -> str | None:
            raise KeyError("shared_memory")

    odd = Odd(name="odd", kernel="twist", loader=make("any").loader)
    resolution = Registry((odd, make("plain"))).resolve("twist", CPU, PROBLEM)
    assert resolution.chosen == "plain"
    assert resolution.rejected == {"odd": "its match failed: KeyError: 'shared_memory'"}


def test_one_that_disagrees_is_demoted() -> None:
    registry = Registry((make("fast"), make("plain")), lambda i, k, p, q, s: "is off" if i.name == "fast" else None)
    _, resolution = registry.load("twist", CPU, PROBLEM, Services())
    assert (resolution.chosen, resolution.demoted) == ("plain", {"fast": "is off"})


@pytest.mark.parametrize(
    ("pins", "forbidden", "says"),
    [
        (["twist=wide"], [], "does not fit: needs a head size that is a multiple of 64"),
        (["twist=broken"], [], "failed: RuntimeError: no"),
        (["twist=nothing"], [], "there are wide, broken, plain"),
        (["turn=wide"], [], "there are twist"),
        ([], ["nothing"], "there are broken, plain, wide"),
        ([], ["plain", "broken"], "allow one again"),
    ],
)
def test_choices_that_cannot_be(pins: list[str], forbidden: list[str], says: str) -> None:
    registry = Registry((make("wide", head_dim_multiple=64), make("broken", fails="no"), make("plain")))
    with pytest.raises(Refusal, match=says):
        registry.load("twist", CPU, PROBLEM, Services(), KernelChoices.from_options(pins, forbidden))


def test_pins_and_forbids_are_obeyed() -> None:
    registry = Registry((make("fast"), make("plain")))
    pinned = registry.resolve("twist", CPU, PROBLEM, KernelChoices.from_options(["twist=plain"]))
    assert (pinned.chosen, pinned.pinned, pinned.rejected) == ("plain", True, {"fast": "plain is pinned"})
    without = registry.resolve("twist", CPU, PROBLEM, KernelChoices.from_options([], ["fast"]))
    assert (without.chosen, without.rejected) == ("plain", {"fast": "forbidden by --without-kernel"})


@pytest.mark.parametrize("pins", [["twist"], ["=plain"], ["twist="], ["twist=fast", "twist=plain"]])
def test_pins_of_another_form(pins: list[str]) -> None:
    with pytest.raises(Refusal):
        KernelChoices.from_options(pins)


def test_every_chain_ends_in_plain_pytorch_and_names_are_unique() -> None:
    registry = Registry(CATALOG)
    names = [implementation.name for implementation in CATALOG]
    assert len(names) == len(set(names))
    for kernel in registry.kernels:
        last = registry.chain(kernel)[-1]
        assert last.name.startswith("plain_")
        # it takes anything, but where what a row gets must not depend on the batch
        assert last.metadata == KernelMetadata(
            depends_on_batch=kernel in ("linear", "paged_attention"), takes_caps_and_sinks=kernel == "paged_attention"
        )


def test_no_torch_until_load() -> None:
    code = (
        "import sys\n"
        "from trimaran.ipc.facts import Problem\n"
        "from trimaran.device_workers.platforms.detection import detect\n"
        "from trimaran.kernels.catalog import CATALOG\n"
        "from trimaran.kernels.registry import Registry\n"
        "from trimaran.kernels import verification\n"
        "profile = detect().platform.profile(0)\n"
        "problem = Problem(dtype='float32', head_dim=64, num_heads=1, num_kv_heads=1)\n"
        "for implementation in CATALOG: implementation.misfit(profile, problem)\n"
        "for kernel in Registry(CATALOG).kernels: Registry(CATALOG).resolve(kernel, profile, problem)\n"
        "assert not {'torch', 'triton'} & set(sys.modules), 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.user_pain("M9")
def test_verdicts_survive_and_broken_caches_cost_one_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    key = verdict_key(make("fast"), CPU, PROBLEM)
    VerdictCache(tmp_path, warnings.append).put(key, "agrees")
    again = VerdictCache(tmp_path, warnings.append)
    assert (again.get(key), again.num_hits, warnings) == ("agrees", 1, [])
    (tmp_path / "kernel-verdicts.json").write_text('{"fast": tru')
    broken = VerdictCache(tmp_path, warnings.append)
    assert broken.get(key) is None
    broken.put(key, "agrees")
    assert len(warnings) == 1
    unusable = VerdictCache(tmp_path / "kernel-verdicts.json" / "below", warnings.append)
    unusable.put(key, "agrees")
    unusable.put(key, "agrees")
    assert len(warnings) == 2
    assert unusable.get(key) == "agrees"


def test_verdicts_depend_on_device_driver_and_problem() -> None:
    from msgspec.structs import replace

    keys = {
        verdict_key(make("fast"), CPU, PROBLEM),
        verdict_key(make("slow"), CPU, PROBLEM),
        verdict_key(make("fast"), replace(CPU, name="another"), PROBLEM),
        verdict_key(make("fast"), replace(CPU, driver="2"), PROBLEM),
        verdict_key(make("fast"), CPU, replace(PROBLEM, head_dim=64)),
    }
    assert len(keys) == 5
