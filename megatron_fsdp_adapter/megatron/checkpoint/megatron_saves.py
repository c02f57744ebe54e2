"""Megatron's own saves, made safe without a change to its code.

Megatron-LM and Megatron-Bridge write an fsdp_dtensor checkpoint into its final folder, and then the
tracker, which they truncate first. A process that is killed meanwhile leaves half a folder under a
name of its own, or an empty tracker. Their module lets us choose two things: it takes torch DCP's
storage writer from `torch.distributed.checkpoint`, and opens the tracker by a global name. So these
globals, as that one module sees them, are replaced: the writer by `SafeWriter`, torch DCP's `save`
by one that removes what a failed save wrote, opening a tracker for writing by a file that takes the
tracker's place when it is closed. Nothing else in the process sees another torch. Asynchronous
saves take their writer from a table, and get another table (`background_saves.py`).

The module must be imported already. It has no name of its own to rebind before: hence a second
call, when a wrapper is constructed.
"""

from __future__ import annotations

import builtins
import io
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from megatron_fsdp_adapter.checkpoint import folders, record
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.checkpoint.unpickling import Reader
from megatron_fsdp_adapter.megatron.checkpoint.background_saves import (
    AsyncStrategy,
    Save,
    Target,
)
from megatron_fsdp_adapter.megatron.seams import releases
from megatron_fsdp_adapter.megatron.seams.module_view import ModuleView

_ORIGINALS = "__megatron_fsdp_adapter_saves__"


class ReplacingFile(io.StringIO):
    """A text file that takes the place of `path` when it is closed, all at once.

    Leaving a `with` block by an error leaves the file at `path` as it was.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._failed = path, False

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._failed = kind is not None
        super().__exit__(kind, *rest)

    def close(self) -> None:
        if not self.closed and not self._failed:
            folders.write_atomically(self._path, self.getvalue())
        super().close()


def opening(original: Callable[..., Any]) -> Callable[..., Any]:
    """`open`, but a tracker that is opened for writing is replaced as a whole."""

    def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "w" and _is_local(path) and Path(path).name == folders.TRACKER:
            return ReplacingFile(Path(path))
        return original(path, mode, *args, **kwargs)

    return open_file


def copying(original: Callable[..., Any]) -> Callable[..., Any]:
    """`shutil.copy`, but a file that is there already is replaced as a whole."""

    def copy(source: Any, target: Any, **kwargs: Any) -> Any:
        if not _is_local(target) or Path(target).is_dir():
            return original(source, target, **kwargs)
        with folders.replacing(Path(target)) as beside:
            original(source, beside, **kwargs)
            folders.sync_files([beside])
        return target

    return copy


def _is_local(path: Any) -> bool:
    """Megatron's storage client takes addresses (msc://...), for which there is no rename."""
    return "://" not in str(path)


