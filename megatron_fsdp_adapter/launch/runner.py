"""Runs a training script, unmodified, with this package's wrapper in the place of Megatron's.

    torchrun ... -m megatron_fsdp_adapter path/to/pretrain_gpt.py --use-megatron-fsdp ...

What `python path/to/pretrain_gpt.py ...` would do, except that the wrapper is installed when the
arguments ask for FSDP. Without `--use-megatron-fsdp` the script runs as if started by itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from . import megatron_lm


def run(argv: Sequence[str]) -> int:
    """Runs the script `argv[0]` with the arguments after it; returns 0, or 2 if there is no such
    file. What the script raises, or exits with, goes through."""
    script = Path(argv[0]).resolve()
    if not script.is_file():
        print(f"megatron_fsdp_adapter: no such script: {argv[0]}", file=sys.stderr)
        return 2
    # First on the path, as Python does for a script, and before anything of megatron is imported:
    # `megatron` has no __init__, so a checkout's and an installed megatron.core would mix.
    sys.path.insert(0, str(script.parent))
    sys.argv = [argv[0], *argv[1:]]
    prepare(script.parent, argv[1:])
    runpy.run_path(str(script), run_name="__main__")
    return 0


def prepare(folder: Path, argv: Sequence[str]) -> None:
    """Hooks Megatron-LM's arguments, where there is a Megatron-LM. Installs at once for a script on
    megatron-core or Megatron-Bridge, which parses nothing.

    From 0.19 on Megatron-LM's modules are in megatron-core's wheel, so that they can be imported
    beside any script. One that has them not in its own folder, and no flag, is taken for one that
    parses nothing, until it parses Megatron-LM's arguments: then the installation is undone."""
    asks = megatron_lm.was_given(megatron_lm.FSDP_FLAG, argv)
    # Before CUDA starts, so before arguments are parsed.
    changes = megatron_lm.complete_environment(os.environ) if asks else []
    arguments = _megatron_arguments()
    from .installation import install, rebind_everywhere, uninstall

    _refuse_mixture(folder)
    at_once = arguments is None or not (asks or (folder / "megatron" / "training").is_dir())
    if arguments is not None:
        on_other = uninstall if at_once else lambda: None
        megatron_lm.hook_arguments(arguments, argv, changes, install, on_other, rebind_everywhere)
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
    sys.path.insert(0, str(script.resolve().parent))
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
