"""The shape of the source: which way imports go, what may name what, and how long things are."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import share_of

CHECKS = ()  # reads the source

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_fsdp_adapter"
BUNDLED = "megatron.core.distributed.fsdp.src"

PARTS = (
    "core.problems",
    "core.layout",
    "core.runtime",
    "core.kernels",
    "core.comm",
    "core.config",
    "core.topology",
    "core.dtensor",
    "core.distributed_index",
    "core.duplicate_groups",
    "core.engine",
    "quantized",
    "graphs",
    "plan",
    "state",
    "build",
    "optim",
    "elastic",
    "checkpoint",
    "rollout",
    "plain",
    "megatron.compat",
    "megatron.inner_module",
    "megatron.options",
    "megatron.layers",
    "megatron.optimizer",
    "megatron.checkpoint",
    "megatron.elastic",
    "megatron.wrapper",
    "megatron.frameworks",
    "launch",
    "tools",
)
"""A part of the package imports itself and parts in front of it. The package's own two files, which
are in none, import what they like, when it is asked for."""

MEGATRON_IMPORTERS = ("megatron/", "launch/", "tools/prove/", "tools/models/local_spec.py")
"""Folders and files that may import Megatron."""

MAX_FILE = 500
MAX_FUNCTION = 60
BUDGETS = {
    "build": 5_600,
    "checkpoint": 18_500,
    "core": 46_000,
    "elastic": 1_200,
    "graphs": 3_800,
    "launch": 2_600,
    "megatron": 38_800,
    "optim": 14_300,
    "plain": 15_500,
    "plan": 4_300,
    "quantized": 9_800,
    "rollout": 4_400,
    "state": 4_500,
    "tools": 32_900,
}
"""Nodes of the syntax tree that each package may have: as many as when this was last set, and 15%
more, so that growth is decided and not drifted into. Nodes, because lines that are packed have as
many as lines that are plain. There is no total."""
CORE = tuple(part for part in PARTS if part.startswith("core."))
"""What takes part in a step."""


def part_of(path: str) -> str:
    """The part of the package that a file (relative to the package's folder) belongs to; "" if it
    is in none."""
    return part_of_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def part_of_module(name: str) -> str:
    """The same for a dotted name below the package, of a module or of something in one."""
    found = [part for part in PARTS if f"{name}.".startswith(f"{part}.")]
    return max(found, key=len, default="")


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


@functools.cache
def imported(path: str, source: str) -> tuple[str, ...]:
    """Dotted names that a file imports, anywhere in it, by statement or `import_module`; relative
    ones made absolute. `path` is relative to the repository."""
    return tuple(_imported(path, source))


def _imported(path: str, source: str) -> Iterator[str]:
    package = list(Path(path).parent.parts)
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            else:
                base = []
            stem = ".".join(base + ([node.module] if node.module else []))
            yield from (f"{stem}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def import_problems(path: str, source: str) -> list[str]:
    """What is wrong with the imports of a file of the package. `path` relative to its folder."""
    part = part_of(path)
    found = []
    for name in imported(f"{PACKAGE}/{path}", source):
        words = name.split(".")
        if words[0] == PACKAGE and len(words) > 1:
            other = part_of_module(".".join(words[1:]))
            if part and other and PARTS.index(other) > PARTS.index(part):
                found.append(f"{path}: {part} imports {other}, which is not below it")
        elif words[0] == "megatron" and not path.startswith(MEGATRON_IMPORTERS):
            found.append(f"{path}: imports Megatron ({name})")
        # The standard library, and torch for its dtypes.
        elif part == "core.layout" and not (name == "torch" or words[0] in sys.stdlib_module_names):
            found.append(f"{path}: layout imports {name}")
    return found


def sources(folder: str, *suffixes: str) -> dict[str, str]:
    """Text of the files below a folder of the repository, by path relative to it."""
    root = REPOSITORY / folder
    paths = [p for p in sorted(root.rglob("*")) if p.suffix in (suffixes or (".py",))]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


PACKAGE_SOURCES = sources(PACKAGE)


def test_every_file_is_in_a_part_and_every_part_has_files():
    found = {path: part_of(path) for path in PACKAGE_SOURCES}
    assert {path for path, part in found.items() if not part} == {
        "__init__.py",
        "__main__.py",
        "core/__init__.py",
        "megatron/__init__.py",
    }
    assert set(found.values()) == {*PARTS, ""}


def test_imports_go_one_way():
    found = [p for path, text in PACKAGE_SOURCES.items() for p in import_problems(path, text)]
    assert found == []


def test_warnings_are_those_of_one_rank():
    """But for one about files, which the rank that deletes them gives."""
    found = {path for path, text in PACKAGE_SOURCES.items() if "warnings.warn(" in text}
    assert found == {"core/runtime/rank_warnings.py", "checkpoint/publishing.py"}


def import_cycle(files: dict[str, str]) -> list[str]:
    """Files of the package (path: text) of which each imports the next one, anywhere in it (in
    functions and for types too), and the last the first."""
    known = {}
    for path in files:
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        known[f"{PACKAGE}.{module}"] = path
    edges = {}
    for path, text in files.items():
        edges[path] = {
            other
            for name in imported(f"{PACKAGE}/{path}", text)
            if (other := _file_of(name, known)) is not None and other != path
        }
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def _file_of(name: str, known: dict[str, str]) -> str | None:
    """The file that holds a dotted name: a module's, or that of the module whose name it is."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return known.get(name)


def test_no_module_imports_itself_by_way_of_others():
    files = {path: text for path, text in PACKAGE_SOURCES.items() if "/" in path}
    assert import_cycle(files) == []
    hooks = "core/engine/hooks.py"
    for late in ("from .engine import FsdpEngine", "def f():\n    from . import engine"):
        changed = {**files, hooks: files[hooks] + "\n" + late + "\n"}
        assert hooks in import_cycle(changed)


REVERSED = [
    ("core/engine/reduce.py", "from ...quantized import weights"),
    ("core/layout/planner.py", "from ..engine import engine"),
    ("core/layout/planner.py", f"import {PACKAGE}.core.runtime.device"),
    ("core/layout/planner.py", "from .. import config"),
    ("core/layout/planner.py", "import torch.distributed"),
    ("core/layout/planner.py", "from torch.distributed import get_rank"),
    ("core/layout/planner.py", "import numpy"),
    ("core/layout/planner.py", "from megatron.core import parallel_state"),
    ("core/comm/communicator.py", f"from {PACKAGE}.core.topology import ShardDomain"),
    ("core/comm/communicator.py", f"from {PACKAGE}.core.engine.unit import Unit"),
    ("core/config.py", "from .topology import ShardDomain"),
    ("core/config.py", "from ..megatron.wrapper.adapter import FullyShardedDataParallel"),
    ("core/engine/unit.py", "from ...checkpoint.dcp import save_checkpoint"),
    ("core/engine/engine.py", "from ...quantized.weights import QuantizedParams"),
    ("core/engine/engine.py", "from ...graphs.layer_graphs import LayerGraphs"),
    ("core/runtime/host_stash.py", "from ...optim.residency import Residency"),
    (
        "core/engine/unit.py",
        f"def f():\n    from {PACKAGE}.megatron.wrapper.domains import kind_of",
    ),
    (
        "core/engine/unit.py",
        f"import importlib\nimportlib.import_module('{PACKAGE}.megatron.optimizer.optimizer')",
    ),
    ("core/engine/unit.py", "if TYPE_CHECKING:\n    from megatron.core import ModelParallelConfig"),
    ("core/engine/unit.py", "import importlib\nimportlib.import_module('megatron.core')"),
    ("checkpoint/dcp.py", "from ..megatron.wrapper.adapter import FullyShardedDataParallel"),
    ("checkpoint/dcp.py", "from megatron.training import checkpointing"),
    (
        "build/fault_report.py",
        "from ..checkpoint.dcp import load_checkpoint",
    ),
    ("build/building.py", "from ..plain import fully_shard"),
    ("build/building.py", "from ..optim.step import adopt"),
    ("core/engine/unit.py", "from ...optim.residency import Residency"),
    ("plain/fully_shard.py", "from megatron.core import parallel_state"),
    ("megatron/options/settings.py", "from ..optimizer.optimizer import make"),
    ("megatron/options/cuda_graphs.py", "from ..layers.layer_graphs import install"),
    ("megatron/optimizer/optimizer.py", "from ...launch.installation import install"),
    ("tools/cli/estimate.py", "import megatron.core"),
]
ALLOWED = [
    ("core/layout/planner.py", "import math\nimport torch\nfrom .ranges import FlatRange"),
    ("core/layout/planner.py", f"from {PACKAGE}.core.layout.ranges import FlatRange"),
    (
        "core/comm/communicator.py",
        "import torch.distributed\nfrom ..layout.ranges import FlatRange",
    ),
    ("core/engine/unit.py", "from ..topology import ShardDomain\nfrom . import hooks"),
    ("checkpoint/dcp.py", "from ..core.engine.engine import FsdpEngine"),
    (
        "megatron/wrapper/adapter.py",
        "from megatron.core import parallel_state\nfrom ..optimizer import optimizer",
    ),
]


@pytest.mark.parametrize(("path", "source"), (*REVERSED, *ALLOWED))
def test_an_arrow_that_is_reversed_is_found(path, source):
    """Put into the real file, which is clean without it; and one that points down is not."""
    text = PACKAGE_SOURCES[path]
    assert import_problems(path, text) == []
    is_found = (path, source) in REVERSED
    assert len(import_problems(path, text + "\n" + source + "\n")) == int(is_found)


def strings(source: str) -> list[str]:
    """All but docstrings."""
    documents = {id(n.value) for n in nodes_of(source) if isinstance(n, ast.Expr)}
    found = []
    for node in nodes_of(source):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documents
        ):
            found.append(node.value)
    return found


