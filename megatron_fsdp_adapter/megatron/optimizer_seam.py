"""Puts our functions (`REPLACED` of seven modules) in place of core's, and core's back.

`install()` puts them there until `uninstall()`. A wrapper that is constructed without it needs them
as well; they stay for as long as such a wrapper lives.
"""

from __future__ import annotations

import weakref
from typing import Any

from megatron.core import optimizer as core_optimizer

from . import (
    activation_offload,
    captures,
    emerging,
    hybrid_optimizer,
    optimizer,
    qk_clip,
    step_graphs,
)
from .seams.wrapped import is_wrapped, unwrap, wrap

REPLACED = (
    *optimizer.REPLACED, *hybrid_optimizer.REPLACED, *qk_clip.REPLACED,
    *activation_offload.REPLACED, *emerging.REPLACED,
    *step_graphs.REPLACED, *captures.REPLACED,
)  # fmt: skip

_USERS = "__megatron_fsdp_adapter_users__"
"""An attribute of core's optimizer package: whoever wants the functions there."""
_INSTALLED = "install()"


def problems() -> list[str]:
    """What is replaced and this megatron-core does not have, or has with other parameters;
    dotted paths, with what was found."""
    return [
        problem
        for row in REPLACED
        if not is_wrapped(getattr(row.owner, row.name, None))
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
        unwrap(row.owner, row.name)


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
        wrap(row.owner, row.name, row.ours)
