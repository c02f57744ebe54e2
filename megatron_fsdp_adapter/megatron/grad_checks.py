"""What looks at gradients before they are communicated, as options of the DDP config say."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

from ..diagnostics.grad_check import GradCheck
from .options.rules import is_on

FACTOR = 10
"""How many times the largest norm of its first samples core allows a norm to be."""
NOISE = 0.001
"""How much, relatively, a norm may differ when core runs the step again."""


def judge_norm(name: str, norm: torch.Tensor) -> None:
    """Gives a unit's norm to core's rerun state machine, which compares it with the largest of its
    first 100 samples: it warns, or runs the step again, as its mode says."""
    machine = get_rerun_state_machine()
    machine.validate_result(
        result=norm,
        rejection_func=functools.partial(
            machine.is_unexpectedly_large, threshold=FACTOR, context="grads"
        ),
        message=f"gradients of unit {name} are unexpectedly large before communication",
        tolerance=NOISE,
        fatal=False,
    )


def chosen_check(ddp_config: Any) -> GradCheck | None:
    """None if no option asks for any."""
    by_param = is_on(ddp_config, "report_nan_in_param_grad")
    finite = by_param or is_on(ddp_config, "check_for_nan_in_grad")
    judge = judge_norm if is_on(ddp_config, "check_for_large_grads") else None
    return GradCheck(by_param, finite, judge) if finite or judge else None
