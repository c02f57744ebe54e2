"""Runs an unmodified training script with this package's wrapper instead of Megatron's.

    torchrun ... -m megatron_fsdp_adapter path/to/pretrain_gpt.py --use-megatron-fsdp ...

This behaves like `python path/to/pretrain_gpt.py ...`, except that `--use-megatron-fsdp` installs
the wrapper.

Only the standard library is imported before the script's folder is on the path: modules in the
current folder must not shadow packages.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse

_PACKAGE = __name__.partition(".")[0]


class MissingPackage(ValueError):
    """Raised if a package is not installed that Megatron-LM imports."""


def run(argv: Sequence[str]) -> int:
    """Runs the script `argv[0]` with the arguments after it; returns 0, or 2 if there is no such
    file. Exceptions of the script, including SystemExit, propagate, except `RefusedByAllRanks`."""
    script = Path(argv[0])
    if not script.is_file():
        print(f"megatron_fsdp_adapter: no such script: {argv[0]}", file=sys.stderr)
        return 2
    folder = script.resolve().parent
    _put_on_path(folder)
    sys.argv = list(argv)
    file = str(script.absolute())
    # Before `prepare` imports anything, because imported modules may read `__main__`.
    main = _become_main(file)
    prepare(folder, argv[1:])
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    from ..core.problems import RefusedByAllRanks
    from ..core.runtime.launcher import refuse

    try:
        exec(code, vars(main))
    except RefusedByAllRanks as error:
        refuse(f"megatron_fsdp_adapter: {error}")
    return 0


def _put_on_path(folder: Path) -> None:
    """Makes `sys.path` that of `python script.py`: it begins with the script's folder, without the
    current folder that `python -m` adds. With -P the path is not changed.

    Call it before any import of megatron: `megatron` has no __init__, so a checkout's and an
    installed megatron.core would mix.
    """
    if getattr(sys.flags, "safe_path", sys.flags.isolated):
        return
    started = getattr(sys.modules["__main__"], "__spec__", None)
    if started is not None and started.name == f"{_PACKAGE}.__main__":
        current = os.getcwd()
        if sys.path[:1] == [current]:
            del sys.path[0]
            # A spawned worker gets this path and may have to import the package. If only the
            # current folder has the package, that goes to the end.
            if not any(finder.find_spec(_PACKAGE, None) for finder in sys.meta_path):
                sys.path.append(current)
    sys.path.insert(0, str(folder))


def _become_main(script: str) -> ModuleType:
    """Replaces this package's `__main__` by a module for a script, and returns it. The module stays
    in `sys.modules` after the script's last line, like Python's own: threads, atexit functions and
    pickle look up names in it."""
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    vars(module).update(__file__=script, __loader__=loader, __cached__=None, __builtins__=builtins)
    sys.modules["__main__"] = module
    # Workers of multiprocessing use this name for the script's classes.
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = module
    return module


def prepare(folder: Path, argv: Sequence[str]) -> None:
    """Hooks Megatron-LM's arguments, if Megatron-LM is available: then parsing them installs, if
    the flag is set. Installs at once for a script on megatron-core or Megatron-Bridge, which does
    not parse them.

    From 0.19 on megatron-core's wheel contains Megatron-LM's modules, so any script can import
    them. Therefore a script without these modules in its folder and without the flag is taken for
    one of the second kind. If it does parse Megatron-LM's arguments, without the flag, the
    installation is undone.
    """
    from ..core.runtime.launcher import refuse
    from . import megatron_lm

    asks = megatron_lm.was_given(megatron_lm.FSDP_FLAG, argv)
    # Before CUDA is initialized, so before arguments are parsed.
    changes = megatron_lm.complete_environment(os.environ) if asks else []
    is_megatron_lm = asks or (folder / "megatron" / "training").is_dir()
    try:
        arguments = _megatron_arguments()
    except MissingPackage as error:
        if is_megatron_lm:
            refuse(f"megatron_fsdp_adapter: {error}")
        # A script on megatron-core does not need what Megatron-LM's modules in its wheel import.
        arguments = None
    from .installation import install, uninstall

    _refuse_mixture(folder)
    at_once = arguments is None or not is_megatron_lm
    if arguments is not None:
        on_other = uninstall if at_once else lambda: None
        megatron_lm.hook_arguments(argv, changes, install, on_other)
    if at_once:
        install()


def parse_arguments(script: Path, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments `argv`, parsed with the Megatron-LM that `script` uses plus the missing flags,
    and not completed. Puts the script's folder on the path.

    Raises:
        ValueError: there is no such script, or it is no Python file; no Megatron-LM beside it or on
            the path; an argument is wrong, or a package is missing that Megatron-LM imports.
    """
    if not script.is_file():
        raise ValueError(f"no such script: {script}")
    if script.suffix != ".py":
        raise ValueError(f"{script}: no Python script (.py). Name the training script")
    _put_on_path(script.resolve().parent)
    import argparse

    from . import megatron_lm

    module = _megatron_arguments()
    if module is None:
        raise ValueError(
            f"{script}: megatron.training, which parses its arguments, is not importable. "
            "Name a script of Megatron-LM, or put Megatron-LM on PYTHONPATH"
        )
    parser = argparse.ArgumentParser(prog=script.name, allow_abbrev=False)
    parser.error = _raise  # type: ignore[method-assign]
    parser = megatron_lm.add_missing_flags(module.add_megatron_arguments(parser))
    return parser.parse_args(list(argv))


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _megatron_arguments() -> ModuleType | None:
    """Megatron-LM's module of arguments; None if there is no Megatron-LM. Raises MissingPackage."""
    try:
        return importlib.import_module("megatron.training.arguments")
    except ModuleNotFoundError as error:
        if error.name in ("megatron", "megatron.training"):
            return None
        package = (error.name or "").partition(".")[0]
        if package in ("", "megatron"):
            raise  # no package to install: a part of Megatron is missing
        raise MissingPackage(
            f"{package} is not installed, but Megatron-LM imports it. Run pip install {package}"
        ) from error


def _refuse_mixture(folder: Path) -> None:
    """Raises RuntimeError if the script's folder has a megatron-core, but another one was
    imported."""
    import megatron.core

    imported = Path(next(iter(megatron.core.__path__))).resolve()
    beside = folder / "megatron" / "core"
    if beside.is_dir() and imported != beside.resolve():
        raise RuntimeError(
            f"{folder} has a megatron-core, but {imported} was imported. Remove the other one "
            "from PYTHONPATH, or run the script in a separate process"
        )
