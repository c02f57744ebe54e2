"""The place of the program that a thread is in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

BLOCKS = {
    "gloo": {
        "barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor",
        "all_gather_single", "all_gather_object", "reduce_scatter", "reduce_scatter_tensor",
        "reduce_scatter_single", "all_to_all", "all_to_all_single",
    },
    "nccl": {"barrier", "all_gather_object"},
}  # fmt: skip
"""The functions of torch.distributed that return on no rank before all have called them, by
backend."""

TRACER = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "convert_frame.py")
COMPILER = os.path.join(os.path.dirname(torch.__file__), "_inductor", "compile_fx.py")
"""The files of torch that a thread is in while it traces a function, or compiles a graph."""
SITE = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
"""The folder of installed packages. It may lie inside of the standard library's folder."""
STANDARD = os.path.dirname(os.__file__) + os.sep
PACKAGES = (
    os.path.join(SITE, "torch", ""),
    os.path.join(SITE, "triton", ""),
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
)
"""Folders whose lines say nothing about the place in the user's program."""
GENERATED = ("<frozen ", "<eval_with_key>", "torchinductor_")
"""Parts of the file names of code that Python itself has, and that torch.compile has written."""


def is_of_program(path: str) -> bool:
    """True for a file of the program, or of a library that it calls other than torch, Triton, this
    package and the standard library."""
    if path.startswith(PACKAGES) or any(part in path for part in GENERATED):
        return False
    return path.startswith(SITE) or not path.startswith(STANDARD)


def is_compiler(code: CodeType) -> bool:
    """True for a function of torch that is on the stack only while torch.compile compiles."""
    path = code.co_filename
    return path == TRACER or (path == COMPILER and code.co_name == "compile_fx_inner")


def frames_from(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def is_compiling() -> bool:
    """True while a thread of this process compiles: with CUDA, one of autograd compiles
    backwards."""
    stacks = sys._current_frames().values()
    return any(is_compiler(frame.f_code) for top in stacks for frame in frames_from(top))


def place_of(thread_id: int | None) -> tuple[str, str, Sequence[int]]:
    """The line of the program that a thread is in, and whether it compiles; and if it is in a
    collective of torch.distributed that returns when all ranks have called it, its name and those
    ranks."""
    line = ""
    collective = ""
    members: Sequence[int] = ()
    stack = sys._current_frames().get(thread_id) if thread_id is not None else None
    for frame in frames_from(stack):
        code = frame.f_code
        if is_compiler(code):
            line = ""  # so far: of libraries that torch's compiler calls
        elif line:
            continue
        elif code.co_filename == c10d.__file__:
            group = frame.f_locals.get("group") or dist.group.WORLD
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                backend = "nccl" if "nccl" in dist.get_backend_config(group) else "gloo"
                if code.co_name in BLOCKS[backend]:
                    collective = f"torch.distributed.{code.co_name}"
                    members = dist.get_process_group_ranks(group)
        elif is_of_program(code.co_filename):
            line = f"in {code.co_name} ({code.co_filename}:{frame.f_lineno})"
    compiles = "compiling" if stack is not None and is_compiling() else ""
    return ", ".join(filter(None, (compiles, line))), collective, members
