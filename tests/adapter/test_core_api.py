"""What differs between releases of megatron-core is told by what is there: both sides of a seam."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron_fsdp_adapter.megatron.compat import core_api


def test_groups_are_asked_for_ranks_that_hold_the_same_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 0.19 on core's data-parallel groups contain ranks that hold other parts of a weight."""

    def newer(check: bool = True, with_gtp_remat: bool = True, partial: bool = False) -> Any:
        return check, with_gtp_remat, partial

    def older(check: bool = True, partial: bool = False) -> Any:
        return check, partial

    for name in ("data_parallel_group", "expert_data_parallel_group"):
        ours = getattr(core_api, name)
        monkeypatch.setattr(parallel_state, f"get_{name}", newer)
        assert ours(False, partial=True) == (False, False, True)
        monkeypatch.setattr(parallel_state, f"get_{name}", older)
        assert ours(False, partial=True) == (False, True)


def test_a_gather_group_of_parallel_state_is_used_where_there_can_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "has_separate_all_gather_group"
    monkeypatch.setattr(parallel_state, name, lambda: True, raising=False)
    assert core_api.has_separate_all_gather_group() is True
    monkeypatch.delattr(parallel_state, name)
    assert core_api.has_separate_all_gather_group() is False


def test_a_tag_that_core_knows_no_norm_for_is_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    tagged = torch.nn.Parameter(torch.zeros(1))
    tagged.grad_norm_group = "mtp"  # type: ignore[attr-defined]
    monkeypatch.setattr(core_api, "SEPARATE_NORMS", ())
    assert core_api.norm_group(tagged) is None
    optimizer = SimpleNamespace(has_grad_norm_group=lambda name: True)
    assert core_api.present_norm_groups(optimizer) == []
    monkeypatch.setattr(core_api, "SEPARATE_NORMS", ("mtp",))
    assert core_api.norm_group(tagged) == "mtp"
    assert core_api.norm_group(torch.nn.Parameter(torch.zeros(1))) is None
    assert core_api.present_norm_groups(optimizer) == ["mtp"]
    optimizer.has_grad_norm_group = lambda name: False
    assert core_api.present_norm_groups(optimizer) == []


def test_without_the_option_no_step_is_left_out() -> None:
    assert core_api.norm_threshold(SimpleNamespace()) == float("inf")
    assert core_api.norm_threshold(SimpleNamespace(grad_norm_skip_threshold=3)) == 3.0


@pytest.mark.parametrize("takes_more", (True, False))
def test_a_context_rank_s_batch_is_of_its_own_group_in_any_release(
    monkeypatch: pytest.MonkeyPatch, takes_more: bool
) -> None:
    """From 0.18 on no group means the world, and an argument has no default."""

    def newer(batch: Any, is_hybrid_cp: bool, cp_group: Any = None) -> Any:
        return is_hybrid_cp, cp_group, batch

    def older(batch: Any, cp_group: Any = None) -> Any:
        return False, cp_group, batch

    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: "context ranks")
    function = newer if takes_more else older
    monkeypatch.setattr(core_api.core_utils, "get_batch_on_this_cp_rank", function)
    found = core_api.batch_of_context_rank({"tokens": 1})
    assert found == (False, "context ranks", {"tokens": 1})
