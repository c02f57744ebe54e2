"""The steps of Megatron-LM's loop in one of several replicas that may die and come back.

A step of the loop is one that all replicas of a quorum have taken: an attempt that fails is
repeated with the next quorum, with the samples that follow in the list. So Megatron-LM's
`iteration` is always torchft's step. A replica that joins, or that was left behind, takes over the
state of another one; the loop then begins again at the iteration of that state.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

import megatron_fsdp_adapter

from ...core.comm.managed import ReplicaRefused, raise_refusal
from ...elastic.facts import Facts, facts_of, set_own_facts
from ...elastic.state import ReplicaState
from ..inner_module import ours_among
from .data import MovableLoader, StepStart
from .handed_over import Counts, Generators, Schedule, code_of, shared_arguments
from .limit import ReductionLimit

NAME = "megatron_fsdp_adapter"


class LoopMoved(Exception):
    """The state of another replica has arrived, which is at another iteration than the loop."""


class ElasticRun:
    """The steps of one rank of a replica.

    Args:
        manager: torchft's.
        args: Megatron-LM's, in which its loop counts.
        chunks: of the model.
    """

    def __init__(
        self,
        manager: Any,
        args: Any,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
    ) -> None:
        self.manager = manager  # torchft's
        self.saves = True  # whether this replica writes checkpoints
        self.training: list[MovableLoader] = []  # load this rank's training data, for each chunk
        self.evaluation: list[MovableLoader] = []  # and that of evaluations
        self._args = args  # Megatron-LM's, whose counts the loop changes
        self._engines = [chunk.engine for chunk in ours_among(chunks)]
        self._generators = Generators()
        self._drawn: dict[str, Any] = {}  # its states as the attempt began
        self._is_begun = False  # whether the quorum of the next attempt is known
        self._committed: bool | None = None  # the attempt; None if it was not asked for
        self._has_stepped = False  # whether this process has committed a step
        self._quorums = 0  # of those that torchft's group had, how many are known
        self._next: StepStart | None = None  # where loaders are; None if they must be moved
        # How long replicas wait for each other, at most as long as ranks of one job do.
        self._limit = ReductionLimit(60.0 * args.distributed_timeout_minutes)
        inner = inner_optimizer(optimizer)
        self._facts = self._facts_of(inner)
        others: dict[str, Any] = {
            "counts": Counts(args),
            "schedule": Schedule(scheduler),
            "generators": self._generators,
        }
        if getattr(optimizer, "grad_scaler", None) is not None:
            others["loss scale"] = optimizer.grad_scaler
        self._show_shards()
        self._state = ReplicaState(chunks, inner, others, self._facts)
        set_own_facts(self._facts)
        manager.register_state_dict_fn(NAME, self._take_over, self._state.state_dict)
        manager.load_state_dict({"step": args.iteration, "batches_committed": 0})
        self._step_optimizer = optimizer.step
        optimizer.step = self._step_if_all_can

    def _facts_of(self, inner: torch.optim.Optimizer) -> Facts:
        facts = facts_of(self._engines, inner)
        facts["megatron-core"] = megatron.core.__version__
        facts["code"] = code_of(megatron_fsdp_adapter, megatron.core)
        facts.update(shared_arguments(self._args))
        return facts

    # A step.

    def take_step(self, attempt: Callable[[], Any]) -> Any:
        """Runs `attempt`, Megatron-LM's step, until all replicas of a quorum can take it. Returns
        what it returned then.

        Raises:
            LoopMoved: this replica has another iteration's state now. `args.iteration` is right.
            ReplicaRefused: it differs from the others.
        """
        args = self._args
        while True:
            if not self._is_begun:
                self._begin()
            if self.manager.current_step() != args.curr_iteration:
                args.iteration = self.manager.current_step()
                raise LoopMoved
            self._is_begun = False
            get_rerun_state_machine().current_iteration = args.curr_iteration
            place = self._move_training()
            self._committed = None
            begin = time.monotonic()
            result = attempt()
            if self._committed:
                self._limit.committed(time.monotonic() - begin)
                self._has_stepped = True
                samples = self._samples_of_replica()
                self._next = place._replace(consumed=place.consumed + samples * place.replicas)
                # The loop adds those of one replica.
                args.consumed_train_samples += samples * (place.replicas - 1)
            if self._committed is not False:
                return result
            self._next = None
            self._limit.failed()
            error = self.manager.errored()
            reason = "a rank has failed" if error is None else error.original_exception
            self._say(f"iteration {args.curr_iteration + 1} is repeated: {reason}")
            self._draw_again()

    def _begin(self) -> None:
        """Asks for a quorum for the next attempt. Takes over the state of one, if this one is
        behind."""
        self._show_shards()
        self._state.take_snapshot()
        self._drawn = self._generators.state_dict()
        # With gloo it holds from the next change of the quorum on, which each failure brings.
        self.manager._pg.set_timeout(timedelta(seconds=self._limit.seconds))
        self.manager.start_quorum()
        raise_refusal(self.manager)
        self._is_begun = True
        self.saves = self.manager.participating_rank() == 0
        if self.manager._pg.quorums != self._quorums:
            self._quorums = self.manager._pg.quorums
            self._greet()

    def _greet(self) -> None:
        """Prints the number of replicas of the new quorum, and compares facts with them."""
        number, count = self.manager.participating_rank(), self.manager.num_participants()
        step = self.manager.current_step()
        self._say(f"{count} replicas take part from iteration {step + 1} on, this is {number}")
        if count > 1:
            self._compare_facts()

    def _compare_facts(self) -> None:
        """Compares a digest of facts with its mean. A replica that joins in the same step receives
        no state, with whose facts it would be compared by name.

        ReplicaRefused if this replica has not taken a step yet. One that has leaves the step out:
        the other one differs."""
        device = self._engines[0].runtime.device
        digest = hashlib.blake2b(repr(sorted(self._facts.items())).encode(), digest_size=16)
        own = torch.tensor(list(digest.digest()), dtype=torch.float64, device=device)
        mean = own.clone()
        self.manager.allreduce(mean).wait()
        if self.manager.errored() is not None or torch.equal(mean, own):
            return
        error = ReplicaRefused(
            f"fsdp_elastic={self._args.fsdp_elastic}: replicas differ, and none of them has a "
            "state to compare. Start all replicas with the same model, options and versions"
        )
        if not self._has_stepped:
            raise error
        self.manager.report_error(RuntimeError("a replica differs from this one"))

    def _step_if_all_can(self) -> Any:
        """The optimizer's step, if all ranks of this replica have gradients of the whole step."""
        raise_refusal(self.manager)
        self._committed = self.manager.should_commit()
        if not self._committed:
            return False, None, None
        return self._step_optimizer()

    # Data.

    def _samples_of_replica(self) -> int:
        args = self._args
        return int(get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)

    def _move_training(self) -> StepStart:
        """Moves the loaders, if the next batch is not where it is. Returns where that is."""
        consumed = self._args.consumed_train_samples
        number = self.manager.participating_rank()
        place = StepStart(consumed, number, self.manager.num_participants())
        if place != self._next:
            for loader in self.training:
                loader.move(place)
        return place

    def _move_evaluation(self) -> None:
        for loader in self.evaluation:
            loader.move(StepStart(self._args.consumed_valid_samples, 0, 1))

    # State.

    def _show_shards(self) -> None:
        for engine in self._engines:
            engine.to_sharded()

    def _take_over(self, state: Any) -> None:
        """Takes over the state of the same rank of another replica."""
        self._state.load_state_dict(state)
        for engine in self._engines:
            engine.main_weights_changed(loaded=True)
        self._drawn = self._generators.state_dict()
        self._next = None
        self._move_evaluation()

    def _draw_again(self) -> None:
        """Sets generators of random numbers as they were when the attempt began."""
        self._state.restore_random_states()
        self._generators.load_state_dict(self._drawn)

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"elastic: {text}", flush=True)


def inner_optimizer(optimizer: Any) -> Any:
    """torch's or TE's optimizer in Megatron's, which must be one. ValueError if it is not."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(chained) != 1:
        raise ValueError(
            f"fsdp_elastic with {len(chained)} optimizers: torchft agrees on one step at a time. "
            "Use one optimizer for all parameters"
        )
    return chained[0].optimizer
