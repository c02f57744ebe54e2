"""Conversion of a checkpoint from one format to another, in one process, without GPU or launcher.

Every format is read into a `TrainingState` of lazy tensors and written from one, so any format
converts to any other. Peak memory is `2 * chunk + 5 * block` bytes (chunk: the largest stored chunk
of the source), whatever the size of the model. torch holds a chunk twice while it reads it. DCP's
writer keeps the previous block and copies the current one. A cast block exists in both dtypes, one
at most twice as large as the other.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_adapter.checkpoint import folders, record, storage
from megatron_fsdp_adapter.checkpoint.convert import (
    architecture,
    arguments,
    common_state,
    fsdp_dtensor,
    hugging_face,
    torch_dist,
)
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import (
    DcpFolder,
    Progress,
    locate,
    write_folder,
)
from megatron_fsdp_adapter.checkpoint.convert.lazy import cast
from megatron_fsdp_adapter.checkpoint.convert.safetensors_files import read_json, write_tensors
from megatron_fsdp_adapter.checkpoint.convert.training_state import (
    EXPERT_LAYOUTS,
    TRANSFORMER_IMPLS,
    NameStyle,
    TrainingState,
    is_first_linear,
)

FSDP_DTENSOR, TORCH_DIST, HUGGING_FACE = "fsdp_dtensor", "torch_dist", "huggingface"
FORMATS = (FSDP_DTENSOR, TORCH_DIST, HUGGING_FACE)
MIB = 2**20

_READERS = {FSDP_DTENSOR: fsdp_dtensor.read, TORCH_DIST: torch_dist.read}
_CONTENTS = {FSDP_DTENSOR: fsdp_dtensor.contents, TORCH_DIST: torch_dist.contents}
_HUGGING_FACE_ITERATION = 1
"""Megatron-LM does not accept iteration 0."""


@dataclass(frozen=True)
class Options:
    """Options of a conversion. None keeps the checkpoint's value.

    weights_only: leave out optimizer, scheduler and RNG. transformer_impl ("local",
    "transformer_engine"), experts ("sequential", "grouped") and swiglu select the modules of the
    Megatron model, on which its parameters' names depend. params_dtype: compute dtype of the model,
    and stored dtype of Hugging Face weights (None: unchanged). hf_config: a config.json, or a
    folder with one. vocab_size: embedding rows of the written Hugging Face model;
    padded_vocab_size: embedding rows of a Megatron model converted from one (None: the next
    multiple of make_vocab_size_divisible_by). block_bytes, max_file_bytes: sizes of blocks, of
    safetensors files. Raises ValueError for an invalid value.
    """

    weights_only: bool = False
    transformer_impl: str | None = None
    experts: str | None = None
    swiglu: bool | None = None
    params_dtype: torch.dtype | None = None
    hf_config: Path | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    block_bytes: int = 64 * MIB
    max_file_bytes: int = 5 * 1000**3

    def __post_init__(self) -> None:
        choices = {"transformer_impl": TRANSFORMER_IMPLS, "experts": EXPERT_LAYOUTS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}")
        positive = ("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by",
                    "block_bytes", "max_file_bytes")  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class Report:
    """The result of a conversion.

    folder: the written folder; tensors, nbytes: number and size of its tensors; memory_bound: peak
    memory of tensors in bytes; dropped: keys of the source that the other format does not store.
    """

    source_format: str
    target_format: str
    folder: Path
    iteration: int
    tensors: int
    nbytes: int
    memory_bound: int
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose structure was read.

    largest_chunk: size in bytes of the largest part that can only be read as a whole; 0 if any part
    of a tensor can be read alone.
    """

    format: str
    folder: Path
    state: TrainingState
    largest_chunk: int


