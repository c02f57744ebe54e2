"""Hooks on what autograd saves are shown activations and none of the engine's buffers, and backward
reads the weights that are gathered again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.engine.buffer import is_owned, mark_owned
from megatron_fsdp_adapter.core.engine.wgrad import WgradProtocol
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.lib.engine.engine_cases import Rig, buffers_of, built
from tests.lib.engine.fused_linear import FusedProduct
from tests.lib.engine.host_copies import HostCopies
from tests.lib.engine.pretended import PretendCommunicator
from tests.lib.engine.scenarios import EVENTS, SCENARIOS, cells
from tests.lib.engine.small_model import Exploded, Setup
from tests.lib.plain.gathered import RoundedWeight

CHECKS = (
    "core/engine/saved_tensors.py",
    "core/engine/params.py",
    "core/engine/wgrad.py",
    "core/engine/gather.py",
)

OFFLOADED = (
    "steps", "frozen", "accumulates", "overwrites", "overwrites_early", "slots", "reentrant",
    "non_reentrant", "selective", "fused_recompute", "current", "mxfp8",
)  # fmt: skip


@contextmanager
def made(setup: Setup) -> Iterator[tuple[Rig, HostCopies]]:
    """A rig in a pretended world, and hooks that copy what autograd saves. None of the engine's
    buffers is among it."""
    with built(setup, HostRuntime(), PretendCommunicator) as rig:
        copies = HostCopies({flat.untyped_storage()._cdata for _, flat in buffers_of(rig.engine)})
        yield rig, copies
    assert not copies.found, copies.found


def _trained(setup: Setup, event: str, offloads: bool) -> dict[str, torch.Tensor]:
    with made(setup) as (rig, copies):
        with copies.hooks() if offloads else nullcontext():
            EVENTS[event](rig)
        assert bool(copies.packed) == offloads
        return rig.weights()


@pytest.mark.parametrize(("strategy", "scenario"), cells(*OFFLOADED))
def test_offloaded_activations_train_to_the_same_bits(strategy: str, scenario: str) -> None:
    setup = SCENARIOS[scenario].setup(strategy)
    for event in ("microbatches", "evaluation_between"):
        expected, found = (_trained(setup, event, offloads) for offloads in (False, True))
        for name, value in expected.items():
            assert torch.equal(found[name], value), (event, name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_flag_that_hooks_hide_is_not_relied_on(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine 2.11 asks the saved weight: it would add to a bucket of NaN."""
    monkeypatch.setenv("MEGATRON_FSDP_ADAPTER_POISON", "1")
    expected = _trained(Setup(strategy=strategy), "microbatches", offloads=False)
    plainly = FusedProduct.apply
    monkeypatch.setattr(
        FusedProduct, "apply", lambda x, weight: plainly(x, weight, "asks what it saved")
    )
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
    with made(Setup(dtype=torch.float32)) as (rig, copies):
        layer = rig.model.layers[1]

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight = layer.up.weight  # (7, 6)
            y = x @ weight.t() + (x @ weight.view(-1).view(7, 6)[:, :].t())
            return x + y[..., :6] * weight[0] * torch.cat(weight.split(3)[:1])[1]

        layer.forward = forward
        with copies.hooks():
            rig.forward_backward(2)
        rig.finish()
        assert copies.packed
        assert all(pair.grad._local_tensor.isfinite().all() for pair in rig.engine.pairs)


def test_hooks_of_modules_of_the_root_are_sifted_as_well() -> None:
    """Opened around a module that is no unit, in the model's own forward."""
    with made(Setup()) as (rig, copies):
        rig.model.norm = copies.hooks()(rig.model._modules.pop("norm"))
        rig.step()
        assert copies.packed


def top_hooks() -> Any:
    """The pair of hooks that is asked at present; None if none is on."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


ERRORS = {
    "in forward": ("forward 1", None, Exploded),
    "in backward": ("backward 1", None, Exploded),
    "inside of a unit": (None, lambda x: x.no_such_attribute, AttributeError),
    "interrupted": (None, mock.Mock(side_effect=KeyboardInterrupt), KeyboardInterrupt),
}


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_a_pass_that_raises_leaves_the_users_hooks_as_they_were(name: str, goes_on: bool) -> None:
    """Behind the user's context none of his are on; inside it, and in later passes, they are what
    they were. Torch calls no hook of a module for an interrupt, after which they come later."""
    explode, forward, error = ERRORS[name]
    with made(Setup()) as (rig, copies):
        layer = rig.model.layers[1]
        inside = layer.forward
        with copies.hooks():
            users = top_hooks()
            rig.model.explode = explode
            layer.forward = forward or inside
            with pytest.raises(error):
                rig.forward_backward()
            rig.model.explode = None
            layer.forward = inside
            if goes_on:
                rig.step()
            assert error is KeyboardInterrupt or top_hooks() == users
        assert top_hooks() is None
        packed = copies.packed
        rig.step()
        assert packed == copies.packed > 0


def test_the_engine_keeps_no_activation_alive_that_is_offloaded() -> None:
    """Or its memory would not be free between forward and backward."""
    with made(Setup()) as (rig, _):
        rig.step()
        storages: list[Any] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages.append(weakref.ref(tensor.untyped_storage()))
            return tensor.detach().clone()

        with saved_tensors_hooks(pack, lambda copy: copy):
            loss = rig.loss()
        gc.collect()
        alive = [ref() for ref in storages if ref() is not None and ref().nbytes() > 64]
        assert len(storages) > 10 and len(alive) <= 1, len(alive)  # the tokens
        loss.backward()


def test_whose_a_storage_is_is_told_by_any_view_and_by_what_is_made_of_it() -> None:
    ours = torch.zeros(4, 6)
    other = torch.zeros(4, 6)
    mark_owned(ours)
    gc.collect()
    param = torch.nn.Parameter(torch.empty(0))
    param.data = ours[1:3]
    views = [ours, ours.t(), ours[1:], ours.view(-1)[5:9], param, param.t(), param.detach()]
    views.append(RoundedWeight(ours, torch.ones(()), torch.float32))  # it has slots
    for nbytes in (ours.nbytes, 0, ours.nbytes):
        ours.untyped_storage().resize_(nbytes)
        assert all(map(is_owned, views))
    others = [other, other.t(), ours.clone(), ours + 1, other.to_sparse()]
    assert not any(map(is_owned, others))
