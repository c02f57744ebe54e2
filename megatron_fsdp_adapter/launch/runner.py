"""Runs a training script, unmodified, with this package's wrapper in the place of Megatron's.

    torchrun ... -m megatron_fsdp_adapter path/to/pretrain_gpt.py --use-megatron-fsdp ...

What `python path/to/pretrain_gpt.py ...` would do, except that the wrapper is installed when the
arguments ask for FSDP. Without `--use-megatron-fsdp` the script runs as if started by itself.

Nothing but the standard library is imported before the script's folder is on the path: what lies
in the current folder must not take the place of a package.
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


def run(argv: Sequence[str]) -> int:
    """Runs the script `argv[0]` with the arguments after it; returns 0, or 2 if there is no such
    file. What the script raises, or exits with, goes through."""
    script = Path(argv[0])
    if not script.is_file():
        print(f"megatron_fsdp_adapter: no such script: {argv[0]}", file=sys.stderr)
        return 2
    folder = script.resolve().parent
    _put_on_path(folder)
    sys.argv = [argv[0], *argv[1:]]
    file = str(script.absolute())
    # First, since what is imported may ask for it.
    main = _become_main(file)
    prepare(folder, argv[1:])
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, vars(main))
    return 0


def _put_on_path(folder: Path) -> None:
    """Makes the path that of `python script.py`: the script's folder first, and no current folder,
    which `python -m` puts there. Where Python is told to put nothing there (-P), nothing is.

    Before anything of megatron is imported: `megatron` has no __init__, so a checkout's and an
    installed megatron.core would mix.
    """
    if getattr(sys.flags, "safe_path", sys.flags.isolated):
        return
    started = getattr(sys.modules["__main__"], "__spec__", None)
    if started is not None and started.name == f"{_PACKAGE}.__main__":
        current = os.getcwd()
        if sys.path[:1] == [current]:
            del sys.path[0]
            # A worker that is spawned gets this path, and may have to import the package.
            if not any(finder.find_spec(_PACKAGE, None) for finder in sys.meta_path):
                sys.path.append(current)
    sys.path.insert(0, str(folder))


def _become_main(script: str) -> ModuleType:
    """A module `__main__` for a script, in the place of this package's. It stays, as Python's own
    does: threads and functions of atexit look for the script's names after its last line, and
    pickle does for its classes."""
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    vars(module).update(
        __file__=script, __loader__=loader, __cached__=None, __builtins__=builtins
    )
    sys.modules["__main__"] = module
    # Under this name workers of multiprocessing speak of the script's classes.
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = module
    return module


def prepare(folder: Path, argv: Sequence[str]) -> None:
    """Hooks Megatron-LM's arguments, where there is a Megatron-LM. Installs at once for a script on
    megatron-core or Megatron-Bridge, which parses nothing.

    From 0.19 on Megatron-LM's modules are in megatron-core's wheel, so that they can be imported
    beside any script. One that has them not in its own folder, and no flag, is taken for one that
    parses nothing, until it parses Megatron-LM's arguments: then the installation is undone."""
    from . import megatron_lm

    asks = megatron_lm.was_given(megatron_lm.FSDP_FLAG, argv)
    # Before CUDA starts, so before arguments are parsed.
    changes = megatron_lm.complete_environment(os.environ) if asks else []
    arguments = _megatron_arguments()
    from .installation import install, uninstall

    _refuse_mixture(folder)
    at_once = arguments is None or not (asks or (folder / "megatron" / "training").is_dir())
    if arguments is not None:
        on_other = uninstall if at_once else lambda: None
        megatron_lm.hook_arguments(argv, changes, install, on_other)
    if at_once:
        install()


def parse_arguments(script: Path, argv: Sequence[str]) -> argparse.Namespace:
    """What the Megatron-LM that `script` uses makes of a command line, with main's flags added and
    before anything is completed. Puts the script's folder on the path.

    ValueError if there is no such script, no Megatron-LM beside it or on the path, or an argument
    that is none of Megatron-LM's.
    """
    if not script.is_file():
        raise ValueError(f"no such script: {script}")
    _put_on_path(script.resolve().parent)
    import argparse

    from . import megatron_lm

    module = _megatron_arguments()
    if module is None:
        raise ValueError(f"{script}: there is no megatron.training to read its arguments with")
    parser = argparse.ArgumentParser(prog=script.name, allow_abbrev=False)
    parser.error = _raise  # type: ignore[method-assign]
    parser = megatron_lm.add_missing_flags(module.add_megatron_arguments(parser))
    return parser.parse_args(list(argv))


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _megatron_arguments() -> ModuleType | None:
    try:
        return importlib.import_module("megatron.training.arguments")
    except ModuleNotFoundError as error:
        # Another package that is missing is the user's trouble, and theirs to see.
        if error.name not in ("megatron", "megatron.training"):
            raise
        return None


def _refuse_mixture(folder: Path) -> None:
    """RuntimeError if the script's folder has a megatron-core, and another one was imported."""
    import megatron.core

    imported = Path(next(iter(megatron.core.__path__))).resolve()
    beside = folder / "megatron" / "core"
    if beside.is_dir() and imported != beside.resolve():
        raise RuntimeError(
            f"{folder} has a megatron-core of its own, but {imported} was imported: take the "
            "other one off PYTHONPATH, or run the script in a process of its own"
        )
