"""Calls of methods that a program has registered by torch's `register_fsdp_forward_method`."""

from __future__ import annotations

from traceback import walk_stack


def runs_registered_method() -> bool:
    """True if this thread is inside torch's wrapper of a registered method. The wrapper, which is
    found by its name, gives no sign when the method raises."""
    return any(frame.f_code.co_name == "wrapped_method" for frame, _ in walk_stack(None))
