"""Conversion of a checkpoint from one format to another, in one process, without GPU or launcher.

Every format is read into a `TrainingState` of lazy tensors and written from one. Peak memory is
`2 * chunk + 5 * block` bytes (chunk: the largest stored chunk of the source), whatever the size of
the model. torch holds a chunk twice while it reads it. DCP's writer keeps the previous block and
copies the current one. A cast block exists in both dtypes, one at most twice as large as the other.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_fsdp_adapter.checkpoint import folders, publishing, record, storage
from megatron_fsdp_adapter.checkpoint.atomic import TEMPORARY
from megatron_fsdp_adapter.checkpoint.convert import fsdp_dtensor, torch_dist
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import (
    BLOCK_BYTES,
    FSDP_DTENSOR,
    TORCH_DIST,
    Contents,
    DcpFolder,
    write_folder,
)
from megatron_fsdp_adapter.checkpoint.convert.run_config import RUN_CONFIG
from megatron_fsdp_adapter.checkpoint.convert.training_state import TrainingState
from megatron_fsdp_adapter.checkpoint.digests import (
    Progress,
    check_folder,
    read_digests,
    silent,
)

_READ_AND_CONTENTS = {
    FSDP_DTENSOR: (fsdp_dtensor.read, fsdp_dtensor.contents),
    TORCH_DIST: (torch_dist.read, torch_dist.contents),
}
FORMATS = tuple(_READ_AND_CONTENTS)


def open_state(
    path: Path, iteration: int | None = None, weights_only: bool = False, trusted: bool = True
) -> tuple[DcpFolder, TrainingState]:
    """The folder at `path`, and its state with lazy tensors.

    weights_only: leave out optimizer, scheduler and RNG. trusted: as in `DcpFolder`. Raises
    FileNotFoundError or ValueError; the message has the path."""
    with _naming(path):
        folder = DcpFolder.open(path, iteration, trusted)
        return folder, state_of(folder, weights_only)


def state_of(folder: DcpFolder, weights_only: bool) -> TrainingState:
    """The state in an opened folder. Raises ValueError."""
    read, _ = _READ_AND_CONTENTS[folder.format]
    return read(folder, weights_only)


def convert(
    source: Path,
    target: Path,
    target_format: str,
    *,
    iteration: int | None = None,
    weights_only: bool = False,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes a checkpoint in another format, without a GPU and without the model.

    One process reads and writes it block by block. The result gets its name when it is complete, so
    an interrupted conversion leaves no checkpoint.

    Examples:
        >>> done = convert(source, folder, "torch_dist")  # source: of iteration 3
        >>> done["iteration"], done["dropped"]
        (3, ())

    Args:
        source: a folder of checkpoints, or the folder of one.
        target: a new folder of checkpoints.
        target_format: "torch_dist" or "fsdp_dtensor".
        iteration: the number of the checkpoint in `source`. None: the newest.
        weights_only: True leaves out optimizer, scheduler and states of generators.
        block_bytes: bytes of a block.
        progress: a function that is called with the progress.

    Returns:
        A dict: formats, written folder, iteration, number and bytes of tensors, and in "dropped"
        the keys that the other format does not have.

    Raises:
        FileNotFoundError: there is no such checkpoint. Nothing is written.
        ValueError: the checkpoint cannot be converted, or `target` exists. Nothing is written.
            Also, during the conversion: data without digests are damaged, or another job saves
            into `target`.
    """
    _check_format(target_format)
    _check_target(target)
    opened, state = open_state(source, iteration, weights_only)
    with _naming(source):
        _check_digests(opened.folder)
        if state.style is None:
            raise ValueError(
                "the checkpoint has no training arguments, by which modules of the model are "
                "named. Put Megatron-Bridge's run_config.yaml beside it, with the section `model`"
            )
        _, contents_of = _READ_AND_CONTENTS[target_format]
        contents = contents_of(state, state.style)
        run_config = opened.folder / RUN_CONFIG  # Megatron-Bridge builds the model by it
        if run_config.is_file():
            copied = {RUN_CONFIG: functools.partial(shutil.copyfile, run_config)}
            contents = replace(contents, files={**contents.files, **copied})
        folder = folders.final_folder(target, state.iteration)
        temporary = publishing.prepare_folder(folder)
        try:
            with storage.unless_taken(temporary, folder):
                _write(temporary, contents, state, target_format, block_bytes, progress)
            taken = _names_in(target)
            if taken:
                raise ValueError(
                    f"{target} has {taken[0]} by now: another job saves to it. Name a new folder"
                )
            publishing.publish(target, state.iteration, temporary, None)
        except BaseException:
            publishing.discard(temporary)
            raise
    return {
        "source_format": opened.format,
        "target_format": target_format,
        "folder": str(folder),
        "iteration": state.iteration,
        "tensors": len(contents.tensors),
        "nbytes": sum(tensor.nbytes for tensor in contents.tensors.values()),
        "dropped": state.dropped,
    }


def _write(
    temporary: Path,
    contents: Contents,
    state: TrainingState,
    target_format: str,
    block_bytes: int,
    progress: Progress,
) -> None:
    """Writes all files of the result. DCP's error about all ranks is replaced by its cause."""
    try:
        write_folder(temporary, contents, block_bytes, progress)
        if target_format == FSDP_DTENSOR:
            record.write_record(temporary, 1, state.iteration, {})
            storage.complete_folder(temporary, {})
    except BaseException as error:
        raise _cause(error) from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefixes errors that do not contain the checkpoint's path with it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _check_digests(folder: Path) -> None:
    """Raises ValueError if a file of `folder` differs from its digest: the result would have the
    damage, and digests of its own."""
    recorded = read_digests(folder)
    problems = [] if recorded is None else check_folder(folder, recorded)
    if problems:
        more = f", and {len(problems) - 1} more files" if len(problems) > 1 else ""
        raise ValueError(f"{folder} is damaged: {problems[0]}{more}. Copy it again")


HUGGING_FACE = ("huggingface", "hf", "safetensors")
"""Names under which users ask for weights of Hugging Face."""


def _check_format(name: str) -> None:
    """Raises ValueError unless `name` is one of `FORMATS`."""
    if name in HUGGING_FACE:
        raise ValueError(
            f"format={name!r} (--to): Megatron-Bridge converts from and to Hugging Face. Convert "
            "to torch_dist and export that with AutoBridge.export_ckpt, or import with "
            "AutoBridge.import_ckpt and convert the result"
        )
    if name not in FORMATS:
        raise ValueError(f"format={name!r} (--to): must be one of {', '.join(FORMATS)}")


def _check_target(target: Path) -> None:
    if os.path.lexists(target) and not target.is_dir():
        what = "a link that leads nowhere" if target.is_symlink() else "a file"
        raise ValueError(f"{target} is {what}. Name a new folder for the result")
    taken = _names_in(target)
    if taken:
        raise ValueError(f"{target} is not empty (it has {taken[0]}). Name a new folder")


def _names_in(target: Path) -> list[str]:
    """Names in a folder, without those that an interrupted conversion left."""
    names = sorted(path.name for path in target.glob("*"))
    return [name for name in names if not name.startswith(TEMPORARY)]


def _cause(error: BaseException) -> BaseException:
    """The original error inside DCP's error about all ranks."""
    failures = getattr(error, "failures", None)
    if not failures:
        return error
    cause, _ = next(iter(failures.values()))
    return cause
