"""Host memory whose pages are there when it is handed out."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from megatron_fsdp_adapter.core.runtime import device
from megatron_fsdp_adapter.core.runtime.device import PART, host_pages

CHECKS = ("core/runtime/device.py",)


@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE + 3, PART + 5])
def test_it_is_zero_and_may_be_written(nbytes: int) -> None:
    memory = host_pages(nbytes)
    assert memory.dtype == torch.uint8
    assert memory.shape == (nbytes,)
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes


def test_a_view_keeps_it() -> None:
    words = host_pages(4096).view(torch.int32)
    words.fill_(5)
    gc.collect()
    others = [host_pages(4096) for _ in range(8)]
    assert (words == 5).all()
    assert not any(other.any() for other in others)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_all_its_pages_are_there_and_go_with_it() -> None:
    before = resident_bytes()
    memory = host_pages(4 * PART)
    assert resident_bytes() - before > 3.5 * PART
    del memory
    assert resident_bytes() - before < 2 * PART


def test_a_system_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.mmap, "MADV_HUGEPAGE", -1)
    assert not host_pages(2 * mmap.PAGESIZE).any()