def names_bundled_engine(source: str) -> bool:
    """In an import or in any string but a docstring."""
    return any(BUNDLED in name for name in [*imported("x.py", source), *strings(source)])


def test_nothing_uses_the_bundled_engine():
    files = {f"{PACKAGE}/{path}": text for path, text in PACKAGE_SOURCES.items()}
    files |= {f"scripts/{path}": text for path, text in sources("scripts").items()}
    users = {path for path, text in files.items() if names_bundled_engine(text)}
    assert users == set()
    assert names_bundled_engine(f"from {BUNDLED}.megatron_fsdp import MegatronFSDP")
    assert names_bundled_engine(f"NAME = '{BUNDLED}.megatron_fsdp'")


def test_engine_and_layout_do_not_say_that_word():
    """Parameters of every kind go through one path: what differs is in their `ShardDomain`."""
    for path, text in PACKAGE_SOURCES.items():
        if part_of(path) in ("core.engine", "core.layout"):
            assert "expert" not in text.lower(), path


OF_MEGATRONS_WRAPPER = ("megatron.core", "finish_grad_sync", "start_grad_sync", "zero_grad_buffer")


def test_errors_of_the_engine_say_what_users_of_either_wrapper_can_do():
    """A plain module has none of Megatron's methods to call."""
    for path, text in PACKAGE_SOURCES.items():
        if part_of(path) in CORE:
            found = [s for s in strings(text) if any(name in s for name in OF_MEGATRONS_WRAPPER)]
            assert not found, (path, found)


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of lines of a function, without its signature and docstring."""
    body = [node for node in function.body if not is_text(node)]
    if not body:
        return 0
    return body[-1].end_lineno - body[0].lineno + 1


def test_no_file_and_no_function_is_too_long():
    files = {}
    for folder in (PACKAGE, "scripts"):
        for path, text in sources(folder, ".py", ".sh").items():
            files[f"{folder}/{path}"] = text
    assert [path for path, text in files.items() if text.count("\n") > MAX_FILE] == []
    functions = []
    for path, text in files.items():
        if not path.endswith(".py"):
            continue
        for node in nodes_of(text):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and lines_of_body(node) > MAX_FUNCTION:
                functions.append((path, node.name))
    assert functions == []


NOT_READ = (
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.alias,
    ast.Import,
    ast.ImportFrom,
)
"""Nodes that are not counted: imports, and what is a part of the node above."""


def is_text(node: ast.AST) -> bool:
    """True for a docstring."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def size_of(package: str) -> int:
    """The number of nodes of the syntax tree, without docstrings and imports."""
    size = 0
    for path, text in PACKAGE_SOURCES.items():
        if path.startswith(f"{package}/"):
            size += sum(not isinstance(n, NOT_READ) and not is_text(n) for n in nodes_of(text))
    return size