def detect_format(path: Path, iteration: int | None = None) -> str:
    """The one of `FORMATS` at `path`. Raises FileNotFoundError if there is nothing, ValueError for
    anything else."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Check the path")
    if path.is_file():
        raise ValueError(f"{path} is a file. Name the folder of a checkpoint")
    if any(path.glob("*.safetensors")) or (path / hugging_face.CONFIG).is_file():
        return HUGGING_FACE
    root, number = locate(path, iteration)
    folder = folders.final_folder(root, number)
    if any((folder / name).is_file() for name in (common_state.CONFIG, common_state.COMMON)):
        return TORCH_DIST
    if folder.is_dir() and not (folder / ".metadata").is_file() and any(folder.glob("mp_rank_*")):
        raise ValueError(
            f"{folder} is of Megatron's legacy format (mp_rank_*), which cannot be converted. "
            "Load it with Megatron and save it with --ckpt-format torch_dist"
        )
    return FSDP_DTENSOR


def open_state(
    path: Path,
    source_format: str | None = None,
    iteration: int | None = None,
    options: Options | None = None,
    trusted: bool = True,
) -> Opened:
    """The state at `path`, with lazy tensors. trusted: as in `DcpFolder`. Raises FileNotFoundError
    or ValueError."""
    with _naming(path):
        return _open(path, source_format, iteration, options or Options(), trusted)


def _open(
    path: Path, source_format: str | None, iteration: int | None, options: Options, trusted: bool
) -> Opened:
    found = source_format or detect_format(path, iteration)
    if found not in FORMATS:
        raise ValueError(f"format {found!r} must be one of {', '.join(FORMATS)}")
    if found == HUGGING_FACE:
        state = hugging_face.read(
            path, _hugging_face_style(options), options.padded_vocab_size,
            options.make_vocab_size_divisible_by, options.params_dtype,
        )  # fmt: skip
        number = _HUGGING_FACE_ITERATION if iteration is None else iteration
        rest = {**state.rest, "iteration": number}
        return Opened(found, path, replace(state, iteration=number, rest=rest), 0)
    folder = DcpFolder.open(path, iteration, found == TORCH_DIST, trusted)
    number = locate(path, iteration)[1]
    state = _READERS[found](folder, number, options.weights_only)
    if options.params_dtype is not None:
        state = replace(state, params_dtype=options.params_dtype)
    return Opened(found, folder.folder, state, folder.largest_chunk())


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

    source: a root of checkpoints, one of its folders, or a folder of safetensors. target: a new
    folder; for Megatron's formats a root, which gets a folder for the iteration and then a tracker.
    begin: called with the bytes to be written, returns the `Progress` that is called after each
    block.

    The result is written under a temporary name and renamed once all of it is on disk, so an
    interrupted conversion leaves nothing that looks like a checkpoint. Raises FileNotFoundError or
    ValueError before writing anything if the input cannot be converted or the target exists, and
    ValueError while writing if data files are damaged.
    """
    options = options or Options()
    if target_format not in FORMATS:
        raise ValueError(f"format {target_format!r} must be one of {', '.join(FORMATS)}")
    to_hugging_face = target_format == HUGGING_FACE
    if to_hugging_face:
        options = replace(options, weights_only=True)  # the format stores nothing else
    _check_target(target, target_format)
    # Hugging Face's format stores no objects, so only arguments are read, which needs no trust.
    opened = open_state(source, source_format, iteration, options, trusted=not to_hugging_face)
    state, listen = opened.state, begin or (lambda total: lambda name, nbytes: None)
    with _naming(source):
        if opened.format == HUGGING_FACE:
            architecture.refuse_other_configs(read_json(source / hugging_face.CONFIG))
        if target_format == HUGGING_FACE:
            count, nbytes, folder = _write_hugging_face(state, target, options, listen)
        else:
            count, nbytes, folder = _write_megatron(state, target, target_format, options, listen)
    return Report(
        source_format=opened.format,
        target_format=target_format,
        folder=folder,
        iteration=state.iteration,
        tensors=count,
        nbytes=nbytes,
        memory_bound=2 * opened.largest_chunk + 5 * options.block_bytes,
        dropped=_dropped(state, target_format),
    )


def style_of(state: TrainingState, options: Options) -> NameStyle:
    """The target model's style: from the options, else from the source. Raises a ValueError that
    lists missing options if neither defines it."""
    known = state.style
    fused, grouped, gated = (
        (known.fused_norms, known.grouped_experts, known.gated) if known else (None, None, None)
    )
    if options.transformer_impl is not None:
        fused = options.transformer_impl == "transformer_engine"
    if options.experts is not None:
        grouped = options.experts == "grouped"
    if options.swiglu is not None:
        gated = options.swiglu
    if not state.is_moe:
        grouped = False
    if not any(map(is_first_linear, state.weights)):
        gated = False
    told = {"--transformer-impl": fused, "--experts": grouped, "--swiglu or --no-swiglu": gated}
    missing = [option for option, value in told.items() if value is None]
    if missing:
        raise ValueError(
            "the checkpoint has no training arguments for the modules of the model. Give "
            + ", ".join(missing)
        )
    return NameStyle(bool(fused), bool(grouped), bool(gated))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefixes errors that do not contain the checkpoint's path with it."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _hugging_face_style(options: Options) -> NameStyle:
    """The style by the options, with Megatron's defaults."""
    fused = options.transformer_impl != "local"
    grouped = fused if options.experts is None else options.experts == "grouped"
    return NameStyle(fused_norms=fused, grouped_experts=grouped, gated=True)


