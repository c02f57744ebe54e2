"""Rows for names of other packages that the package gives another meaning, and what puts the rows
in place and takes them back: the one mechanism for methods, functions, classes and modules.

Rows of a purpose are a table (`table.py`). What is replaced is recorded on its owner, a module or a
class, under one attribute: no state is kept here, and what another package puts over ours is left
alone. Modules of megatron-core and torch are imported; others are used if they are loaded, so that
`install` is called again when more of them may be.

A class or function that other modules import by name is also rebound wherever a loaded module holds
the same object, also in a tuple or in the default of a function: frameworks on top of Megatron bind
it under names of their own. A fixed list of modules would miss some. `uninstall` gives each of
these places what it had. Modules of megatron that were loaded in between get the original too;
those of others stay as they are, for they may have imported ours by its own name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from . import releases

MORE = "..."
"""Last in a list of parameters: whatever follows is passed on."""

NOTHING = object()
"""There is no such attribute."""

Original = Callable[..., Any]
"""A function or method of another package that one of ours is called in the place of."""

_PACKAGE = __name__.partition(".")[0]
_DEFAULTS = "__defaults__"
_KEPT = f"__{_PACKAGE}_kept__"
"""An attribute of an owner: by name what it had by itself, `NOTHING` if that was inherited, and
what is there now."""


class ModuleView:
    """Stands for a module (torch, torch.cuda) and answers some names itself.

    A name that is not in `answers` is read from `target` at every access, so that a view never
    holds a stale value. Put in the place of a module's global, it changes what that module calls
    and nothing else in the process.
    """

    def __init__(self, target: Any, answers: Mapping[str, Any]) -> None:
        self.__dict__.update(answers)
        self.__dict__["target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["target"], name)

    def __repr__(self) -> str:
        return f"ModuleView({self.__dict__['target']!r})"


def calls(ours: Callable[..., Any], owner: Any, original: Any) -> Any:
    """A function that calls `ours` with the original before the call's own arguments."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return function


def stands(ours: Any, owner: Any, original: Any) -> Any:
    """`ours` itself."""
    return ours


def makes(ours: Callable[[Any, Any], Any], owner: Any, original: Any) -> Any:
    """The value that `ours` makes of the owner and the original."""
    return ours(owner, original)


@dataclass(frozen=True)
class Patch:
    """A name of another package's and what is there in its place.

    module, name: where it is defined: "function", "Class.method", "one or another" where releases
    name it differently; the first that is there. ours: in its place, or "module:name" of this
    package for what is looked up when it is needed; how: `calls`, `stands` or `makes`. parameters:
    the original's, one list for each form that a release has; none are compared if there is none.
    required: True if its absence is an error, or a function of the owner that decides it. default:
    the original where there is none. everywhere: also wherever a loaded module holds the same
    object, but in the modules `but_in`. why: "module.name, by which it ...", in errors.
    """

    module: str
    name: str
    ours: Any
    how: Callable[[Any, Any, Any], Any] = calls
    parameters: tuple[str, ...] = ()
    required: Any = True
    default: Any = NOTHING
    everywhere: bool = False
    but_in: tuple[str, ...] = ()
    why: str = ""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def missing(patches: Iterable[Patch]) -> list[str]:
    """Dotted paths of required names that are absent, or whose parameters differ from the row's,
    with what was found."""
    found = []
    for patch in patches:
        if _is_imported(patch.module) or patch.module in sys.modules:
            problem = _problem(patch)
            if problem is not None:
                found.append(f"{patch.path}{problem}")
    return found


def install(
    patches: Sequence[Patch],
    message: Callable[[str], str] = lambda lacks: f"there is no {lacks}. {releases.remedy()}",
) -> None:
    """Puts every row in place. Idempotent: a later call also reaches what was loaded, or bound to
    an original, in between. Raises RuntimeError, before anything is changed, with the `message` for
    all that is `missing`."""
    lacking = missing(patches)
    if lacking:
        raise RuntimeError(message(", no ".join(lacking)))
    swept: dict[int, tuple[Any, tuple[str, ...]]] = {}
    for patch in patches:
        found = place(patch)
        if found is None:
            continue
        owner, name = found
        if name not in _kept(owner):
            original = getattr(owner, name, patch.default)
            ours = patch.how(_looked_up(patch.ours), owner, original)
            is_static = isinstance(inspect.getattr_static(owner, name, None), staticmethod)
            _put(owner, name, staticmethod(ours) if is_static else ours)
        if patch.everywhere:
            original, ours = _kept(owner)[name]
            swept[id(original)] = ours, patch.but_in
    for holder, name, value in _holders(swept):
        _put(holder, name, value)


def uninstall(patches: Sequence[Patch]) -> None:
    """Gives every owner back what it had. Harmless where nothing is installed."""
    swept: dict[int, tuple[Any, tuple[str, ...]]] = {}
    for patch in reversed(patches):
        found = _in_place(patch)
        if found is None:
            continue
        owner, name = found
        original, ours = _kept(owner)[name]
        _give_back(owner, name)
        if patch.everywhere:
            swept[id(ours)] = original, ()
    for holder, name, value in _holders(swept):
        if name in _kept(holder):
            _give_back(holder, name)
        elif isinstance(holder, ModuleType) and _is_megatron(holder.__name__):
            setattr(holder, name, value)


