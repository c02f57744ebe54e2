"""The place of a thread is a line of its program, also inside of a library that it calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.comm import place

CHECKS = ("core/comm/place.py",)


def called_from(path: str, name: str) -> str:
    """The place of a thread that is in a function of this name, as if of the file."""
    scope: dict[str, Any] = {"place_of": place.place_of, "thread": threading.get_ident()}
    exec(compile(f"def {name}(): return place_of(thread)", path, "exec"), scope)
    return str(scope[name]()[0])


def in_standard_library() -> str:
    found = weakref.finalize(place, place.place_of, threading.get_ident())()
    assert found is not None
    return found[0]


PROGRAM = f"({__file__}:"
TRAINER = f"{place.SITE}transformers/trainer.py"


@pytest.mark.parametrize(
    ("find", "wanted"),
    [
        (in_standard_library, f"in in_standard_library {PROGRAM}"),
        (lambda: called_from("/home/me/train.py", "load"), "in load (/home/me/train.py:1)"),
        (lambda: called_from(TRAINER, "train"), f"in train ({TRAINER}:1)"),
        (lambda: called_from("<eval_with_key>.3", "forward"), f"in called_from {PROGRAM}"),
        (lambda: called_from("/tmp/torchinductor_me/ab.py", "call"), f"in called_from {PROGRAM}"),
        (lambda: called_from(f"{place.SITE}triton/x.py", "make"), f"in called_from {PROGRAM}"),
        (lambda: called_from(place.COMPILER, "run"), f"in called_from {PROGRAM}"),
        (
            lambda: called_from(place.COMPILER, "compile_fx_inner"),
            f"compiling, in called_from {PROGRAM}",
        ),
    ],
)
def test_a_place_is_a_line_of_the_program(find: Callable[[], str], wanted: str) -> None:
    assert find().startswith(wanted)


def test_it_says_when_torch_compiles_and_not_when_compiled_code_runs() -> None:
    name = "test_it_says_when_torch_compiles_and_not_when_compiled_code_runs"
    places = []

    def note() -> None:
        places.append(place.place_of(threading.get_ident())[0])

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        note()

        def run(*values: Any) -> Any:
            note()
            return graph(*values)

        return run

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert [text.partition(" (")[0] for text in places] == [f"compiling, in {name}", "in note"]
