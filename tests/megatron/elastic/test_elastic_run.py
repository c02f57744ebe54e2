"""Steps of Megatron-LM's loop in a replica that may die, with a stand-in for torchft's manager.
Megatron-LM itself, under torchft: tests/integration/test_elastic_lm.py."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.utils.data import DataLoader

from megatron_fsdp_adapter.core.comm.managed import ReplicaRefused
from megatron_fsdp_adapter.megatron.elastic import loop, manager, run
from megatron_fsdp_adapter.megatron.elastic.data import MovableLoader, StepStart
from megatron_fsdp_adapter.megatron.elastic.handed_over import shared_arguments
from megatron_fsdp_adapter.megatron.elastic.limit import ReductionLimit
from megatron_fsdp_adapter.megatron.elastic.run import ElasticRun, LoopMoved
from tests.lib.elastic.planned import Attempt, PlannedManager
from tests.lib.gpt.gpt import Trainer, build_trainer, forward_backward
from tests.lib.gpt.one_layer import CASE, DEVICE, data

CHECKS = (
    "megatron/elastic/data.py",
    "megatron/elastic/handed_over.py",
    "megatron/elastic/limit.py",
    "megatron/elastic/loop.py",
    "megatron/elastic/manager.py",
    "megatron/elastic/run.py",
)

ALONE = Attempt([0])
FAILS = Attempt([0], fails=True)
BATCH = 6
"""Samples of a step of one replica."""


class Scheduler:
    """A scheduler, as core's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.num_steps)


class Moves:
    """A loader that notes where it is moved."""

    def __init__(self) -> None:
        self.places: list[StepStart] = []

    def move(self, place: StepStart) -> None:
        self.places.append(place)


class Replica:
    """A model that is trained by steps of an `ElasticRun`."""

    def __init__(self, plan: Sequence[Attempt], iteration: int = 0) -> None:
        self.manager = PlannedManager(dist.group.WORLD, 0, plan)
        manager._managers[:] = [self.manager]
        self.trainer = build_trainer(
            CASE, "optim_grads_params", DEVICE, ddp={"fsdp_elastic": "host:1"}
        )
        self.args = SimpleNamespace(
            iteration=iteration,
            curr_iteration=iteration,
            consumed_train_samples=0,
            consumed_valid_samples=0,
            micro_batch_size=CASE.batch,
            data_parallel_size=1,
            seed=1,
            fsdp_elastic="host:1",
            distributed_timeout_minutes=1,
        )
        self.scheduler = Scheduler(self.trainer.optimizer)
        self.run = ElasticRun(
            self.manager, self.args, self.trainer.chunks, self.trainer.optimizer, self.scheduler
        )
        self.loader = Moves()
        self.run.training = [self.loader]  # type: ignore[list-item]
        self.run.evaluation = [Moves()]  # type: ignore[list-item]
        self.drawn: list[float] = []  # a random number of each attempt

    def attempt(self) -> str:
        """As Megatron-LM's step."""
        self.drawn.append(torch.rand(()).item())
        with get_cuda_rng_tracker().fork():
            self.drawn.append(torch.rand(()).item())
        forward_backward(self.trainer, data(self.args.curr_iteration))
        updated, _, _ = self.trainer.optimizer.step()
        if updated:
            self.scheduler.step(BATCH)
        return f"loss of {self.args.curr_iteration}"

    def step(self) -> None:
        """As Megatron-LM's loop."""
        assert self.run.take_step(self.attempt) == f"loss of {self.args.curr_iteration}"
        self.args.curr_iteration += 1
        self.args.consumed_train_samples += BATCH


