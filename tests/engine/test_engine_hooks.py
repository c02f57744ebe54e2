"""What the hooks watch."""

from __future__ import annotations

import torch
from torch import nn

from megatron_fsdp_adapter.engine.hooks import on_inputs_done


def test_a_parameter_passed_as_an_input_is_not_watched() -> None:
    """An output layer is called with the weight it shares. The weight's gradient is accumulated
    after a hook on it, so that the end of the unit's backward would come too early."""
    weight, hidden = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    grads: list[torch.Tensor | None] = []
    (given, watched), kwargs = on_inputs_done(
        (weight, hidden), {"also": weight}, lambda *_: grads.append(weight.grad)
    )
    assert given is weight and kwargs["also"] is weight and watched is not hidden
    (given * watched).sum().backward()
    assert len(grads) == 1 and grads[0] is not None