def _torch_view(module: ModuleType, torch: Any) -> ModuleView:
    def writer(path: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _is_local(path):
            return FileSystemWriter(path, *args, **kwargs)
        folder = Path(path)
        return SafeWriter(
            folder,
            _topology(module),
            folders.iteration_of(folder),
            folders.publish_without_tracker,
        )

    def reader(path: Any, *args: Any, **kwargs: Any) -> FileSystemReader:
        if _is_local(path):
            folders.require_ours(Path(path).parent, Path(path))
            return Reader(path, *args, **kwargs)
        return FileSystemReader(path, *args, **kwargs)

    def save(*args: Any, **kwargs: Any) -> Any:
        try:
            return torch.distributed.checkpoint.save(*args, **kwargs)
        except BaseException:
            used = kwargs.get("storage_writer")
            if isinstance(used, SafeWriter):
                used.discard()
            raise

    answers = {"FileSystemWriter": writer, "FileSystemReader": reader, "save": save}
    checkpoint = ModuleView(torch.distributed.checkpoint, answers)
    distributed = ModuleView(torch.distributed, {"checkpoint": checkpoint})
    return ModuleView(torch, {"distributed": distributed})


def _topology(module: ModuleType) -> dict[str, Any]:
    """From Megatron-LM's arguments; empty in Megatron-Bridge, whose module has none at hand."""
    arguments = getattr(module, "get_args", None)
    return record.topology_of(arguments()) if callable(arguments) else {}


@dataclass(frozen=True)
class Replaced:
    """A global of a module: made from the module and what it holds, or `builtin` if it holds
    nothing under that name."""

    name: str
    make: Callable[[ModuleType, Any], Any]
    builtin: Any = None

    def is_in(self, module: ModuleType) -> bool:
        """Whether the module has it."""
        return self.name in vars(module) or self.builtin is not None


@dataclass(frozen=True)
class Seam:
    """Where a module saves by what it takes from elsewhere.

    purpose: what it takes it for; globals: under which names, those of all releases. A release has
    some of them; a module that has none saves in a way that is not known here. needed: whether that
    matters now.
    """

    purpose: str
    globals: tuple[Replaced, ...]
    needed: Callable[[], bool] = lambda: True

    def held_by(self, module: ModuleType) -> list[Replaced]:
        """The globals that the module has."""
        return [one for one in self.globals if one.is_in(module)]


def _saves_asynchronously() -> bool:
    """Whether Megatron-LM has parsed --async-save."""
    holder = sys.modules.get("megatron.training.global_vars")
    return bool(getattr(getattr(holder, "_GLOBAL_ARGS", None), "async_save", False))


def _strategy(module: ModuleType, held: Any) -> AsyncStrategy:
    return AsyncStrategy(held, lambda: _topology(module))


def _bridge_saves_asynchronously() -> bool:
    """Whether Megatron-Bridge can, which it says by the package that it uses for it."""
    return bool(getattr(sys.modules.get(BRIDGE), "HAVE_NVRX", False))


def _plan(module: ModuleType, held: Any) -> Callable[..., Any]:
    return _strategy(module, held).plan


def _opens(module: ModuleType, held: Any) -> Any:
    return opening(held)


def _client_opens(module: ModuleType, held: Any) -> Any:
    """`held.open` is read at each call: it is another one once --enable-msc has been read."""
    return ModuleView(
        held, {"open": opening(lambda *args, **kwargs: held.open(*args, **kwargs))}
    )


_WRITER = Seam("writes checkpoints", (Replaced("torch", _torch_view),))
_ASYNC = Seam(
    "saves asynchronously", (Replaced("get_async_strategy", _strategy),), _saves_asynchronously
)
BRIDGE = "megatron.bridge.training.checkpointing"
_BRIDGE_ASYNC = tuple(
    Seam(f"{purpose} asynchronous saves", (one,), _bridge_saves_asynchronously)
    for purpose, one in (
        ("writes", Replaced("FileSystemWriterAsync", lambda module, held: Target)),
        ("plans", Replaced("save_state_dict_async_plan", _plan)),
        ("finishes", Replaced("save_state_dict_async_finalize", lambda module, held: Save.finish)),
    )
)
"""From 0.6 on it takes these by name, and only the queue from a table."""

PLACES: dict[str, tuple[Seam, ...]] = {
    "megatron.training.checkpointing": (
        _WRITER,
        Seam(
            "opens the tracker",
            (
                Replaced("open_file", _opens),
                Replaced("maybe_msc", _client_opens),
            ),
        ),
        _ASYNC,
    ),
    "megatron.training.async_utils": (_ASYNC,),
    "megatron.bridge.training.state": (
        Seam(
            "queues asynchronous saves",
            (Replaced("get_async_strategy", _strategy),),
            _bridge_saves_asynchronously,
        ),
    ),
    BRIDGE: (
        _WRITER,
        *_BRIDGE_ASYNC,
        Seam("opens the tracker", (Replaced("open", _opens, builtins.open),)),
        Seam(
            "replaces its train state",
            (
                Replaced(
                    "shutil",
                    lambda module, held: ModuleView(held, {"copy": copying(held.copy)}),
                    shutil,
                ),
            ),
        ),
    ),
}
"""Modules that save, and what of theirs is replaced."""


def missing() -> list[str]:
    """The seams of imported modules that are not as any known release has them."""
    return [
        f"{name}.{' or '.join(one.name for one in seam.globals)}, by which it {seam.purpose}"
        for name, module in _loaded()
        for seam in PLACES[name]
        if seam.needed() and not seam.held_by(module)
    ]


def install() -> None:
    """Makes the modules of `PLACES` that are imported save safely. Idempotent. Raises RuntimeError,
    before anything is changed, with every seam that is not found: saves would go on, and a killed
    one could leave nothing to load."""
    absent = missing()
    if absent:
        raise RuntimeError(f"there is no {', no '.join(absent)}; {releases.remedy()}")
    for name, module in _loaded():
        if _ORIGINALS in vars(module):
            continue
        replaced = [one for seam in PLACES[name] for one in seam.held_by(module)]
        before = {one.name: vars(module)[one.name] for one in replaced if one.name in vars(module)}
        setattr(module, _ORIGINALS, before)
        for one in replaced:
            setattr(module, one.name, one.make(module, before.get(one.name, one.builtin)))


def uninstall() -> None:
    """Gives the modules back what they had. Harmless when not installed."""
    for name, module in _loaded():
        if _ORIGINALS not in vars(module):
            continue
        before = vars(module).pop(_ORIGINALS)
        for one in (one for seam in PLACES[name] for one in seam.globals):
            if one.name in before:
                setattr(module, one.name, before[one.name])
            elif one.builtin is not None and one.name in vars(module):
                delattr(module, one.name)


def installed() -> list[str]:
    """Names of the modules that save safely now."""
    return [name for name, module in _loaded() if _ORIGINALS in vars(module)]


def _loaded() -> list[tuple[str, ModuleType]]:
    """The modules of `PLACES` that are imported."""
    found = ((name, sys.modules.get(name)) for name in PLACES)
    return [(name, module) for name, module in found if isinstance(module, ModuleType)]
