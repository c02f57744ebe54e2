"""In the place of functions of Megatron-LM's training loop (`compat/table.py`). Without
`--fsdp-elastic` they call the original."""

from __future__ import annotations

import inspect
from typing import Any

from ..compat.patches import Original
from ..options.table import REPLICAS
from .data import movable
from .manager import is_asked, manager_of
from .run import ElasticRun, LoopMoved

_runs: list[ElasticRun] = []
"""The run of this process, once it has an optimizer."""


def _args() -> Any:
    from megatron.training import get_args

    return get_args()


def get_train_valid_test_num_samples(original: Original, *given: Any, **named: Any) -> Any:
    """The samples that datasets must have. Those of training are of all replicas."""
    sizes = original(*given, **named)
    if not is_asked():
        return sizes
    return (sizes[0] * getattr(_args(), REPLICAS), *sizes[1:])


def setup_model_and_optimizer(original: Original, *given: Any, **named: Any) -> Any:
    """Megatron-LM's model, optimizer and scheduler, of which other replicas get the state."""
    made = original(*given, **named)
    if is_asked():
        model, optimizer, scheduler = made
        manager = manager_of(model[0].ddp_config, model[0].device)
        _runs[:] = [ElasticRun(manager, _args(), model, optimizer, scheduler)]
    return made


def build_train_valid_test_data_loaders(original: Original, *given: Any, **named: Any) -> Any:
    """Megatron-LM's loaders, of which those for training and evaluations can go on elsewhere. It
    makes them for each chunk of an interleaved pipeline."""
    training, evaluation, test = original(*given, **named)
    if not _runs:
        return training, evaluation, test
    [run] = _runs
    training = movable(training)
    if training is not None:
        run.training.append(training)
    if _args().full_validation or evaluation is None:
        return training, evaluation, test
    evaluation = [movable(loader) for loader in evaluation]
    run.evaluation += [loader for loader in evaluation if loader is not None]
    return training, evaluation, test


def train(original: Original, *given: Any, **named: Any) -> Any:
    """Megatron-LM's loop, which begins again where the state of another replica is."""
    if not _runs:
        return original(*given, **named)
    [run] = _runs
    config = inspect.signature(original).bind(*given, **named).arguments["config"]
    try:
        while True:
            try:
                return original(*given, **named)
            except LoopMoved:
                _forget_beginning(config)
    finally:
        # Others need not wait for this replica.
        run.manager.shutdown(wait=False)


def _forget_beginning(config: Any) -> None:
    """Takes back what the beginning of Megatron-LM's loop has set, and asserts to be unset."""
    from megatron.training import get_timers

    config.no_sync_func = None
    get_timers()("interval-time").stop()


def train_step(original: Original, *given: Any, **named: Any) -> Any:
    """A step that is repeated until all replicas of a quorum can take it."""
    if not _runs:
        return original(*given, **named)
    return _runs[0].take_step(lambda: original(*given, **named))


def save_checkpoint_and_time(original: Original, *given: Any, **named: Any) -> Any:
    """Saves a checkpoint, if this replica is the one that saves."""
    if not _runs or _runs[0].saves:
        return original(*given, **named)
    return None
