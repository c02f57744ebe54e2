"""Megatron's own saves, made safe without a change to its code.

Megatron-LM and Megatron-Bridge write an fsdp_dtensor checkpoint into its final folder. Then they
truncate and write the tracker. A process that is killed meanwhile leaves half a checkpoint under
its final name, or an empty tracker. Their module takes torch DCP's storage writer from
`torch.distributed.checkpoint`, and opens the tracker by a global name. These globals of that one
module are replaced:

- torch DCP's writer by `SafeWriter`;
- torch DCP's `save` by one that waits for saves in the background and removes what a failed save
  wrote;
- the opening of a tracker for writing by a file that takes the tracker's place when it is closed;
- the deletion of a checkpoint by one that renames it first, so that half a checkpoint never has a
  final name;
- the function that keeps the newest checkpoints by one that counts complete ones only.

Nothing else in the process sees another torch. Asynchronous saves take their writer from a table,
and get another table (`background_saves.py`).

The globals can be replaced only once the module is loaded. So they are replaced by `install()`, and
again when a wrapper is constructed.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from megatron_fsdp_adapter.checkpoint import atomic, folders, publishing, record, running
from megatron_fsdp_adapter.checkpoint.coordination import interruption_in
from megatron_fsdp_adapter.checkpoint.storage import SafeWriter
from megatron_fsdp_adapter.checkpoint.unpickling import Reader
from megatron_fsdp_adapter.megatron.checkpoint.background_saves import (
    AsyncStrategy,
)
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView, Original
from megatron_fsdp_adapter.megatron.compat.table import BRIDGE


class ReplacingFile(io.StringIO):
    """A text file in memory that replaces the tracker at `path`, all at once, when it is closed.

    If an error leaves its `with` block, the tracker stays as it was; also if it names a save that
    was begun later, as when a background save is confirmed after a plain one.
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
            self._replace(self.getvalue())
        super().close()

    def _replace(self, text: str) -> None:
        root = self._path.parent
        if not text.isdecimal():  # a release
            atomic.write_atomically(self._path, text)
        elif running.overtaken_by(root, int(text)) is None:
            atomic.write_atomically(self._path, text)
            publishing.tracker_names(root, int(text))


