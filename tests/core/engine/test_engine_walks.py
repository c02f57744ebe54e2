"""The modules that one unit passes in a forward and in a backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import megatron_fsdp_adapter
from tests.lib.engine.engine_cases import profiled_pass
from tests.lib.engine.scenarios import ZERO_3
from tests.lib.engine.small_model import Setup

CHECKS = ("core/engine/hooks.py", "core/engine/engine.py", "core/engine/gather.py")

CORE = Path(megatron_fsdp_adapter.__file__).parent / "core"

GATHER = (
    "hooks", "engine", "gather", "prefetch_order", "unit", "weight_buffers", "buffer", "device",
    "communicator",
)  # fmt: skip

WALKS = {
    "forward": {*GATHER, "transforms", "grad_callbacks"},
    "backward": {*GATHER, "reduce", "reduction", "grad_buffers", "config"},
}
"""Another module on the way is decided, and not drifted into."""


@pytest.mark.parametrize("walk", WALKS)
def test_a_unit_passes_these_modules(walk: str) -> None:
    """In a step that knows the order of units, between the hooks of one layer."""
    events = {f"pre_{walk}", f"post_{walk}"}
    found = {"hooks"}  # which call the engine
    inside: list[Any] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if not path.is_relative_to(CORE):
            return
        is_engine = path.name == "engine.py" and code.co_name in events
        if event == "call" and is_engine and frame.f_locals["unit"].name == "layers.1":
            inside.append(frame)
        if event == "call" and inside:
            found.add(path.stem)
        if event == "return" and inside and inside[-1] is frame:
            inside.pop()

    profiled_pass(Setup(ZERO_3), profile)
    assert found == WALKS[walk]
