"""Prints the host time of a unit: microseconds of processor time per step, without a GPU.

    PYTHONPATH=. python scripts/host_times.py --steps 40

It uses a fake world of two ranks, tiny layers and no-op streams, so that Python dominates, and
subtracts the time of the same layers without the engine.
`tests/core/engine/test_engine_scenarios.py` counts calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import HostRuntime
from tests.lib.engine.engine_cases import Rig, build
from tests.lib.engine.pretended import pretended_world
from tests.lib.engine.small_model import Setup, make_net, microbatch


def processor_time(step: Callable[[], None], steps: int) -> float:
    """Median seconds of this thread in a call of `step`, after two calls that do not count."""
    samples = []
    for _ in range(steps + 2):
        begin = time.thread_time()
        step()
        samples.append(time.thread_time() - begin)
    return statistics.median(samples[2:])


def unit_cost(strategy: str, layers: int, steps: int) -> float:
    """Seconds of a step per unit, beyond those of the same layers without an engine."""
    setup = Setup(strategy, layers=layers)
    bare = make_net(setup)
    with pretended_world(2):
        rig: Rig = build(setup, HostRuntime())
        engine = processor_time(rig.step, steps)
    without = processor_time(lambda: bare(microbatch(0)).float().sum().backward(), steps)
    return (engine - without) / len(rig.engine.units)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="default %(default)s")
    given = parser.parse_args(arguments)
    for strategy in STRATEGIES:
        print(f"{strategy:20} {1e6 * unit_cost(strategy, 16, given.steps):8.0f} us a unit")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
