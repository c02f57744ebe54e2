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

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from megatron_fsdp_adapter.checkpoint import folders, record
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.checkpoint.unpickling import Reader
from megatron_fsdp_adapter.megatron.checkpoint.background_saves import (
    AsyncStrategy,
)
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView, Original
from megatron_fsdp_adapter.megatron.compat.table import BRIDGE


class ReplacingFile(io.StringIO):
    """A text file that takes the place of `path` when it is closed, all at once.

    Leaving a `with` block by an error leaves the file at `path` as it was.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._failed = False  # a `with` block was left by an error

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._failed = kind is not None
        super().__exit__(kind, *rest)

    def close(self) -> None:
        if not self.closed and not self._failed:
            folders.write_atomically(self._path, self.getvalue())
        super().close()


def opening(original: Original) -> Callable[..., Any]:
    """`open`, but a tracker that is opened for writing is replaced as a whole."""

    def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "w" and _is_local(path) and Path(path).name == folders.TRACKER:
            return ReplacingFile(Path(path))
        return original(path, mode, *args, **kwargs)

    return open_file


def copying(original: Original) -> Callable[..., Any]:
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


def torch_view(module: ModuleType, torch: Any) -> ModuleView:
    """torch as the module sees it."""

    def writer(path: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _is_local(path):
            return FileSystemWriter(path, *args, **kwargs)
        return SafeWriter(Path(path), _topology(module))

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
    """The topology in Megatron-LM's arguments; empty in Megatron-Bridge, whose module has none at
    hand."""
    arguments = getattr(module, "get_args", None)
    return record.topology_of(arguments()) if callable(arguments) else {}


def opens(module: ModuleType, held: Any) -> Any:
    """A replacement for a function, or for a client: its `open` is read at each call, for it is
    another one once --enable-msc has been read."""
    if not hasattr(held, "open"):
        return opening(held)
    return ModuleView(held, {"open": opening(lambda *args, **kwargs: held.open(*args, **kwargs))})


def shutil_view(module: ModuleType, held: Any) -> ModuleView:
    return ModuleView(held, {"copy": copying(held.copy)})


def strategy(module: ModuleType, held: Any) -> AsyncStrategy:
    return AsyncStrategy(held, lambda: _topology(module))


def plan(module: ModuleType, held: Any) -> Callable[..., Any]:
    return strategy(module, held).plan


def saves_asynchronously() -> bool:
    """True if Megatron-LM has parsed --async-save."""
    holder = sys.modules.get("megatron.training.global_vars")
    return bool(getattr(getattr(holder, "_GLOBAL_ARGS", None), "async_save", False))


def bridge_saves_asynchronously() -> bool:
    """True if Megatron-Bridge can save asynchronously, for which it needs a package."""
    return bool(getattr(sys.modules.get(BRIDGE), "HAVE_NVRX", False))