def test_every_package_is_within_its_budget():
    packages = {path.partition("/")[0] for path in PACKAGE_SOURCES if "/" in path}
    sizes = {package: size_of(package) for package in packages}
    assert sizes.keys() == BUDGETS.keys()
    assert {p: n for p, n in sizes.items() if n > BUDGETS[p]} == {}


def is_table(statement: ast.stmt) -> bool:
    """True for an assignment of data that nothing computes."""
    computed = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)
    is_assignment = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign))
    return is_assignment and not any(isinstance(node, computed) for node in ast.walk(statement))


def unformatted_lines(source: str) -> list[int]:
    """Lines behind which the formatter is switched off, of what is no table."""
    tables = [n for n in nodes_of(source) if isinstance(n, ast.stmt) and is_table(n)]
    ends = {node.end_lineno for node in tables}
    lines = enumerate(source.splitlines(), start=1)
    return [number for number, line in lines if "# fmt: skip" in line and number not in ends]


def test_the_formatter_is_off_in_tables_of_data_only():
    files = {f"{PACKAGE}/{path}": text for path, text in PACKAGE_SOURCES.items()}
    files |= {f"scripts/{path}": text for path, text in sources("scripts").items()}
    assert {path: lines for path, text in files.items() if (lines := unformatted_lines(text))} == {}
    assert unformatted_lines("ROWS = (\n    1, 2,\n)  # fmt: skip") == []
    assert unformatted_lines("call(\n    1, 2,\n)  # fmt: skip") == [3]
    assert unformatted_lines("x = [y\n     for y in z]  # fmt: skip") == [2]


