"""A model without unit modules: everything is in the root unit, whose one bucket is filled again
while the last microbatch may still be reducing it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.engine import engine_cases
from tests.engine.engine_cases import Setup, build
from tests.engine.engine_scenarios import microbatches, steps
from tests.engine.pretended import pretended_world


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", [steps, microbatches])
def test_a_bucket_is_not_filled_before_its_last_reduction_has_passed(
    strategy: str, scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_cases, "units_of", lambda model: {})
    with pretended_world(2):
        rig = build(Setup(strategy))
        assert len(rig.engine.units) == 1
        with rig.watch():
            scenario(rig)
