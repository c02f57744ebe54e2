"""Options of Lion, which later releases of core have."""

from __future__ import annotations

import pytest
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import OptimizerConfig

LION_IN_CORE = hasattr(OptimizerConfig, "lion_beta1")
"""Before 0.17 there is no such optimizer."""
LION_BESIDE_ADAM = hasattr(core_optimizer, "_get_megatron_emerging_optimizer")
"""From 0.18 on core's has Adam's betas, and matrices that are no embedding or output layer."""
BETAS = {"adam_beta1": 0.8, "adam_beta2": 0.95, "lion_beta1": 0.9, "lion_beta2": 0.85}
LION = {"optimizer": "lion", **BETAS}
OF_LATER_CORE = pytest.mark.skipif(not LION_IN_CORE, reason="this release has no optimizer 'lion'")
