"""install() reaches every place where Megatron holds the names, and uninstall() leaves no trace.

Each case is a process of its own, forked from one that has imported torch alone: what is tested is
the order of imports of Megatron and of this package.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.lib.integration.lm_runs import environment_of_ranks
from tests.lib.integration.warm_start import Rank, Server

CHECKS = ("launch/installation.py", "megatron/compat/patches.py", "megatron/compat/table.py")

PRELUDE = """
import sys, types
import importlib

def megatron_modules():
    return {n: m for n, m in list(sys.modules.items())
            if isinstance(m, types.ModuleType) and (n == "megatron" or n.startswith("megatron."))}

def holders(wanted):
    found = []
    for name, module in megatron_modules().items():
        for attribute, value in vars(module).items():
            entries = value if type(value) is tuple else (value,)
            if any(entry is wanted for entry in entries):
                found.append(f"{name}.{attribute}")
    return sorted(found)

def snapshot():
    return {(n, a): v for n, m in megatron_modules().items() for a, v in vars(m).items()
            if not a.startswith("__")}

FSDP = "megatron.core.distributed.fsdp"
ENGINE = FSDP + ".src.megatron_fsdp"
CHECKPOINT = "megatron.core.transformer.fsdp_dtensor_checkpoint"
HELPERS = {
    "preprocess_state_dict_for_uneven_dtensor": "uneven_dtensor",
    "gather_uneven_dtensor_to_full_tensor": "uneven_dtensor",
    "make_fsdp_dtensor": "param_and_grad_buffer",
}
"""


SERVES = """
import sys, torch
from tests.lib.integration import warm_start
sys.exit(warm_start.serve(lambda words: exec(words[0], globals())))
"""
Start = Callable[..., Callable[[], None]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts code in a process, `path` in front of its module search path; what is returned raises
    an AssertionError if the code did."""
    folder = tmp_path_factory.mktemp("processes")
    server = Server([sys.executable, "-W", "ignore", "-c", SERVES], environment_of_ranks())

    def begin(name: str, body: str, *path: str) -> Callable[[], None]:
        code = PRELUDE + "".join(f"sys.path.insert(0, {p!r})\n" for p in path)
        log = folder / name
        log.touch()
        words = [code + textwrap.dedent(body)]
        process = Rank(server, words, environment_of_ranks(), log, None)

        def check() -> None:
            assert process.wait() == 0, log.read_text()

        return check

    yield begin
    server.end()


