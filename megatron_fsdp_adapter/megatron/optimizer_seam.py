"""Puts the functions of `optimizer.REPLACED` in place of core's, and core's back.

`install()` puts them there until `uninstall()`. A wrapper that is constructed without it needs them
as well; they stay for as long as such a wrapper lives.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from megatron.core import optimizer as core_optimizer

from .optimizer import REPLACED

_USERS = "__megatron_fsdp_adapter_users__"
"""An attribute of core's optimizer package: whoever wants the functions there."""
_INSTALLED = "install()"


def _is_ours(function: Any) -> bool:
    return hasattr(function, "_fsdp_original")


def problems() -> list[str]:
    """What is replaced and this megatron-core does not have, or has with other parameters;
    dotted paths, with what was found."""
    return [
        problem
        for row in REPLACED
        if not _is_ours(getattr(row.owner, row.name, None))
        and (problem := row.problem()) is not None
    ]


def install() -> None:
    """Until `uninstall()`. Idempotent."""
    _users().add(_INSTALLED)
    _replace()


def install_while_alive(wrapper: Any) -> None:
    """Until `wrapper` is garbage, unless something else needs them longer."""
    token = object()
    _users().add(token)
    weakref.finalize(wrapper, _release, token).atexit = False
    _replace()


def uninstall() -> None:
    """Puts the originals back, whoever uses them. Optimizers that were adopted stay so."""
    if hasattr(core_optimizer, _USERS):
        delattr(core_optimizer, _USERS)
    for row in REPLACED:
        function = getattr(row.owner, row.name, None)
        if not _is_ours(function):
            continue
        if function._fsdp_held is None:  # type: ignore[union-attr]
            delattr(row.owner, row.name)  # it was inherited
        else:
            setattr(row.owner, row.name, function._fsdp_held)  # type: ignore[union-attr]


def _users() -> set[object]:
    users: set[object] = vars(core_optimizer).setdefault(_USERS, set())
    return users


def _release(token: object) -> None:
    """One that had a hold on them is gone. After an `uninstall()` there is nothing to do."""
    users = vars(core_optimizer).get(_USERS, set())
    if token in users:
        users.discard(token)
        if not users:
            uninstall()


def _replace() -> None:
    for row in REPLACED:
        original = getattr(row.owner, row.name)
        if _is_ours(original):
            continue

        def function(*args: Any, _to: Any = row.ours, _from: Any = original, **kwargs: Any) -> Any:
            return _to(_from, *args, **kwargs)

        functools.update_wrapper(function, original)
        held = vars(row.owner).get(row.name)
        function._fsdp_original = original  # type: ignore[attr-defined]
        function._fsdp_held = held  # type: ignore[attr-defined]
        is_static = isinstance(held, staticmethod)
        setattr(row.owner, row.name, staticmethod(function) if is_static else function)
