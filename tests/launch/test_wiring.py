"""A training loop that does not know the wrapper is an error in its first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_fsdp_adapter.megatron.no_sync_check import NoSyncCheck

UNWIRED = SimpleNamespace(no_sync_func=None)
WIRED = SimpleNamespace(no_sync_func=print)


def test_second_microbatch_of_an_unwired_loop_raises() -> None:
    check = NoSyncCheck(expected=True)
    check.on_zero_grads()
    check.on_forward(UNWIRED, training=True)
    with pytest.raises(RuntimeError, match="no_sync_func=None"):
        check.on_forward(UNWIRED, training=True)


def test_steps_of_one_microbatch_need_no_wiring() -> None:
    check = NoSyncCheck(expected=True)
    for _ in range(3):
        check.on_zero_grads()
        check.on_forward(UNWIRED, training=True)


@pytest.mark.parametrize("way", ("not expected", "wired", "no_sync", "evaluation", "no grad"))
def test_no_false_alarm(way: str) -> None:
    check = NoSyncCheck(expected=way != "not expected")
    if way == "no_sync":
        check.on_no_sync()
    for _ in range(3):
        with torch.set_grad_enabled(way != "no grad"):
            check.on_forward(WIRED if way == "wired" else UNWIRED, training=way != "evaluation")
