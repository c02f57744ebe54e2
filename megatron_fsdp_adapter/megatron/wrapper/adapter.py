"""`FullyShardedDataParallel`: what Megatron sees. It mirrors `DistributedDataParallel`.

    FullyShardedDataParallel (W) -> ShardedModule (I) -> Float16Module -> GPTModel

There are two wrapper levels because Megatron's checkpoint code unwraps W but not I, and builds its
keys on that depth. The engine does everything that happens to parameters. `units.py` and
`domains.py` decide the unit and the domain of each parameter, and `param_attributes.py` sets what
Megatron reads on it. This file forwards Megatron's calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn

from ...build.description import describe
from ...build.grad_sync import GradSync
from ...build.guards import check_trained, refuse_conversions
from ...core.config import MixedPrecisionPolicy
from ...graphs.full_iteration import FullIterationGraphs
from ...rollout.export_source import Source
from ...rollout.release import trim
from ...state.not_copyable import refuse_compilation
from ...state.sharded_state_dict import register_state_dict_hooks
from ..compat.table import install_beside_a_wrapper
from ..inner_module import ShardedModule
from ..layers import schedule_plans
from ..layers.layer_graphs import layer_graphs
from .construction import Arguments, build, checked_index, force_options
from .domains import SHARED_EMBEDDING
from .export_adapter import export_source
from .no_sync_check import NoSyncCheck
from .param_attributes import mark


class FullyShardedDataParallel(GradSync, _BaseDataParallel):
    """Shards a model's weights, gradients and optimizer state over its data-parallel ranks.

    Args:
        config: the model's `TransformerConfig`.
        ddp_config: `DistributedDataParallelConfig`. Overlaps that the strategy needs, and
            `use_distributed_optimizer`, are switched on in it: Megatron reads them there.
        module: the model, on its device; usually `Float16Module(GPTModel)`. With the config's
            `init_model_with_meta_device` any part of it may be on the meta device.
        fsdp_unit_modules: module classes, their names or import paths, to gather and reduce as
            units; by default the transformer layers, and embedding and output layer unless tied.
        disable_bucketing: accepted for Megatron; units take the place of buckets.
        device: the device of the flat buffers; by default the parameters', or this process's GPU
            if all of them are on the meta device.
        pg_collection: process groups; by default those of `parallel_state`.
        module_placements: by patterns of module names, what is sharded ("shard", the default)
            or, if frozen, left as it is ("leave"); later patterns win.

    Raises:
        ValueError: an unsupported option (all are listed at once), a unit class that matches
            nothing, no trainable parameter, groups that are missing or disagree, modules on the
            meta device that cannot be initialized, ranks whose models differ.
        CommunicationError, RuntimeError: another rank failed or is late; unsupported megatron-core.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        fsdp_unit_modules: list[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: Any | None = None,
        module_placements: Mapping[str, str] | None = None,
    ) -> None:
        given = Arguments(
            config=config,
            ddp_config=ddp_config,
            module=module,
            unit_classes=fsdp_unit_modules,
            given_device=device,
            pg_collection=pg_collection,
            module_placements=module_placements or {},
        )
        index = checked_index(given)
        super().__init__(config=config, module=module)
        self.device = given.device
        self.ddp_config = ddp_config
        self.megatron_fsdp_dist_index = index
        installed = install_beside_a_wrapper()
        self.disable_bucketing = disable_bucketing
        self.bucket_size = None  # Megatron reads it
        self.optimizer_groups: Mapping[str, Any] | None = None  # core's, when it makes an optimizer
        self.muon_groups: Mapping[tuple[int, ...], Any] | None = None  # made with the optimizer
        # Not `pg_collection`: Megatron takes an attribute of that name for the model's.
        self.process_groups = pg_collection
        self.tp_group = index.tp_group
        self.force_all_reduce = False
        self.engine, plan, buffer = build(given, index)
        self.fsdp_unit_modules = list(plan.classes)
        if getattr(config, schedule_plans.OPTION, False):  # core runs parts of layers
            schedule_plans.watch_plans(module, self.engine, weakref.WeakMethod(self._before_pass))
        self.captures = FullIterationGraphs(self.engine)
        self._layers = layer_graphs(self.engine, module, config)
        # Read before `force_options` below changes it: the loop acts on the value that it set.
        self._wiring = NoSyncCheck(bool(ddp_config.overlap_grad_reduce) and installed)
        text = force_options(given, self.engine, plan)
        self.module = ShardedModule(config, module, self.engine)
        self.param_and_grad_buffer = buffer
        self.module.param_and_grad_buffer = buffer
        for pair in self.engine.pairs:
            mark(pair, self.engine)
        # RNG states are left alone: nothing here draws numbers, so they are as the caller seeded
        # them. Copying the first tensor-parallel rank's to the others, as is done elsewhere after
        # materializing weights, would give all of them the same dropout in what they split.
        register_state_dict_hooks(self.module, self.engine)
        refuse_conversions(self, self.engine)
        if dist.get_rank() == 0:
            print(text, flush=True)

    def describe(self) -> str:
        """A table of the domains and of every parameter with the domain that it belongs to."""
        return describe(self.engine)

    def export_source(self) -> Source:
        """The source that `export_weights` reads."""
        index = self.megatron_fsdp_dist_index
        return export_source(self.module.module, self.engine, index, self.process_groups)

    # What Megatron's schedules and training loop call.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module on gathered weights. RuntimeError under torch.compile."""
        refuse_compilation()
        self._before_pass()
        with self._layers.forward_pass(self.training) if self._layers else nullcontext():
            output = self.module(*inputs, **kwargs)
        self.captures.after_forward()
        return output

    def _before_pass(self) -> None:
        """Notes that a forward begins, by a call of this module or of parts of it."""
        self._wiring.on_forward(self.config, self.training and not self.engine.auto_sync)
        self.captures.before_forward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for all microbatches but the last; see `GradSync.no_sync`."""
        self._wiring.on_no_sync()
        with super().no_sync():
            yield

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Makes weights current for the next forward.

        With overlap only the first unit's gather is launched. `force_sync` gathers all weights, and
        the current stream waits for them. Once a training step is captured in a graph, only
        `force_sync` has an effect: the graph itself gathers."""
        if self.captures.captured and not force_sync:
            return
        self.engine.sync_weights(wait=force_sync)

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts the reductions that no backward has started."""
        self.engine.reduce_grads()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Completes all reductions and attaches `.grad`; modules then hold the sharded parameters.

        A shared embedding's gradient is also put into `main_grad`. Core adds it up over the stages
        in place, and replaces the DTensor that it found by the plain local tensor: `main_grad`
        takes that, `grad` does not.

        Raises:
            ValueError: `force_all_reduce`, unless gradients are replicated anyway.
            RuntimeError: a parameter's `requires_grad` is not what it was when it was wrapped.
        """
        sharding = [row.name for row in self.engine.config.strategies if row.shard_main]
        if force_all_reduce and sharding:
            raise ValueError(
                "force_all_reduce=True: full gradients do not exist with "
                f"data_parallel_sharding_strategy={sharding[0]!r}. Use "
                "'no_shard', or gather the gradients of the parameters you need"
            )
        check_trained(self.engine)
        self.engine.finish_grads()
        self.captures.gradients_finished()
        if self._layers is not None:
            self._layers.step_done()
        for param in self._shared_embeddings():
            param.main_grad = param.grad  # type: ignore[attr-defined]

    def _shared_embeddings(self) -> list[nn.Parameter]:
        return [
            pair.sharded for pair in self.engine.pairs if pair.group.key.domain == SHARED_EMBEDDING
        ]

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies the gradients that the optimizer will read; a number or 1-element tensor."""
        self.engine.scale_grads(scaling_factor)

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes of main weights and gradients; Megatron's wrapper has them under this name."""
        return self.engine.config.policy

    def zero_grad_buffer(self) -> None:
        """Forgets all gradients. Idempotent. Also recovers from a pass that raised. Once a training
        step is captured in a graph gradients stay: a replay overwrites them."""
        self._wiring.on_zero_grads()
        if self._layers is not None:
            self._layers.reset()
        if self.captures.keeps_gradients():
            return
        self.engine.zero_grads()
        for param in self._shared_embeddings():
            param.main_grad = None  # type: ignore[attr-defined]

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Forgets gradients and gives their buffers back; forwards without gradients still work.
        Core's reinforcement learning calls this before generation."""
        self.param_and_grad_buffer.offload_to_cpu(move_params=False)
        if empty_cache:
            trim(self.engine.runtime)

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Takes the buffers of gradients back."""
        self.param_and_grad_buffer.reload_from_cpu(move_params=False)

    def broadcast_params(self) -> None:
        """Does nothing: weights were broadcast from rank 0 of their data-parallel group before they
        were sharded. Afterwards that is no longer possible."""

    def synchronize_param_gather(self) -> None:
        """Leaves no gather pending; afterwards modules hold the sharded parameters."""
        self.engine.to_sharded()

    def stop_communication(self) -> None:
        """Waits for all communication; afterwards modules hold the sharded parameters. Gradients
        that were already consumed are not reduced again."""
        self.engine.runtime.synchronize()
        self.engine.to_sharded()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        """Loads what `state_dict` returned; see `ShardedModule.load_state_dict`."""
        self.module.load_state_dict(state_dict, strict=strict)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state dict under the names of the whole model; see `checkpoint.names`."""
        return self.module.state_dict_for_save_checkpoint(prefix, keep_vars)

    def checkpoint_keys(self) -> frozenset[str]:
        """The keys of `state_dict_for_save_checkpoint`."""
        return self.module.checkpoint_keys()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Only for `torch_dist`: raises RuntimeError."""
        return self.module.sharded_state_dict(*args, **kwargs)
