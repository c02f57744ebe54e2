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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_fsdp_adapter.checkpoint import folders, record, storage
from megatron_fsdp_adapter.checkpoint.convert import common_state, fsdp_dtensor, torch_dist
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import (
    DcpFolder,
    Progress,
    write_folder,
)
from megatron_fsdp_adapter.checkpoint.convert.run_config import RUN_CONFIG
from megatron_fsdp_adapter.checkpoint.convert.training_state import (
    EXPERT_LAYOUTS,
    TRANSFORMER_IMPLS,
    NameStyle,
    TrainingState,
    is_first_linear,
    moe_layers,
)

FSDP_DTENSOR, TORCH_DIST = "fsdp_dtensor", "torch_dist"
MIB = 2**20

_READ_AND_CONTENTS = {
    FSDP_DTENSOR: (fsdp_dtensor.read, fsdp_dtensor.contents),
    TORCH_DIST: (torch_dist.read, torch_dist.contents),
}
FORMATS = tuple(_READ_AND_CONTENTS)


@dataclass(frozen=True)
class Options:
    """Options of a conversion. None keeps the checkpoint's value.

    weights_only: leave out optimizer, scheduler and RNG. transformer_impl ("local",
    "transformer_engine"), experts ("sequential", "grouped") and swiglu select the modules of the
    model, on which its parameters' names depend. params_dtype: compute dtype of the model.
    block_bytes: size of the blocks. Raises ValueError for an invalid value.
    """

    weights_only: bool = False
    transformer_impl: str | None = None
    experts: str | None = None
    swiglu: bool | None = None
    params_dtype: torch.dtype | None = None
    block_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        choices = {"transformer_impl": TRANSFORMER_IMPLS, "experts": EXPERT_LAYOUTS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, allowed))}")
        if self.block_bytes < 1:
            raise ValueError(f"block_bytes={self.block_bytes} must be at least 1")


@dataclass(frozen=True)
class Report:
    """The result of a conversion.

    folder: the written folder; tensors, nbytes: number and size of its tensors; dropped: keys of
    the source that the other format does not store.
    """

    source_format: str
    target_format: str
    folder: Path
    iteration: int
    tensors: int
    nbytes: int
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose structure was read."""

    format: str
    folder: Path
    state: TrainingState


def detect_format(path: Path, iteration: int | None = None) -> str:
    """The one of `FORMATS` at `path`. Raises FileNotFoundError if there is nothing, ValueError for
    anything else."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Check the path")
    if path.is_file():
        raise ValueError(f"{path} is a file. Name the folder of a checkpoint")
    folders.require_ours(path.parent, path, also=common_state.CONFIG)
    root, number = folders.locate(path, iteration)
    folder = folders.final_folder(root, number)
    marks = (common_state.CONFIG, common_state.COMMON)
    return TORCH_DIST if any((folder / name).is_file() for name in marks) else FSDP_DTENSOR


def open_state(
    path: Path,
    source_format: str | None = None,
    iteration: int | None = None,
    options: Options | None = None,
    trusted: bool = True,
) -> Opened:
    """The state at `path`, with lazy tensors. trusted: as in `DcpFolder`. Raises FileNotFoundError
    or ValueError."""
    options = options or Options()
    with _naming(path):
        found = _known(source_format or detect_format(path, iteration))
        folder = DcpFolder.open(path, iteration, found == TORCH_DIST, trusted)
        read, _ = _READ_AND_CONTENTS[found]
        state = read(folder, folders.locate(path, iteration)[1], options.weights_only)
        if options.params_dtype is not None:
            state = replace(state, params_dtype=options.params_dtype)
        return Opened(found, folder.folder, state)