def opening(original: Original) -> Callable[..., Any]:
    """A function like `open`, in which a tracker opened for writing is replaced as a whole."""

    def open_file(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "w" and _is_local(path) and Path(path).name == folders.TRACKER:
            return ReplacingFile(Path(path))
        return original(path, mode, *args, **kwargs)

    return open_file


def copying(original: Original) -> Callable[..., Any]:
    """A function like `shutil.copy` that replaces the target file as a whole."""

    def copy(source: Any, target: Any, **kwargs: Any) -> Any:
        if not _is_local(target) or Path(target).is_dir():
            return original(source, target, **kwargs)
        with atomic.replacing(Path(target)) as beside:
            original(source, beside, **kwargs)
            atomic.sync_files([beside])
        return target

    return copy


def _is_local(path: Any) -> bool:
    """False for addresses (msc://...), which Megatron's storage client takes: they cannot be
    renamed."""
    return "://" not in str(path)


def torch_view(module: ModuleType, torch: Any) -> ModuleView:
    """The view of torch that replaces `module`'s global `torch`: DCP writes safely, refuses to read
    checkpoints that are not ours, and discards what a failed save wrote."""

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
        used = kwargs.get("storage_writer")
        if not isinstance(used, SafeWriter):
            return torch.distributed.checkpoint.save(*args, **kwargs)
        folder = Path(used.checkpoint_id)
        running.begin(folder.parent, folders.iteration_of(folder))
        running.wait(folder.parent)
        try:
            return torch.distributed.checkpoint.save(*args, **kwargs)
        except BaseException as error:
            used.discard()
            rank = dist.get_rank() if dist.is_initialized() else 0
            interruption = interruption_in(error, rank)
            if interruption is not None:
                raise interruption from error
            raise

    answers = {"FileSystemWriter": writer, "FileSystemReader": reader, "save": save}
    checkpoint = ModuleView(torch.distributed.checkpoint, answers)
    distributed = ModuleView(torch.distributed, {"checkpoint": checkpoint})
    return ModuleView(torch, {"distributed": distributed})


def _topology(module: ModuleType) -> dict[str, Any]:
    """The topology from Megatron-LM's arguments; empty for Megatron-Bridge, whose module has no
    access to them."""
    arguments = getattr(module, "get_args", None)
    return record.topology_of(arguments()) if callable(arguments) else {}


def opens(module: ModuleType, held: Any) -> Any:
    """A replacement for `held`: a function that opens files, or a client with a method `open`. The
    method is looked up at each call, because it changes once --enable-msc has been parsed."""
    if not hasattr(held, "open"):
        return opening(held)
    return ModuleView(held, {"open": opening(lambda *args, **kwargs: held.open(*args, **kwargs))})


def removing(original: Original) -> Callable[..., Any]:
    """A function like `shutil.rmtree` that renames a checkpoint before it deletes it."""

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> Any:
        number = folders.iteration_of(Path(path)) if _is_local(path) else None
        if number is None:
            original(path, *args, **kwargs)
        elif number == publishing.tracked(Path(path).parent):
            raise OSError(f"{path} is kept: {folders.TRACKER} names it")
        else:
            publishing.remove(Path(path))

    return rmtree


def shutil_view(module: ModuleType, held: Any) -> ModuleView:
    """The view of shutil in which files are replaced and checkpoints deleted as a whole."""
    return ModuleView(held, {"copy": copying(held.copy), "rmtree": removing(held.rmtree)})


def keep_newest(
    original: Original,
    save_dir: Any,
    leave_ckpt_num: int = 1,
    do_async: bool = False,
    max_iteration: int | None = None,
) -> None:
    """Stands for `cleanup_old_non_persistent_checkpoint`: deletes all complete checkpoints of a
    folder but the newest, and the one that the tracker names.

    max_iteration: later checkpoints are neither counted nor deleted.

    The original also counts the empty folder of a save that runs in the background or was killed.
    With `leave_ckpt_num=1` it then deletes the only complete checkpoint."""
    if not _is_local(save_dir):
        bound = {} if max_iteration is None else {"max_iteration": max_iteration}
        original(save_dir, leave_ckpt_num, do_async, **bound)
        return
    if leave_ckpt_num < 1 or (dist.is_initialized() and dist.get_rank() != 0):
        return
    root = Path(save_dir)
    if not root.is_dir():
        return
    before = None if max_iteration is None else max_iteration + 1
    doomed = publishing.surplus(root, leave_ckpt_num, before)
    if doomed:
        print(f"checkpoints that are deleted: {', '.join(map(str, doomed))}", flush=True)
    if do_async:
        threading.Thread(target=publishing.remove_or_warn, args=(doomed,)).start()
    else:
        publishing.remove_or_warn(doomed)


def strategy(module: ModuleType, held: Any) -> AsyncStrategy:
    """The replacement for `get_async_strategy`."""
    return AsyncStrategy(held, lambda: _topology(module))


def plan(module: ModuleType, held: Any) -> Callable[..., Any]:
    """The replacement for `save_state_dict_async_plan`."""
    return strategy(module, held).plan


def saves_asynchronously() -> bool:
    """True if Megatron-LM has parsed its arguments, with --async-save among them."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return bool(getattr(getattr(global_vars, "_GLOBAL_ARGS", None), "async_save", False))


def bridge_saves_asynchronously() -> bool:
    """True if Megatron-Bridge can save asynchronously: it has found the package that it needs."""
    return bool(getattr(sys.modules.get(BRIDGE), "HAVE_NVRX", False))
