"""Replaces names of other packages, and takes the replacements back: one mechanism for methods,
functions, classes and modules.

A replacement is a row (`Patch`), and the rows for one purpose are a table (`table.py`). `install`
records what it replaced in an attribute of the owner, a module or a class. No state is kept in this
module, and what another package puts over a replacement is left alone. Modules of megatron-core and
torch are imported. Others are used only if they are loaded, so `install` is called again when more
of them may be.

Frameworks on top of Megatron import classes and functions under names of their own, and a fixed
list of these would miss some. So with `everywhere` a name is rebound in every loaded module that
holds the same object, also inside of a tuple or as a function's default. `uninstall` gives each of
these places back what it had. A module of megatron that was loaded in between also gets the
original. Other modules of that kind stay as they are: they may have imported our object by its own
name.
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
"""At the end of a list of parameters: any others may follow."""

NOTHING = object()
"""Stands for the value of an attribute that does not exist."""

Original = Callable[..., Any]
"""A function or method of another package that one of ours replaces, and may call."""

_PACKAGE = __name__.partition(".")[0]
_DEFAULTS = "__defaults__"
_KEPT = f"__{_PACKAGE}_kept__"
"""Attribute of an owner. By name: what the owner had itself (`NOTHING` if that was inherited), and
what was put there."""


class ModuleView:
    """Stands for a module (torch, torch.cuda), with other values for the names in `answers`.

    Any other name is read from `target` at every access, so that a view never holds a stale value.
    A view replaces the global of one module: that module calls something else, and nothing else in
    the process changes.
    """

    def __init__(self, target: Any, answers: Mapping[str, Any]) -> None:
        self.__dict__.update(answers)
        self.__dict__["target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["target"], name)

    def __repr__(self) -> str:
        return f"ModuleView({self.__dict__['target']!r})"


# Values of `Patch.how`: what is put in place, from the row's `ours`, the owner and the original.


def calls(ours: Callable[..., Any], owner: Any, original: Any) -> Any:
    """A function that calls `ours` with the original and then the call's own arguments."""

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
    """A name of another package, and what replaces it.

    Attributes:
        module: the module that defines the name.
        name: "function" or "Class.method". "one or another" where releases name it differently: the
            first that exists is replaced.
        ours: the object from which `how` makes the replacement. "module:name" of this package is
            looked up when it is needed.
        how: `calls`, `stands` or `makes`.
        parameters: the original's parameters, one list for each form that releases have. Nothing is
            compared if it is empty.
        required: True if the name's absence is an error; or a function without arguments that
            returns that, or its "module:name".
        default: taken as the original if the name does not exist.
        everywhere: True if the object is also replaced in every loaded module that holds it, except
            the modules `but_in`.
        why: the end of an error about its absence: "module.name, by which it ...".
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
    """Problems with the rows: dotted paths of required names that are absent, and of names whose
    parameters differ from the row's, with what was found. Rows of modules that are neither imported
    by us nor loaded have none."""
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
    """Puts every row in place. A later call changes nothing that is in place; it reaches what was
    loaded, or bound to an original, in between.

    Raises RuntimeError, before anything is changed, if something is `missing`. message: makes the
    error's text of that."""
    lacking = missing(patches)
    if lacking:
        raise RuntimeError(message(", no ".join(lacking)))
    swept: dict[int, tuple[Any, tuple[str, ...]]] = {}  # see `_holders`
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
    swept: dict[int, tuple[Any, tuple[str, ...]]] = {}  # see `_holders`
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
    """True if the row's replacement is in place now."""
    return _in_place(patch) is not None


def place(patch: Patch, imports: bool = True) -> tuple[Any, str] | None:
    """The owner and the name in it that the row replaces; None if the owner or the name is missing.

    imports: whether modules of megatron-core and torch are imported for it.
    """
    owner: Any = _module(patch.module, imports)
    *classes, last = patch.name.split(".")
    for name in classes:
        found = original_of(owner, name)  # the class may be replaced already
        owner = found if isinstance(found, type) else None
    if owner is None:
        return None
    for name in last.split(" or "):
        if hasattr(owner, name) or patch.default is not NOTHING:
            return owner, name
    return None


def original_of(module: Any, name: str) -> Any:
    """The value of a module's name, or its value before it was replaced; None if there is none."""
    kept = _kept(module)
    if name in kept:
        return kept[name][0]
    return getattr(module, name, None)


def _in_place(patch: Patch) -> tuple[Any, str] | None:
    """The owner and the name, if the row's replacement is in place there; else None."""
    found = place(patch, imports=False)
    if found is None:
        return None
    owner, name = found
    return found if name in _kept(owner) else None