def convert(
    source: Path,
    target: Path,
    target_format: str,
    *,
    source_format: str | None = None,
    iteration: int | None = None,
    options: Options | None = None,
    begin: Callable[[int], Progress] | None = None,
) -> Report:
    """Writes the checkpoint at `source` as `target_format` to `target`.

    source: a root of checkpoints, or one of its folders. target: a new root, which gets a folder
    for the iteration and then a tracker. begin: called with the bytes to be written, returns the
    `Progress` that is called after each block.

    The result is written under a temporary name and renamed once all of it is on disk, so an
    interrupted conversion leaves nothing that looks like a checkpoint. Raises FileNotFoundError or
    ValueError before writing anything if the input cannot be converted or the target exists, and
    ValueError while writing if data files are damaged.
    """
    options = options or Options()
    _known(target_format)
    _check_target(target)
    opened = open_state(source, source_format, iteration, options)
    state, listen = opened.state, begin or (lambda total: lambda name, nbytes: None)
    with _naming(source):
        _, contents_of = _READ_AND_CONTENTS[target_format]
        contents = contents_of(state, style_of(state, options))
        described = opened.folder / RUN_CONFIG  # Megatron-Bridge builds the model by it
        if described.is_file():
            copied = {RUN_CONFIG: functools.partial(shutil.copyfile, described)}
            contents = replace(contents, files={**contents.files, **copied})
        total = sum(tensor.nbytes for tensor in contents.tensors.values())
        folder = folders.final_folder(target, state.iteration)
        temporary = folders.prepare_folder(folder)
        try:
            write_folder(temporary, contents, options.block_bytes, listen(total))
            if target_format == FSDP_DTENSOR:
                record.write_record(temporary, record.make_record(1, state.iteration))
                storage.complete_folder(temporary, {})
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise _cause(error) from error
        folders.publish(target, state.iteration, temporary, None)
    return Report(
        source_format=opened.format,
        target_format=target_format,
        folder=folder,
        iteration=state.iteration,
        tensors=len(contents.tensors),
        nbytes=total,
        dropped=state.dropped,
    )


def style_of(state: TrainingState, options: Options) -> NameStyle:
    """The target model's style: from the options, else from the source. Raises a ValueError that
    lists missing options if neither defines it."""
    known = state.style
    has_experts = bool(moe_layers(state.weights))
    has_first_linears = any(map(is_first_linear, state.weights))
    told = {
        "--transformer-impl": (
            TRANSFORMER_IMPLS.get(options.transformer_impl), known and known.fused_norms
        ),
        "--experts": (
            None if has_experts else False, EXPERT_LAYOUTS.get(options.experts),
            known and known.grouped_experts,
        ),
        "--swiglu or --no-swiglu": (
            None if has_first_linears else False, options.swiglu, known and known.gated
        ),
    }  # fmt: skip
    chosen = {
        option: next((value for value in values if value is not None), None)
        for option, values in told.items()
    }
    missing = [option for option, value in chosen.items() if value is None]
    if missing:
        raise ValueError(
            "the checkpoint has no training arguments for the modules of the model. Give "
            + ", ".join(missing)
        )
    return NameStyle(*map(bool, chosen.values()))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefixes errors that do not contain the checkpoint's path with it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _known(name: str) -> str:
    """`name`, if it is one of `FORMATS`."""
    if name == "huggingface":
        raise ValueError(
            "format='huggingface': Megatron-Bridge converts from and to Hugging Face. Convert to "
            "torch_dist and export that with AutoBridge.export_ckpt, or import with "
            "AutoBridge.import_ckpt and convert the result"
        )
    if name not in FORMATS:
        raise ValueError(f"format={name!r} must be one of {', '.join(FORMATS)}")
    return name


def _check_target(target: Path) -> None:
    if os.path.lexists(target) and not target.is_dir():
        what = "a link that leads nowhere" if target.is_symlink() else "a file"
        raise ValueError(f"{target} is {what}. Name a new folder for the result")
    # What interrupted conversions left does not count.
    names = sorted(path.name for path in target.glob("*"))
    taken = [name for name in names if not name.startswith(folders.TEMPORARY)]
    if taken:
        raise ValueError(f"{target} is not empty (it has {taken[0]}). Name a new folder")


def _cause(error: BaseException) -> BaseException:
    """The original error inside DCP's error about all ranks."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