def _check_target(target: Path, target_format: str) -> None:
    if os.path.lexists(target) and not target.is_dir():
        what = "a link that leads nowhere" if target.is_symlink() else "a file"
        raise ValueError(f"{target} is {what}. Name a new folder for the result")
    names = {path.name for path in target.iterdir()} if target.is_dir() else set()
    # Files of interrupted conversions do not count; the next conversion deletes them.
    if target_format == HUGGING_FACE:
        left = {path.name for path in folders.abandoned(_inside(target))} if names else set()
    else:
        left = set(folders.leftovers(target)) if names else set()
    taken = sorted(names - left)
    if taken:
        raise ValueError(f"{target} is not empty (it has {taken[0]}). Name a new folder")


def _write_megatron(
    state: TrainingState,
    root: Path,
    target_format: str,
    options: Options,
    begin: Callable[[int], Progress],
) -> tuple[int, int, Path]:
    contents = _CONTENTS[target_format](state, style_of(state, options))
    total = sum(tensor.nbytes for tensor in contents.tensors.values())
    temporary = folders.prepare_folder(folders.final_folder(root, state.iteration))
    try:
        write_folder(temporary, contents, options.block_bytes, begin(total))
        if target_format == FSDP_DTENSOR:
            record.write_record(temporary, record.make_record(1, state.iteration))
            storage.complete_folder(temporary, {})
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _cause(error) from error
    folders.publish(root, state.iteration, temporary, None)
    return len(contents.tensors), total, folders.final_folder(root, state.iteration)


def _write_hugging_face(
    state: TrainingState, target: Path, options: Options, begin: Callable[[int], Progress]
) -> tuple[int, int, Path]:
    model, config = _model_of(state, options)
    rows = state.weights[hugging_face.EMBEDDING].shape[0]
    vocab = options.vocab_size or (model.vocab if config else rows)
    if vocab > rows:
        raise ValueError(f"vocab_size={vocab}, but the embedding has {rows} rows")
    tensors = hugging_face.weights_for(state, model, vocab)
    dtype = options.params_dtype or tensors[hugging_face._TOP[hugging_face.EMBEDDING]].dtype
    if options.params_dtype is not None:
        tensors = {name: cast(tensor, dtype) for name, tensor in tensors.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    config = config or architecture.to_config(model, dtype, vocab)
    name = "dtype" if "dtype" in config else "torch_dtype"  # as transformers 5 calls it, and 4
    config = {**config, "vocab_size": vocab, name: str(dtype).removeprefix("torch.")}
    with _appearing(target) as temporary:
        (temporary / hugging_face.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_tensors(temporary, tensors, options.block_bytes, options.max_file_bytes, begin(total))
    return len(tensors), total, target


def _model_of(
    state: TrainingState, options: Options
) -> tuple[architecture.Architecture, dict[str, Any] | None]:
    """The architecture by the given config, and that config, or by the saved arguments and None.
    Raises ValueError if config and arguments differ, or describe another family."""
    if options.hf_config is None:
        return architecture.from_arguments(state), None
    file = options.hf_config
    config = read_json(file / hugging_face.CONFIG if file.is_dir() else file)
    model = architecture.from_config(config)
    architecture.refuse_other_configs(config)
    architecture.refuse_contradictions(state, model)
    return model, config


def _inside(target: Path) -> Path:
    """The subfolder to write a result to if its folder exists already."""
    return target / "huggingface"


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Yields an empty folder whose files become those of `target` when the block ends without
    error.

    The folder is renamed, or, if `target` exists (a mount point, a link), its files are moved into
    it, the config last. Folders of killed conversions are deleted first. Raises ValueError if the
    target is taken meanwhile."""
    is_there = target.is_dir()
    place = _inside(target) if is_there else target
    place.parent.mkdir(parents=True, exist_ok=True)
    folders.remove_or_warn(folders.abandoned(place))
    temporary = folders.owned_name(place)
    temporary.mkdir()
    try:
        yield temporary
        folders.sync_folder(temporary)
        if not is_there:
            if os.path.lexists(target):
                raise ValueError(f"{target} was created meanwhile. Name a new folder")
            temporary.rename(target)
        else:
            others = sorted({path.name for path in target.iterdir()} - {temporary.name})
            if others:
                raise ValueError(
                    f"{target} is not empty any more (it has {others[0]}). Name a new folder"
                )
            for path in sorted(temporary.iterdir(), key=lambda p: p.name == hugging_face.CONFIG):
                path.rename(target / path.name)
            temporary.rmdir()
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    folders.sync_folder(target if is_there else target.absolute().parent)


def _cause(error: BaseException) -> BaseException:
    """The original error inside DCP's error about all ranks."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _dropped(state: TrainingState, target_format: str) -> tuple[str, ...]:
    if target_format != HUGGING_FACE:
        return state.dropped
    of_tokens = arguments.not_carried(state.rest.get("args"), state.is_moe)
    return (*state.dropped, "everything but weights", *of_tokens)