@pytest.fixture(autouse=True)
def asked(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command line with --fsdp-elastic, of three microbatches."""
    manager.ask(SimpleNamespace(fsdp_elastic="host:1", distributed_timeout_minutes=1))
    monkeypatch.setattr(run, "get_num_microbatches", lambda: BATCH // CASE.batch)
    machine = SimpleNamespace(current_iteration=0)
    monkeypatch.setattr(run, "get_rerun_state_machine", lambda: machine)
    yield
    manager.ask(SimpleNamespace())
    manager._managers.clear()
    loop._runs.clear()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return list(trainer.params().values())


def test_a_step_that_fails_is_repeated_with_its_samples_and_random_numbers() -> None:
    replica = Replica([ALONE, FAILS, ALONE, ALONE])
    for _ in range(3):
        replica.step()
    first, second, again, third = zip(*[iter(replica.drawn)] * 2, strict=True)
    assert second == again
    assert len({first, second, third}) == 3
    assert replica.loader.places == [StepStart(0, 0, 1), StepStart(BATCH, 0, 1)]  # else it goes on
    assert replica.args.consumed_train_samples == 3 * BATCH == replica.scheduler.num_steps
    plain = Replica([ALONE] * 3)
    for _ in range(3):
        plain.step()
    for mine, other in zip(weights(replica.trainer), weights(plain.trainer), strict=True):
        assert torch.equal(mine, other)


def test_replicas_wait_longer_after_each_failure_until_a_step_is_committed() -> None:
    replica = Replica([ALONE, FAILS, FAILS, FAILS, ALONE, ALONE])
    for _ in range(3):
        replica.step()
    assert replica.manager.limits == [20.0, 20.0, 40.0, 60.0, 60.0, 20.0]  # a minute at most


def test_replicas_wait_as_long_as_their_steps_ask_for() -> None:
    limit = ReductionLimit(600.0)
    found = []
    for took in (1.0, 50.0, 1.0):
        limit.committed(took)
        found.append(limit.seconds)
    assert found == [20.0, 100.0, 20.0]


def test_replicas_of_a_step_count_their_samples() -> None:
    replica = Replica([Attempt([0, 1], divisor=2), ALONE])
    replica.manager.allreduce = lambda tensor: Done()  # type: ignore[assignment,method-assign]
    replica.step()
    assert replica.args.consumed_train_samples == 2 * BATCH
    replica.step()
    assert replica.args.consumed_train_samples == 3 * BATCH
    assert replica.loader.places == [StepStart(0, 0, 2), StepStart(2 * BATCH, 0, 1)]


class Done:
    """A handle of a reduction that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def test_a_replica_that_joins_goes_on_where_the_other_is() -> None:
    replica = Replica([ALONE] * 4)
    for _ in range(2):
        replica.step()
    replica.args.consumed_valid_samples = 5
    replica.run._begin()
    state = pickle.dumps(replica.run._state.state_dict())
    joining = Replica([ALONE] * 2)
    torch.manual_seed(7)
    start = joining.manager.start_quorum

    def start_quorum() -> None:  # torchft's takes over the state in it
        start()
        joining.run._take_over(pickle.loads(state))
        joining.manager.load_state_dict({"step": 2})

    joining.manager.start_quorum = start_quorum  # type: ignore[assignment,method-assign]
    with pytest.raises(LoopMoved):
        joining.step()
    assert joining.args.iteration == 2
    assert joining.args.consumed_train_samples == 2 * BATCH == joining.scheduler.num_steps
    [evaluation] = joining.run.evaluation
    assert evaluation.places == [StepStart(5, 0, 1)]  # type: ignore[attr-defined]
    joining.args.curr_iteration = 2  # as the loop that begins again
    for one in (replica, joining):
        manager._managers[:] = [one.manager]
        one.run._draw_again()
        one.step()
    assert joining.drawn == replica.drawn[-2:]
    assert joining.loader.places == [StepStart(2 * BATCH, 0, 1)]
    for mine, other in zip(weights(joining.trainer), weights(replica.trainer), strict=True):
        assert torch.equal(mine, other)


def test_replicas_that_differ_and_have_one_step_are_refused() -> None:
    """One that has trained leaves the step out: the other one differs, and ends."""

    def differ(tensor: torch.Tensor) -> Done:
        if tensor.dtype == torch.float64:
            tensor += 1
        return Done()

    both = Attempt([0, 1])
    replica = Replica([ALONE, both, ALONE])
    replica.step()
    replica.manager.allreduce = differ  # type: ignore[assignment,method-assign]
    replica.step()
    assert len(replica.drawn) == 2 * 3  # the second step has two attempts
    joining = Replica([both])
    joining.manager.allreduce = differ  # type: ignore[assignment,method-assign]
    with pytest.raises(ReplicaRefused, match="fsdp_elastic=host:1: replicas differ"):
        joining.step()


def test_arguments_of_one_replica_are_not_compared() -> None:
    args = SimpleNamespace(lr=0.1, betas=[0.9, 1], save="a", rank=0, log_interval=1, made=object())
    assert shared_arguments(args) == {"--lr": "0.1", "--betas": "[0.9, 1]"}


class Sampler:
    """Batches of one rank, as Megatron-LM's `MegatronPretrainingSampler` makes them."""

    def __init__(self, rank: int, ranks: int, micro_batch_size: int = 2) -> None:
        self.consumed_samples = 0
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = rank
        self.micro_batch_times_data_parallel_size = micro_batch_size * ranks

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[list[int]]:
        mine = self.data_parallel_rank * self.micro_batch_size
        for begin in range(self.consumed_samples, 100, self.micro_batch_times_data_parallel_size):
            yield list(range(begin + mine, begin + mine + self.micro_batch_size))


def test_no_sample_is_lost_or_comes_twice_when_replicas_come_and_go() -> None:
    """Two ranks a replica, two microbatches a step; the second step is repeated."""
    loaders = {}
    for replica in range(3):
        for rank in range(2):
            batches = DataLoader(range(100), batch_sampler=Sampler(rank, 2))  # type: ignore[arg-type]
            loaders[replica, rank] = MovableLoader(batches)
    taken: list[int] = []
    drawn = torch.get_rng_state()
    for here, is_committed in (([0, 1, 2], True), ([0, 1, 2], False), ([2, 0], True), ([1], True)):
        found = []
        for number, replica in enumerate(here):
            for rank in range(2):
                loader = loaders[replica, rank]
                loader.move(StepStart(len(taken), number, len(here)))
                for _ in range(2):
                    found += next(loader).tolist()
        if is_committed:
            taken += found
    assert sorted(taken) == list(range(8 * (3 + 2 + 1)))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_each_chunk_of_an_interleaved_pipeline_has_loaders_that_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(full_validation=False)
    training = SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    replica = Replica([ALONE] * 2)
    loop._runs[:] = [replica.run]
    replica.run.training.clear()

    def loaders() -> list[Any]:
        return [DataLoader(range(100), batch_sampler=Sampler(0, 1)) for _ in range(2)]  # type: ignore[arg-type]

    made = []
    for _ in range(2):
        first, second = loaders()
        given = (first, [second], None)
        made.append(loop.build_train_valid_test_data_loaders(lambda loaders: loaders, given))
    replica.args.consumed_train_samples = 10
    replica.args.consumed_valid_samples = 20
    replica.step()
    replica.run._move_evaluation()
    for training_loader, [evaluation_loader], _ in made:
        assert next(training_loader).tolist() == [10, 11]
        assert next(evaluation_loader).tolist() == [20, 21]


def test_the_loop_begins_again_where_the_state_is(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica([])
    args = SimpleNamespace(fsdp_elastic_replicas=3, full_validation=False)
    stopped: list[str] = []
    timers = SimpleNamespace(stop=lambda: stopped.append("interval-time"))
    training = SimpleNamespace(get_args=lambda: args, get_timers=lambda: lambda name: timers)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    assert loop.get_train_valid_test_num_samples(lambda: (10, 4, 2)) == (30, 4, 2)
    loop._runs[:] = [replica.run]
    config = SimpleNamespace(no_sync_func=None)

    def loop_of_megatron(model: Any, config: Any) -> str:
        assert config.no_sync_func is None
        config.no_sync_func = "set"
        if not stopped:
            raise LoopMoved
        return "trained"

    assert loop.train(loop_of_megatron, "model", config=config) == "trained"
    assert replica.manager.calls == ["shutdown"]
    saved: list[int] = []
    for replica.run.saves in (True, False):
        loop.save_checkpoint_and_time(saved.append, 1)
    assert saved == [1]


def _without_runner(monkeypatch: pytest.MonkeyPatch) -> str:
    manager.ask(SimpleNamespace())
    return "only Megatron-LM's training loop"


def _without_torchft(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "torchft", None)
    return r"Install megatron-fsdp-adapter\[elastic\]"


@pytest.mark.parametrize("lacks", [_without_runner, _without_torchft])
def test_what_is_missing_is_said(
    lacks: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = lacks(monkeypatch)
    config = SimpleNamespace(fsdp_elastic="host:1")
    with pytest.raises(ValueError, match=f"fsdp_elastic='host:1': .*{expected}"):
        manager.manager_of(config, DEVICE)


def test_without_the_flag_nothing_is_replaced() -> None:
    manager.ask(SimpleNamespace())
    assert manager.manager_of(SimpleNamespace(), DEVICE) is None
    assert loop.train_step(lambda given: given, "step") == "step"
    assert loop.get_train_valid_test_num_samples(lambda: (1, 2, 3)) == (1, 2, 3)
    assert loop.setup_model_and_optimizer(lambda: "made") == "made"
    assert loop.build_train_valid_test_data_loaders(lambda: (1, [2], 3)) == (1, [2], 3)
    assert manager.address("host:1") == manager.address("http://host:1") == "http://host:1"