BODIES = {
    "importing the package imports no Megatron": """
        import megatron_fsdp_adapter
        from megatron_fsdp_adapter.megatron.compat.table import installed
        assert not megatron_modules() and not installed()
    """,
    "install before Megatron": """
        from megatron_fsdp_adapter import install
        install()
        from megatron_fsdp_adapter import FullyShardedDataParallel as ours
        from megatron_fsdp_adapter.megatron.checkpoint import megatron_names
        from megatron.core.distributed import FullyShardedDataParallel as a
        from megatron.core.distributed.fsdp import FullyShardedDataParallel as b
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as c
        assert a is b is c is ours
        for name, home in HELPERS.items():
            assert getattr(importlib.import_module(f"{ENGINE}.{home}"), name) is getattr(
                megatron_names, name), name
        checkpoint = importlib.import_module(CHECKPOINT)
        assert checkpoint.make_fsdp_dtensor is megatron_names.make_fsdp_dtensor
    """,
    "install after Megatron and back": """
        for name in ("megatron.core", "megatron.core.distributed", "megatron.core.optimizer",
                     "megatron.core.utils", "megatron.core.tensor_parallel.layers",
                     "megatron.core.models.gpt", CHECKPOINT):
            importlib.import_module(name)
        # Others bind the class in ways of their own.
        from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel
        original = FullyShardedDataParallel
        # From 0.20 on a function that makes one of two.
        adapter = sys.modules[FSDP + ".mcore_fsdp_adapter"]
        first = getattr(adapter, "FullyShardedDataParallelV1", original)
        kept = [original]  # lists are not looked into, as this module is
        user = types.ModuleType("megatron.somebody")
        user.FSDP = original
        user.WRAPPERS = (DistributedDataParallel, original)
        user.NESTED = ((original,), "text")
        user.LISTED = [1, 2]
        def unwrap(model, classes=(int, original), also=None):
            return classes
        user.unwrap = unwrap
        sys.modules["megatron.somebody"] = user
        stranger = types.ModuleType("megatronics")
        stranger.FSDP = original
        sys.modules["megatronics"] = stranger
        helpers = {n: getattr(sys.modules[f"{ENGINE}.{h}"], n) for n, h in HELPERS.items()}
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        methods = dict(vars(DistributedOptimizer))
        before, places = snapshot(), {n: holders(h) for n, h in helpers.items()}
        places["class"] = sorted({*holders(original), *holders(first)})
        assert len(places["class"]) >= 5 and len(places["make_fsdp_dtensor"]) >= 2

        import megatron_fsdp_adapter.megatron
        from megatron_fsdp_adapter import install, uninstall
        from megatron_fsdp_adapter.megatron.compat.patches import original_of
        from megatron_fsdp_adapter.megatron.compat.table import WRAPPER, installed
        from megatron_fsdp_adapter.megatron.checkpoint import megatron_names
        megatron_fsdp_adapter.megatron.FSDP = original
        wrapper = sys.modules[WRAPPER]
        for _ in range(2):
            install()
            assert installed()
            from megatron_fsdp_adapter import FullyShardedDataParallel as ours
            assert holders(kept[0]) == [] and holders(ours) == places["class"]
            assert original_of(wrapper, "FullyShardedDataParallel") is kept[0]
            for name, helper in helpers.items():
                assert holders(helper) == [], name
                assert holders(getattr(megatron_names, name)) == places[name], name
        assert user.WRAPPERS == (DistributedDataParallel, ours) and user.NESTED[0] == (ours,)
        assert stranger.FSDP is ours is original and unwrap(None) == (int, ours)
        assert megatron_fsdp_adapter.megatron.FSDP is kept[0]
        late = types.ModuleType("late")
        late.FSDP = ours  # by our name, for all that is known
        sys.modules["late"] = late

        from megatron.core.utils import unwrap_model
        import torch
        wrapped = ours.__new__(ours)
        torch.nn.Module.__init__(wrapped)
        wrapped.module = torch.nn.Linear(1, 1)
        assert unwrap_model(wrapped) is wrapped.module

        for _ in range(2):
            uninstall()
            assert not installed()
            after = snapshot()
            changed = [k for k in before if after[k] is not before[k]
                       and not (type(before[k]) is tuple and after[k] == before[k])]
            assert not changed, changed
            assert holders(ours) == []
            assert stranger.FSDP is original is kept[0] and late.FSDP is ours
            assert unwrap(None) == (int, original)
            assert set(vars(stranger)) == set(vars(types.ModuleType("new"))) | {"FSDP"}
            assert dict(vars(DistributedOptimizer)) == methods
        install()
        assert holders(ours) == places["class"], "it can be installed again"
    """,
    "a second install reaches what was bound in between": """
        from megatron_fsdp_adapter import install
        from megatron_fsdp_adapter.megatron.compat.patches import original_of
        install()
        kept = [original_of(sys.modules[FSDP + ".mcore_fsdp_adapter"], "FullyShardedDataParallel")]
        for name in ("megatron.late", "verl.late"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].FSDP = kept[0]
        install()
        from megatron_fsdp_adapter import FullyShardedDataParallel as ours
        assert sys.modules["verl.late"].FSDP is sys.modules["megatron.late"].FSDP is ours
        assert holders(kept[0]) == []
    """,
    "a Megatron without the engine keeps its names": """
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.startswith(ENGINE + ".uneven_dtensor"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Absent())
        from megatron_fsdp_adapter.megatron.compat.patches import Patch, missing, place
        from megatron_fsdp_adapter.megatron.compat.table import NAMES
        absent = [patch.path for patch in NAMES if place(patch) is None]
        assert ENGINE + ".uneven_dtensor.preprocess_state_dict_for_uneven_dtensor" in absent
        assert missing([Patch(ENGINE + ".uneven_dtensor", "x", len)]) == [
            ENGINE + ".uneven_dtensor.x"]
        assert missing(NAMES) == []
    """,
    # A release that renamed methods of its optimizer; nothing is changed then.
    "another Megatron core is told what it lacks": """
        from megatron.core.distributed import FullyShardedDataParallel as original
        from megatron.core.optimizer.optimizer import MegatronOptimizer
        for name in ("get_main_grads_for_grad_norm", "get_grads_for_grad_norm", "count_zeros"):
            if hasattr(MegatronOptimizer, name):
                delattr(MegatronOptimizer, name)
        from megatron_fsdp_adapter import install
        from megatron_fsdp_adapter.megatron.compat.table import installed
        try:
            install()
        except RuntimeError as error:
            for name in ("0.16.1", "DistributedOptimizer.get_grads_for_grad_norm",
                         "DistributedOptimizer.count_zeros"):
                assert name in str(error), error
        else:
            raise AssertionError("names that are replaced may not be absent")
        assert not installed() and len(holders(original)) >= 3
    """,
    # Something holds the class where no module has a name for it.
    "Megatrons own wrapper cannot be constructed meanwhile": """
        import torch
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed import FullyShardedDataParallel
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter
        kept = [getattr(mcore_fsdp_adapter, "FullyShardedDataParallelV1", FullyShardedDataParallel)]
        if hasattr(mcore_fsdp_adapter, "FullyShardedDataParallelV2"):  # from 0.20 on
            kept.append(mcore_fsdp_adapter.FullyShardedDataParallelV2)
        constructors = [cls.__init__ for cls in kept]
        from megatron_fsdp_adapter import install, uninstall
        for _ in range(2):
            install()
        for cls in kept:
            try:
                cls(None, DistributedDataParallelConfig(), torch.nn.Linear(1, 1))
            except RuntimeError as error:
                assert "while megatron_fsdp_adapter is installed" in str(error)
            else:
                raise AssertionError("it was constructed")
        uninstall()
        assert kept[0] in vars(mcore_fsdp_adapter).values()
        assert [cls.__init__ for cls in kept] == constructors
    """,
    "importing submodules does not hide the functions": """
        import megatron_fsdp_adapter.launch.installation
        import megatron_fsdp_adapter.megatron.wrapper.adapter
        from megatron_fsdp_adapter import install, uninstall, FullyShardedDataParallel
        install()
        uninstall()
    """,
}
"""What is run in a process of its own."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, start: Start) -> Mapping[str, Callable[[], None]]:
    """Of the cases that were chosen, all at the same time."""
    chosen = []
    for item in request.session.items:
        if item.path == Path(__file__):
            chosen.append(item.callspec.params.get("case"))
    return {name: start(name, BODIES[name]) for name in chosen if name in BODIES}


@pytest.mark.parametrize("case", BODIES)
def test_names_are_replaced_and_restored(
    outcomes: Mapping[str, Callable[[], None]], case: str
) -> None:
    outcomes[case]()


@pytest.mark.parametrize("order", ["install first", "install last"])
def test_megatron_lm_training_modules(megatron_lm: Path, start: Start, order: str) -> None:
    body = f"""
        order = {order!r}
        from megatron_fsdp_adapter import install, uninstall
        if order == "install first":
            install()
        import megatron.training.training as training
        import megatron.training.checkpointing as checkpointing
        wrappers = ["FullyShardedDataParallel", "FullyShardedDataParallelV1"]  # from 0.20 on
        if hasattr(training, "megatron_FSDP"):
            wrappers = ["megatron_FSDP"]
        if order == "install last":
            for wrapper in wrappers:
                assert "megatron_fsdp_adapter" not in getattr(training, wrapper).__module__
            install()
        from megatron_fsdp_adapter import FullyShardedDataParallel as ours
        from megatron_fsdp_adapter.megatron.checkpoint import megatron_names
        for wrapper in wrappers:
            assert getattr(training, wrapper) is ours
        name = "preprocess_state_dict_for_uneven_dtensor"
        assert getattr(checkpointing, name) is getattr(megatron_names, name)
        for wrapper in wrappers:
            assert "megatron.training.training." + wrapper in holders(ours)
        uninstall()
        assert holders(ours) == []
        for wrapper in wrappers:
            assert getattr(training, wrapper).__module__ == FSDP + ".mcore_fsdp_adapter"
        assert getattr(checkpointing, name).__module__ == ENGINE + ".uneven_dtensor"
    """
    start(order, body, str(megatron_lm))()