def _problem(patch: Patch) -> str | None:
    """The problem with a row, as text behind its path; None if there is none."""
    found = place(patch)
    if found is None:
        required = _looked_up(patch.required)
        if not (required() if callable(required) else required):
            return None
        if patch.why:
            return f", by which it {patch.why}"
        return " (there is none)" if patch.parameters else ""
    owner, name = found
    if not patch.parameters or name in _kept(owner):  # compared before it was replaced
        return None
    given = ", ".join(inspect.signature(getattr(owner, name)).parameters)
    if any(_fits(given, form) for form in patch.parameters):
        return None
    known = " or ".join(f"({form})" for form in patch.parameters)
    return f" (its parameters are ({given}), expected {known})"


def _fits(given: str, form: str) -> bool:
    """True if the parameters `given` are those of a row's `form`, which may end with `MORE`."""
    if not form.endswith(MORE):
        return given == form
    return given == form or f"{given}, ".startswith(form.removesuffix(MORE))


def _looked_up(value: Any) -> Any:
    """The object that "module:name" of this package names; any other value unchanged."""
    if not isinstance(value, str):
        return value
    module, name = value.split(":")
    return operator.attrgetter(name)(importlib.import_module(f"{_PACKAGE}.{module}"))


def _module(name: str, imports: bool) -> ModuleType | None:
    if imports and _is_imported(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A megatron-core without this module is allowed. An error about another package's
            # absence is the user's to see.
            if error.name is None or not _is_megatron(error.name):
                raise
            return None
    return sys.modules.get(name)


def _is_imported(name: str) -> bool:
    return f"{name}.".startswith(("megatron.core.", "torch."))


def _is_megatron(name: str) -> bool:
    return f"{name}.".startswith("megatron.")


def _kept(owner: Any) -> dict[str, tuple[Any, Any]]:
    """Names that are replaced in `owner`, each with the original value and the replacement. A name
    is left out if the replacement is no longer there: another package may have put something over
    it."""
    kept = {} if owner is None else vars(owner).get(_KEPT, {})
    return {name: pair for name, pair in kept.items() if _own(owner, name) is pair[1]}


def _own(owner: Any, name: str) -> Any:
    """The value of a name in `owner` itself, without its bases; `NOTHING` if it has none."""
    if name == _DEFAULTS:
        return owner.__defaults__
    return vars(owner).get(name, NOTHING)


def _put(owner: Any, name: str, ours: Any) -> None:
    """Sets the name to `ours`, and records the value that it replaces, unless one is recorded."""
    kept = _kept(owner)
    had = kept[name][0] if name in kept else _own(owner, name)
    setattr(owner, _KEPT, {**kept, name: (had, ours)})
    setattr(owner, name, ours)


def _give_back(owner: Any, name: str) -> None:
    """Sets the name to its recorded value, and removes the record."""
    kept = _kept(owner)
    _set(owner, name, kept.pop(name)[0])
    _set(owner, _KEPT, kept or NOTHING)


def _set(owner: Any, name: str, value: Any) -> None:
    if value is NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _holders(replaced: Mapping[int, Any]) -> Iterator[tuple[ModuleType | FunctionType, str, Any]]:
    """Places that hold one of the objects: a holder, a name in it, and the value to put there.

    Holders are loaded modules, except those of this package, and functions in them that have an
    object as a default (verl's `unwrap_model` has the wrapper's class there). replaced: by an
    object's id the replacement, and names of modules in which the object stays."""
    loaded = [
        (name, module)
        for name, module in list(sys.modules.items())
        if replaced and name.partition(".")[0] != _PACKAGE and isinstance(module, ModuleType)
    ]
    for module_name, module in loaded:
        for attribute, value in list(vars(module).items()):
            holder: ModuleType | FunctionType = module
            if type(value) is FunctionType and value.__defaults__ and id(value) not in replaced:
                holder = value
                attribute = _DEFAULTS
                value = value.__defaults__
            if id(value) in replaced or type(value) is tuple:
                new = _replaced(value, replaced, module_name)
                if new is not value:
                    yield holder, attribute, new


def _replaced(value: Any, replaced: Mapping[int, Any], module: str) -> Any:
    """The replacement for `value` in a module; for a tuple that contains such a value, a new tuple;
    else `value` itself."""
    if type(value) is tuple:
        entries = tuple(_replaced(entry, replaced, module) for entry in value)
        return value if all(map(operator.is_, entries, value)) else entries
    new, but_in = replaced.get(id(value), (value, ()))
    return value if module in but_in else new