def types_of(source: str) -> set[str]:
    """Names of a module's own classes and type aliases."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_") and not name.isupper()}


def test_the_name_of_a_type_has_one_meaning():
    """But in `tools/`, whose parts know nothing of each other, and for type variables."""
    homes: dict[str, list[str]] = {}
    for path, text in PACKAGE_SOURCES.items():
        if not path.startswith("tools/"):
            for name in types_of(text):
                homes.setdefault(name, []).append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
    assert types_of("class Row: ...\nRows = list[Row]\nROWS = ()") == {"Row", "Rows"}


def test_importing_the_engine_does_not_import_megatron():
    """Not by way of the package's own `__init__` either."""
    program = (
        f"import sys, {PACKAGE}.core.engine.engine, {PACKAGE}.plain, {PACKAGE}.checkpoint.dcp\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'megatron'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_files_that_share_ranks_go_to_one_process_of_a_run() -> None:
    """Each process runs all tests on ranks that it knows of, once for each fixture."""
    files = [path.relative_to(REPOSITORY) for path in (REPOSITORY / "tests").rglob("test_*.py")]
    sharing = [str(path) for path in files if "\n@on_ranks(" in (REPOSITORY / path).read_text()]
    shares = {path: share_of(REPOSITORY, path) for path in sharing}
    assert len(sharing) > 20, shares
    assert set(shares.values()) == {"on ranks"}, shares
    assert share_of(REPOSITORY, "tests/launch/test_runner.py") == "tests/launch/test_runner.py"
    fixtures = []
    for path in (REPOSITORY / "tests").rglob("conftest.py"):
        if "shared_ranks" in path.read_text():
            fixtures.append(path)
    assert fixtures == [REPOSITORY / "tests" / "conftest.py"]