def is_installed(patch: Patch) -> bool:
    """True if ours is in its place now."""
    return _in_place(patch) is not None


def place(patch: Patch, imports: bool = True) -> tuple[Any, str] | None:
    """The owner and the name in it that is replaced, or could be; None if there is none.

    imports: whether modules of megatron-core and torch are imported for it.
    """
    owner: Any = _module(patch.module, imports)
    *classes, last = patch.name.split(".")
    for name in classes:
        found = original(owner, name)
        owner = found if isinstance(found, type) else None
    if owner is None:
        return None
    for name in last.split(" or "):
        if hasattr(owner, name) or patch.default is not NOTHING:
            return owner, name
    return None


def original(module: Any, name: str) -> Any:
    """The value of a module's name, or its value before it was replaced; None if there is none."""
    kept = _kept(module)
    if name in kept:
        return kept[name][0]
    return getattr(module, name, None)


def _in_place(patch: Patch) -> tuple[Any, str] | None:
    """The owner and the name under which the replacement is in place."""
    found = place(patch, imports=False)
    if found is None:
        return None
    owner, name = found
    return found if name in _kept(owner) else None


def _problem(patch: Patch) -> str | None:
    """The problem with a row; None if there is none."""
    found = place(patch)
    if found is None:
        required = _looked_up(patch.required)
        if not (required() if callable(required) else required):
            return None
        if patch.why:
            return f", by which it {patch.why}"
        return " (there is none)" if patch.parameters else ""
    if not patch.parameters or found[1] in _kept(found[0]):
        return None
    given = ", ".join(inspect.signature(getattr(*found)).parameters)
    if any(_fits(given, form) for form in patch.parameters):
        return None
    known = " or ".join(f"({form})" for form in patch.parameters)
    return f" (its parameters are ({given}), expected {known})"


def _fits(given: str, form: str) -> bool:
    if not form.endswith(MORE):
        return given == form
    return given == form or f"{given}, ".startswith(form.removesuffix(MORE))


def _looked_up(ours: Any) -> Any:
    """The object that "module:name" of this package names; any other value unchanged."""
    if not isinstance(ours, str):
        return ours
    module, name = ours.split(":")
    return operator.attrgetter(name)(importlib.import_module(f"{_PACKAGE}.{module}"))


def _module(name: str, imports: bool) -> ModuleType | None:
    if imports and _is_imported(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Another package that is missing is the user's trouble, and theirs to see.
            if error.name is None or not _is_megatron(error.name):
                raise
            return None
    return sys.modules.get(name)


def _is_imported(name: str) -> bool:
    return f"{name}.".startswith(("megatron.core.", "torch."))


def _is_megatron(name: str) -> bool:
    return f"{name}.".startswith("megatron.")


def _kept(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Name -> the original value in `owner` itself, and its replacement there."""
    kept = {} if owner is None else vars(owner).get(_KEPT, {})
    return {name: pair for name, pair in kept.items() if _own(owner, name) is pair[1]}


def _own(owner: Any, name: str) -> Any:
    """The value of a name in `owner` itself, without its bases; `NOTHING` if it has none."""
    if name == _DEFAULTS:
        return owner.__defaults__
    return vars(owner).get(name, NOTHING)


def _put(owner: Any, name: str, ours: Any) -> None:
    kept = _kept(owner)
    had = kept[name][0] if name in kept else _own(owner, name)
    setattr(owner, _KEPT, {**kept, name: (had, ours)})
    setattr(owner, name, ours)


def _give_back(owner: Any, name: str) -> None:
    kept = _kept(owner)
    _set(owner, name, kept.pop(name)[0])
    _set(owner, _KEPT, kept or NOTHING)


def _set(owner: Any, name: str, value: Any) -> None:
    if value is NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _holders(replaced: Mapping[int, Any]) -> Iterator[tuple[ModuleType | FunctionType, str, Any]]:
    """The loaded modules, but those of this package, that hold one of the objects, and functions in
    them that have one in a default (verl's `unwrap_model` has the wrapper's class there): with the
    name and what takes its place there. replaced: by an object's id what does, and the modules
    where it stays."""
    loaded = [
        (name, module)
        for name, module in list(sys.modules.items())
        if replaced and name.partition(".")[0] != _PACKAGE and isinstance(module, ModuleType)
    ]
    for at, module in loaded:
        for attribute, value in list(vars(module).items()):
            holder: ModuleType | FunctionType = module
            if type(value) is FunctionType and value.__defaults__ and id(value) not in replaced:
                holder = value
                attribute = _DEFAULTS
                value = value.__defaults__
            if id(value) in replaced or type(value) is tuple:
                new = _replaced(value, replaced, at)
                if new is not value:
                    yield holder, attribute, new


def _replaced(value: Any, replaced: Mapping[int, Any], module: str) -> Any:
    """The replacement for `value`; a tuple with such an entry rebuilt; else `value` itself."""
    if type(value) is tuple:
        entries = tuple(_replaced(entry, replaced, module) for entry in value)
        return value if all(map(operator.is_, entries, value)) else entries
    new, but_in = replaced.get(id(value), (value, ()))
    return value if module in but_in else new
