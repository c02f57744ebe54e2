"""The modules that the constructor's arguments pass until the plan of a model is made."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_fsdp_adapter
from megatron_fsdp_adapter.megatron.wrapper import adapter, construction
from tests.lib.gpt.gpt import Case, build_trainer, init_megatron
from tests.lib.gpt.variants import ZERO_3
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("megatron/wrapper/construction.py", "megatron/wrapper/model_plan.py")

PACKAGE = Path(megatron_fsdp_adapter.__file__).parent

ROOMS = {
    # What is asked for.
    "megatron/wrapper/construction.py", "megatron/wrapper/model_plan.py",
    "megatron/wrapper/arguments.py", "plan/placement.py", "megatron/options/rules.py",
    "megatron/options/table.py", "megatron/options/option.py", "megatron/options/ddp_options.py",
    "megatron/options/cuda_graphs.py", "megatron/options/staging_options.py", "core/config.py",
    # Each parameter, and its group.
    "megatron/wrapper/units.py", "megatron/wrapper/tensor_parallel.py", "quantized/params.py",
    "core/engine/partition.py", "plan/unit_grouping.py", "megatron/layers/fused_wgrad.py",
    # Ranks.
    "megatron/wrapper/domains.py", "core/distributed_index.py", "core/topology.py",
    "build/building.py", "megatron/elastic/manager.py",
}  # fmt: skip
"""Another module on the way is decided, and not drifted into."""

WARNS = "core/runtime/rank_warnings.py"
"""Of `grad_reduce_in_fp32`, which these tests set."""
PROPOSES = {"build/budget_proposal.py", "plan/unsharded_budget.py"}
"""Of what the first rank measures in a run without a budget."""


@on_ranks(2)
def test_a_plan_passes_these_modules(rank: int) -> None:
    found = set()

    def profile(frame: Any, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(str(path.relative_to(PACKAGE)))

    def build(*args: Any) -> Any:
        gc.disable()  # an earlier test's engine may be collected, whose finalizer would be counted
        sys.setprofile(profile)
        return construction.build(*args)

    def build_engine(*args: Any, **options: Any) -> Any:
        sys.setprofile(None)
        return made(*args, **options)

    made = construction.build_engine
    device = init_megatron()
    try:
        with (
            mock.patch.object(adapter, "build", build),
            mock.patch.object(construction, "build_engine", build_engine),
        ):
            build_trainer(Case(), ZERO_3, device)
    finally:
        sys.setprofile(None)
        gc.enable()
    more = {WARNS} if rank else {WARNS, *PROPOSES}
    assert found - more == ROOMS, (found - ROOMS, ROOMS - found)
