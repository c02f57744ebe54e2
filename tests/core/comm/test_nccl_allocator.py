"""NCCL's allocator from the library, by a library that stands for it: of `ncclMemAlloc` and
`ncclMemFree`, as 2.28 has them, calls are noted."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_fsdp_adapter.core.comm import registered
from megatron_fsdp_adapter.core.comm.registered import allocator_of, compiled, loaded_library

CHECKS = ("core/comm/registered.py",)

LIBRARY = """
#include <stdlib.h>
int ncclMemAlloc(void **memory, size_t size) {
  *memory = size > 1000 ? (void *)1 : malloc(size);
  return size > 1000;
}
int ncclMemFree(void *memory) { free(memory); return 0; }
"""
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


class Refusing:
    """A backend on a device without multicast."""

    @property
    def mem_allocator(self) -> object:
        raise RuntimeError("not supported in this NCCL version")


@NEEDS_COMPILER
def test_memory_is_the_library_s_and_null_where_that_has_none(tmp_path: Path) -> None:
    library = tmp_path / "a b" / "libmade.so.2"  # torch may have loaded the real one
    library.parent.mkdir()
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libmade.so.2", "-x", "c", "-", "-o", str(library)],
        input=LIBRARY, text=True, check=True,
    )  # fmt: skip
    kept = ctypes.CDLL(str(library))  # as torch has loaded it: it is on no search path
    assert loaded_library("libmade.so") == library
    made = ctypes.CDLL(str(compiled(library, tmp_path)))
    made.take.restype = ctypes.c_void_p
    made.take.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    made.give.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    memory = made.take(16, 0, None)
    assert memory
    ctypes.memset(memory, 1, 16)
    made.give(memory, 16, 0, None)
    assert made.take(1001, 0, None) is None
    del kept


def test_without_library_or_compiler_the_error_names_options_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "fsdp_copy_engine_all_gather.*not supported in this NCCL version.*"
    remedy = ".*cc.*or set the options to False"
    nothing = tmp_path / "maps"
    nothing.touch()
    find = functools.partial(loaded_library, maps=nothing)
    monkeypatch.setattr(registered, "loaded_library", find)
    with pytest.raises(RuntimeError, match=f"{names}no libnccl.so is loaded{remedy}"):
        allocator_of(Refusing())
    monkeypatch.setattr(registered, "loaded_library", lambda name: nothing)
    if shutil.which("cc") is not None:  # which takes it for no library
        with pytest.raises(RuntimeError, match=names + remedy):
            allocator_of(Refusing())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"{names}No such file or directory: 'cc'{remedy}"):
        allocator_of(Refusing())


def test_what_torch_hands_out_is_taken() -> None:
    assert allocator_of(SimpleNamespace(mem_allocator="torch's")) == "torch's"
