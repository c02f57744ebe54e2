"""Hooks on what autograd saves are shown activations and none of the engine's buffers, and backward
reads the weights that are gathered again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.saved_tensors import SavedTensorFilter, is_owned, mark_owned
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.engine.engine_cases import Exploded, Rig, Setup, buffers_of, build
from tests.engine.engine_scenarios import SCENARIOS, VARIANTS
from tests.engine.pretended import PretendCommunicator, pretended_world
from tests.host_copies import HostCopies

PLAIN = ("untied", "frozen", "accumulates", "overwrites", "overwrites_always", "slots",
         "reentrant", "non_reentrant", "selective", "fused_recompute")  # fmt: skip


def _rig(setup: Setup) -> Rig:
    return build(setup, HostRuntime(), PretendCommunicator)


def _storages(rig: Rig) -> set[int]:
    return {flat.untyped_storage()._cdata for _, flat in buffers_of(rig.engine)}


def _trained(setup: Setup, scenario: str, offloads: bool) -> dict[str, torch.Tensor]:
    with pretended_world(setup.world, setup.rank):
        rig = _rig(setup)
        if not offloads:
            SCENARIOS[scenario](rig)
            return rig.weights()
        copies = HostCopies(_storages(rig))
        with copies.hooks():
            SCENARIOS[scenario](rig)
        assert copies.packed and not copies.found, copies.found
        return rig.weights()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", PLAIN)
def test_offloaded_activations_train_to_the_same_bits(variant: str, strategy: str) -> None:
    setup = Setup(strategy=strategy).but(**VARIANTS[variant])
    for scenario in ("microbatches", "evaluation_between"):
        expected = _trained(setup, scenario, offloads=False)
        found = _trained(setup, scenario, offloads=True)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (scenario, name)


def test_quantized_weights_stay_where_they_are() -> None:
    for recipe in ("current", "mxfp8"):
        setup = Setup(recipe=recipe)
        expected = _trained(setup, "microbatches", offloads=False)
        found = _trained(setup, "microbatches", offloads=True)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), recipe


class _Forgetful(torch.autograd.Function):
    """A fused product that looks for the flag on the weight that it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.get_main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_weight, main = grad.flatten(0, -2).t() @ x.flatten(0, -2), ctx.main_grad()
        write = main.copy_ if getattr(weight, "overwrite_main_grad", False) else main.add_
        write(by_weight)
        return grad @ weight, None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_flag_that_hooks_hide_is_not_relied_on(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine 2.11 asks the saved weight: it would add to a bucket of NaN."""
    from tests.engine import fused_linear

    monkeypatch.setenv("MEGATRON_FSDP_ADAPTER_POISON", "1")
    expected = _trained(Setup(strategy=strategy), "microbatches", offloads=False)
    monkeypatch.setattr(fused_linear, "FusedProduct", _Forgetful)
    setup = Setup(strategy=strategy, fused=WgradProtocol.OVERWRITES_UNHOOKED)
    plain = _trained(setup, "microbatches", offloads=False)
    found = _trained(setup, "microbatches", offloads=True)
    for name, value in expected.items():
        torch.testing.assert_close(plain[name], value, rtol=1e-2, atol=1e-3)
        assert torch.equal(found[name], plain[name]), name
    if STRATEGIES[strategy].shard_grads:  # or the case would show nothing
        broken = setup.but(fused=WgradProtocol.OVERWRITES)
        found = _trained(broken, "microbatches", offloads=True)
        assert any(value.isnan().any() for value in found.values())


def test_views_of_a_weight_that_are_saved_read_what_is_gathered_again() -> None:
    """Transposed, sliced, flattened and split ones. A copy would be right as well; what is looked
    at here is that the saved view is the buffer's."""
    with pretended_world(2):
        rig = _rig(Setup(dtype=torch.float32))
        owned, shown = _storages(rig), []
        layer = rig.model.layers[1]

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight = layer.up.weight  # (7, 6)
            y = x @ weight.t() + (x @ weight.view(-1).view(7, 6)[:, :].t())
            return x + y[..., :6] * weight[0] * torch.cat(weight.split(3)[:1])[1]

        layer.forward = forward

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            shown.append(tensor.untyped_storage()._cdata)
            return tensor

        with saved_tensors_hooks(pack, lambda packed: packed):
            rig.forward_backward(2)
        rig.finish()
        assert shown and not owned & set(shown)
        assert all(pair.grad._local_tensor.isfinite().all() for pair in rig.engine.pairs)


def test_hooks_of_modules_of_the_root_are_sifted_as_well() -> None:
    """Opened around a module that is no unit, in the model's own forward."""
    with pretended_world(2):
        rig = _rig(Setup())
        copies = HostCopies(_storages(rig))
        norm = rig.model.norm
        inside = norm.__call__

        class Offloaded(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with copies.hooks():
                    return inside(x)

        rig.model.norm = Offloaded()
        rig.step()
        assert copies.packed and not copies.found


def test_torchs_own_context_and_a_backward_inside_it() -> None:
    with pretended_world(2):
        expected, found = _rig(Setup()), _rig(Setup())
        expected.step(3)
        with save_on_cpu():
            found.step(3)
        for name, value in expected.weights().items():
            assert torch.equal(found.weights()[name], value), name


def _depth() -> int:
    """How many pairs of hooks are on."""
    taken = []
    autograd = torch._C._autograd
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(taken):
        autograd._push_saved_tensors_default_hooks(*pair)
    return len(taken)


@pytest.mark.parametrize("where", ["forward 1", "backward 1"])
def test_a_pass_that_raises_leaves_the_users_hooks_as_they_were(where: str) -> None:
    with pretended_world(2):
        rig = _rig(Setup())
        copies = HostCopies(_storages(rig))
        with copies.hooks():
            rig.model.explode = where
            with pytest.raises(Exploded):
                rig.forward_backward()
            assert _depth() == 1
            rig.model.explode = None
            rig.step()
            assert _depth() == 1
        assert _depth() == 0 and not copies.found


def test_an_error_inside_a_unit_leaves_the_users_hooks_as_they_were() -> None:
    with pretended_world(2):
        rig = _rig(Setup())
        layer = rig.model.layers[1]
        inside, layer.forward = layer.forward, lambda x: x.no_such_attribute
        copies = HostCopies(_storages(rig))
        with copies.hooks():
            with pytest.raises(AttributeError):
                rig.forward_backward()
            assert _depth() == 1
            layer.forward = inside
            rig.step()
        assert _depth() == 0 and not copies.found


def test_the_engine_keeps_no_activation_alive_that_is_offloaded() -> None:
    """Or its memory would not be free between forward and backward."""
    with pretended_world(2):
        rig = _rig(Setup())
        rig.step()
        storages: list[Any] = []
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> int:
            storages.append(weakref.ref(tensor.untyped_storage()))
            kept.append(tensor.detach().clone())
            return len(kept) - 1

        with saved_tensors_hooks(pack, lambda index: kept[index]):
            loss = rig.loss()
        gc.collect()
        alive = [ref() for ref in storages if ref() is not None and ref().nbytes() > 64]
        assert len(storages) > 10 and len(alive) <= 1, len(alive)  # the tokens
        loss.backward()


def test_whose_a_storage_is_is_told_by_any_view_and_by_what_is_made_of_it() -> None:
    ours, other = torch.zeros(4, 6), torch.zeros(4, 6)
    mark_owned(ours)
    gc.collect()
    param = torch.nn.Parameter(torch.empty(0))
    param.data = ours[1:3]
    views = [ours, ours.t(), ours[1:], ours.view(-1)[5:9], param, param.t(), param.detach()]
    assert all(map(is_owned, views))
    ours.untyped_storage().resize_(0)
    assert is_owned(ours)
    ours.untyped_storage().resize_(ours.numel() * 4)
    assert all(map(is_owned, views))
    assert not any(map(is_owned, [other, other.t(), ours.clone(), ours + 1]))
    sparse = other.to_sparse()
    assert not is_owned(sparse)


def test_an_interrupt_leaves_the_users_hooks_as_they_were() -> None:
    """Torch calls no hook of a module for one. Behind the user's context none of his are on; inside
    it, and in later passes, they are what they were."""
    with pretended_world(2):
        rig = _rig(Setup())
        layer = rig.model.layers[1]
        inside = layer.forward

        def interrupted(x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

        for goes_on in (False, True):
            copies, layer.forward = HostCopies(_storages(rig)), interrupted
            with copies.hooks():
                with pytest.raises(KeyboardInterrupt):
                    rig.forward_backward()
                layer.forward = inside
                if goes_on:
                    rig.step()
            assert _depth() == 0
            packed = copies.packed
            rig.step()
            assert packed > 0 and packed == copies.packed and not copies.found


def test_hooks_are_replaced_and_nothing_is_put_where_none_are() -> None:
    saved = SavedTensorFilter()
    assert not saved.enter(1) and _depth() == 0
    saved.leave(1)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        theirs = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert saved.enter(1) and saved.enter(2) and _depth() == 1  # the second finds the first's
        saved.leave(2)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) != theirs
        saved.leave(1)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) == theirs
