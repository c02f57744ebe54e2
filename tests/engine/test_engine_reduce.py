"""The order in which a unit's reductions are launched, and when their buckets go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_fsdp_adapter.core.engine.reduce import largest_domain_first
from tests.engine.engine_cases import Setup, build
from tests.engine.pretended import pretended_world


def test_the_largest_domain_of_a_unit_is_reduced_first():
    """Equal sizes in the order of the parameters; the same on every rank."""

    def group(domain, numel):
        return SimpleNamespace(
            key=SimpleNamespace(domain=domain), layout=SimpleNamespace(total_numel=numel)
        )

    small, large, rest = group("one", 8), group("two", 9), group("one", 2)
    found = largest_domain_first([small, large, rest])
    assert found == [("one", [small, rest]), ("two", [large])]
    assert [name for name, _ in largest_domain_first([small, large])] == ["two", "one"]
    assert [name for name, _ in largest_domain_first([small, group("two", 8)])] == ["one", "two"]


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_no_bucket_is_left_at_the_end_of_the_next_microbatch_s_forward(strategy):
    """There activations and logits are, so that two buckets more would raise the peak."""
    with pretended_world(2):
        rig = build(Setup(strategy))
        buckets = [g.bucket for g in rig.engine.groups if g.key.requires_grad]
        rig.zero()
        rig.last(False)
        rig.loss(0).backward()
        assert any(bucket.allocated for bucket in buckets)
        loss = rig.loss(1)
        assert not any(bucket.allocated for bucket in buckets)
        rig.last(True)
        loss.backward()
        rig.finish()
