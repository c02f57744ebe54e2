"""Faults that tests of the hunter put into the engine of both ranks."""

from __future__ import annotations

from collections.abc import Callable

from megatron_fsdp_adapter.plain.user_loop import UserLoopEngine


def double_beside_frozen() -> None:
    """Gradients are twice as large once all parameters of a unit are frozen."""
    attach = UserLoopEngine.attach_grads

    def attach_wrong(engine: UserLoopEngine) -> None:
        attach(engine)
        if engine._has_frozen_group:
            for pair in engine._attached:
                pair.grad._local_tensor.mul_(2.0)

    UserLoopEngine.attach_grads = attach_wrong  # type: ignore[method-assign]


def fail_in_second_backward() -> None:
    """A second backward of a step ends with an unclear error."""
    attach = UserLoopEngine.attach_grads

    def attach_wrong(engine: UserLoopEngine) -> None:
        attached = bool(engine._attached)
        attach(engine)
        if attached:
            raise KeyError("gradients")

    UserLoopEngine.attach_grads = attach_wrong  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "double beside frozen": double_beside_frozen,
    "error of a second backward": fail_in_second_backward,
}
