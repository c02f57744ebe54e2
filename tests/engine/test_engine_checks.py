"""Looking for gradients that are not finite: what it costs, and what it tells."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.engine.engine_cases import Setup, build
from tests.engine.pretended import pretended_world
from tests.engine.recording import RecordingRuntime


def _looked_at(strategy: str, **options: str) -> tuple[int, int]:
    """Tensors that two microbatches look at, and the segments of all buffers."""
    with pretended_world(2):
        rig = build(Setup(strategy, dtype=torch.float32, **options), RecordingRuntime())
        counting = mock.patch.object(torch, "_foreach_norm", wraps=torch._foreach_norm)
        with counting as norms, rig.runtime.watch():
            rig.forward_backward(2)
        looked_at = sum(len(call.args[0]) for call in norms.call_args_list)
        return looked_at, sum(len(group.bucket_segments) for group in rig.engine.groups)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_off_it_costs_nothing_and_on_one_reading_of_each_buffer(strategy):
    """And no race: it reads on the stream that writes the gradients."""
    assert _looked_at(strategy)[0] == 0
    looked_at, segments = _looked_at(strategy, check_by="unit")
    assert looked_at == 2 * segments
    by_param, segments = _looked_at(strategy, check_by="parameter")
    assert by_param > 2 * segments
