"""A stand-in for a module, as one other module sees it."""

from __future__ import annotations

from typing import Any


class ModuleView:
    """Stands for a module (torch, torch.cuda) and answers some names itself.

    A name that is not in `answers` is read from `target` at every access, so that a view never
    holds a stale value. Put in the place of a module's global, it changes what that module calls
    and nothing else in the process.
    """

    def __init__(self, target: Any, answers: dict[str, Any]) -> None:
        self.__dict__.update(answers)
        self.__dict__["target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["target"], name)

    def __repr__(self) -> str:
        return f"ModuleView({self.__dict__['target']!r})"
