"""Explicit memory: aligned, apart, given back, refused in order, and accounted."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from ..platforms.contract import Clause, DeviceMemory, MemoryKind
from .judgement import clause, demand, raises, violated
from .subject import Subject

_ALIGNMENTS = (1, 2, 16, 64, 256, 512, 4096, 24, 96, 1000)
_SIZES = (1, 3, 1000, 4096, 65_537)
_ROUND_BYTES = 256 << 20
_MOST_ROUNDS = 600
_TOO_MUCH = 1 << 50
_SLACK_BYTES = 4 << 20
"""What an allocator may round one allocation up by."""


@clause("memory.alignment")
def test_alignment_as_asked(subject: Subject) -> None:
    _check_alignment(subject, MemoryKind.DEVICE)


@clause("memory.alignment_pinned", Clause.PINNED_MEMORY)
def test_alignment_of_pinned_memory(subject: Subject) -> None:
    _check_alignment(subject, MemoryKind.PINNED_HOST)


def _check_alignment(subject: Subject, kind: MemoryKind) -> None:
    kept: list[DeviceMemory] = []
    for alignment in _ALIGNMENTS:
        for num_bytes in _SIZES:
            memory = subject.take(num_bytes, kind=kind, alignment=alignment)
            kept.append(memory)
            address = memory.tensor((num_bytes,), torch.uint8).data_ptr() or memory.address
            demand(address != 0, "the memory has no address: neither its tensor nor `address` says one")
            where = f"asked for {alignment} bytes, got an address that is a multiple of {_largest_power(address)} only"
            demand(address % alignment == 0, where)
            demand(memory.num_bytes >= num_bytes, f"asked for {num_bytes} bytes, got {memory.num_bytes}")
            demand(memory.kind is kind, f"asked for {kind} memory, got {memory.kind}")


def _largest_power(address: int) -> int:
    return address & -address


@clause("memory.apart")
def test_live_memory_does_not_overlap(subject: Subject) -> None:
    taken = [subject.take(size, alignment=alignment) for size in _SIZES for alignment in (1, 96, 256)]
    for place, memory in enumerate(taken):
        memory.tensor((memory.num_bytes,), torch.uint8).fill_(place + 1)
    for place, memory in enumerate(taken):
        numbers = subject.read(memory.tensor((memory.num_bytes,), torch.uint8))
        demand(bool((numbers == place + 1).all()), f"allocation {place} of {len(taken)} was overwritten by another one")


@clause("memory.views")
def test_tensors_are_views_of_the_beginning(subject: Subject) -> None:
    memory = subject.take(1000, alignment=256)
    floats = memory.tensor((5, 50), torch.float32)
    floats.fill_(3)
    demand(floats.device == subject.device, f"its tensor is on {floats.device}, not on {subject.device}")
    total = float(memory.tensor((250,), torch.float32).sum())
    demand(total == 750, f"two tensors of one memory do not see each other's numbers: {total} instead of 750")
    memory.tensor((2,), torch.int32).zero_()
    demand(subject.read(floats)[0, :3].tolist() == [0, 0, 3], "a tensor does not begin where its memory begins")
    demand(memory.tensor((0,), torch.uint8).numel() == 0, "an empty tensor is not empty")
    with raises(AssertionError, "a tensor larger than its memory"):
        memory.tensor((251,), torch.float32)


@clause("memory.reuse")
def test_released_memory_is_used_again(subject: Subject) -> None:
    """More is taken and released, one after the other, than the device has."""
    facts = subject.backend.memory_facts()
    size = max(1 << 20, min(_ROUND_BYTES, facts.free_bytes // 4))
    if not subject.backend.profile.memory_is_shared:
        size = max(size, facts.total_bytes // 64)
    num_rounds = min(_MOST_ROUNDS, 2 * facts.free_bytes // size + 2)
    for number in range(num_rounds):
        try:
            memory = subject.take(size, alignment=256)
        except MemoryError as error:
            violated(f"{number} times {size} bytes were taken and released, then there were none left: {error}")
        del memory


@clause("memory.exhaustion")
def test_exhaustion_is_a_memory_error(subject: Subject) -> None:
    """And leaves what was there, and room for what comes."""
    kept = subject.take(4096)
    kept.tensor((4096,), torch.uint8).fill_(7)
    before = subject.held_bytes()
    for _ in range(2):
        with raises(MemoryError, f"asking for {_TOO_MUCH} bytes"):
            subject.take(_TOO_MUCH)
        _check_usable(subject, kept, before)


@clause("memory.exhaustion_by_and_by")
def test_memory_runs_out_by_and_by(subject: Subject) -> None:
    """Only where the device has memory of its own: taking all of the host's would harm others."""
    if subject.backend.profile.memory_is_shared:
        pytest.skip("its memory is the host's, which other programs need")
    kept = subject.take(4096)
    kept.tensor((4096,), torch.uint8).fill_(7)
    before, free = subject.held_bytes(), subject.backend.memory_facts().free_bytes
    piece = free // 6
    pieces: list[DeviceMemory] = []
    with raises(MemoryError, f"taking {piece} bytes seven times, with {free} free,"):
        pieces.extend(subject.take(piece) for _ in range(7))  # what came before the failure stays
    _check_usable(subject, kept, before + sum(memory.num_bytes for memory in pieces), slack=7 * _SLACK_BYTES)
    pieces.clear()
    again = subject.take(free // 2)
    demand(again.num_bytes >= free // 2, "after an exhaustion, half of what was free is not there")


def _check_usable(subject: Subject, kept: DeviceMemory, held_bytes: int, slack: int = 0) -> None:
    is_whole = bool((subject.read(kept.tensor((4096,), torch.uint8)) == 7).all())
    demand(is_whole, "an exhaustion changed memory that was taken before")
    after = subject.take(1 << 16).tensor((1 << 16,), torch.uint8)
    after.fill_(9)
    demand(bool((subject.read(after) == 9).all()), "after an exhaustion, new memory does not hold what is written")
    del after
    if Clause.MEMORY_ACCOUNTING not in subject.platform.declines:
        held = subject.held_bytes()
        demand(abs(held - held_bytes) <= slack, f"a failed allocation counts: {held} bytes are held, not {held_bytes}")


@clause("memory.accounting", Clause.MEMORY_ACCOUNTING)
def test_accounting_adds_up(subject: Subject) -> None:
    _check_accounting(subject, MemoryKind.DEVICE)


@clause("memory.accounting_pinned", Clause.MEMORY_ACCOUNTING, Clause.PINNED_MEMORY)
def test_accounting_of_pinned_memory(subject: Subject) -> None:
    _check_accounting(subject, MemoryKind.PINNED_HOST)


def _check_accounting(subject: Subject, kind: MemoryKind) -> None:
    """By kind, while a tensor is left, and after the last is gone."""
    gc.collect()
    before, size = subject.held_bytes(kind), 24 << 20
    first, second = subject.take(size, kind=kind), subject.take(size, kind=kind)
    tensor = first.tensor((size,), torch.uint8)
    held = subject.held_bytes(kind)
    demand(held - before >= 2 * size, f"{2 * size} bytes were taken and {held - before} more of {kind} are counted")
    most = 2 * (size + _SLACK_BYTES)
    demand(held - before <= most, f"{2 * size} bytes were taken and {held - before} more of {kind} are counted")
    del first, second
    gc.collect()
    left = subject.held_bytes(kind) - before
    demand(left >= size, f"a tensor of {size} bytes is alive and {left} bytes more of {kind} are counted")
    demand(left <= size + _SLACK_BYTES, f"memory that nobody holds still counts: {left} bytes of {kind}, not {size}")
    del tensor
    gc.collect()
    after = subject.held_bytes(kind)
    demand(after == before, f"all was released, and {after - before} bytes more of {kind} are counted than before")


@clause("memory.facts", Clause.MEMORY_ACCOUNTING)
def test_facts_are_fresh_and_plausible(subject: Subject) -> None:
    """Of the whole device: what we hold is part of what is in use, and grows when we take and write."""
    size = 64 << 20
    before = subject.backend.memory_facts()
    tensor = subject.take(size, alignment=256).tensor((size,), torch.uint8)
    tensor.fill_(1)
    subject.backend.synchronize()
    after = subject.backend.memory_facts()
    for facts in (before, after):
        demand(0 <= facts.free_bytes <= facts.total_bytes, f"{facts.free_bytes} of {facts.total_bytes} bytes are free")
        demand(facts.ours_bytes <= facts.total_bytes, f"we hold {facts.ours_bytes} of {facts.total_bytes} bytes")
    kept_before, kept_after = before.fragment_bytes or 0, after.fragment_bytes or 0
    used = (after.ours_bytes - kept_after) - (before.ours_bytes - kept_before)
    demand(used >= size * 3 // 4, f"{size} bytes were taken and written, and what we hold grew by {used}")
    by_kind = after.by_kind.get(MemoryKind.DEVICE, 0)
    is_part = subject.backend.profile.memory_is_shared or by_kind <= after.ours_bytes
    demand(is_part, f"{by_kind} bytes are held as device memory, and {after.ours_bytes} in all")
    demand(after.total_bytes == before.total_bytes, "the device's memory changed its size")


@clause("memory.holders", Clause.MEMORY_HOLDERS)
def test_holders_are_other_processes(subject: Subject) -> None:
    facts = subject.backend.memory_facts()
    for name, num_bytes in facts.holders.items():
        demand(0 <= num_bytes <= facts.total_bytes, f"{name} holds {num_bytes} of {facts.total_bytes} bytes")
        demand(name.split()[0] != str(os.getpid()), f"this process is listed among the others: {name}")
