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
from functools import partial
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
from ..layers.te_captures import telling_te_of_an_iteration
from .announcement import announcement
from .construction import Arguments, build, checked_index, force_options
from .domains import SHARED_EMBEDDING
from .export_adapter import export_source
from .no_sync_check import NoSyncCheck
from .param_attributes import mark


class FullyShardedDataParallel(GradSync, _BaseDataParallel):
    """Shards weights, gradients and optimizer state of a Megatron model over data-parallel ranks.

    It takes the place of Megatron's `DistributedDataParallel`, with the same methods.

    Examples:
        >>> ddp_config = DistributedDataParallelConfig(
        ...     use_megatron_fsdp=True,
        ...     use_distributed_optimizer=True,
        ...     data_parallel_sharding_strategy="optim_grads_params",
        ... )
        >>> model = FullyShardedDataParallel(gpt.config, ddp_config, gpt)  # gpt: a GPTModel
        >>> weight = gpt.decoder.layers[0].mlp.linear_fc1.weight
        >>> isinstance(weight, torch.distributed.tensor.DTensor), weight.shape
        (True, torch.Size([20, 12]))

    Args:
        config: the model's `TransformerConfig`.
        ddp_config: a `DistributedDataParallelConfig`. It is changed: overlaps that the strategy
            needs, and `use_distributed_optimizer`, become True, because Megatron reads them there.
        module: the model on its device, for example `Float16Module(GPTModel(...))`. With
            `init_model_with_meta_device` in the config, parts of it may be on the meta device.
        fsdp_unit_modules: module classes, or their names or import paths. Each instance is a unit,
            which is gathered and reduced at once. By default they are transformer layers and,
            unless tied, the embedding and the output layer.
        disable_bucketing: has no effect. Megatron passes it.
        device: the device of the flat buffers. By default it is that of the parameters, or the GPU
            of this process if all of them are on the meta device.
        pg_collection: process groups, by default those of `parallel_state`.
        module_placements: a mapping from patterns of module names to "shard" (the default) or, for
            frozen modules, "leave", which does not shard them. Later patterns win.

    Raises:
        ValueError: unsupported options, which one message lists; a unit class without an instance;
            no trainable parameter; missing or contradictory groups; modules on the meta device that
            cannot be initialized; or models that differ between ranks.
        CommunicationError: another rank failed, or is late.
        RuntimeError: this release of megatron-core is not supported.
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
        around = partial(telling_te_of_an_iteration, module, config)
        self.captures = FullIterationGraphs(self.engine, around=around)
        self._layers = layer_graphs(self.engine, module, config)
        # Read before `force_options` below changes it: the loop acts on the value that it set.
        self._wiring = NoSyncCheck(bool(ddp_config.overlap_grad_reduce) and installed)
        forced = force_options(given, self.engine)
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
            print(announcement(plan, self.engine.groups, config, forced), flush=True)

    def describe(self) -> str:
        """Returns a table of the groups of ranks, and of all parameters with their group."""
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
        """Returns a context for all microbatches of a step but the last. In it, ZeRO-0 and ZeRO-1
        add up gradients and send nothing; ZeRO-2 and ZeRO-3 reduce those of every microbatch."""
        self._wiring.on_no_sync()
        with super().no_sync():
            yield

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Brings the weights up to date for the next forward.

        With overlap, it starts the gather of the first unit only. With `force_sync` it gathers all
        weights, and the current stream waits for them. Once a step is captured in a CUDA graph,
        which gathers by itself, a call without `force_sync` does nothing."""
        if self.captures.captured and not force_sync:
            return
        self.engine.sync_weights(wait=force_sync)

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts the reductions that no backward has started."""
        self.engine.reduce_grads()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Waits for all reductions, and sets `.grad`. Modules then have their sharded parameters.

        An embedding that pipeline stages share also gets `main_grad`, in which core adds up the
        gradients of the stages.

        Args:
            force_all_reduce: Megatron's request for full gradients, which sharding does not have.

        Raises:
            ValueError: `force_all_reduce=True` while gradients are sharded.
            RuntimeError: `requires_grad` of a parameter has changed since it was wrapped.
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
        """Multiplies all gradients by a number, or by a tensor of one element."""
        self.engine.scale_grads(scaling_factor)

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes of main weights and gradients; Megatron's wrapper has them under this name."""
        return self.engine.config.policy

    def zero_grad_buffer(self) -> None:
        """Deletes all gradients. After a forward or backward that raised an error, this also makes
        the wrapper usable again. Once a step is captured in a CUDA graph gradients stay, because a
        replay overwrites them."""
        self._wiring.on_zero_grads()
        if self._layers is not None:
            self._layers.reset()
        if self.captures.keeps_gradients():
            return
        self.engine.zero_grads()
        for param in self._shared_embeddings():
            param.main_grad = None  # type: ignore[attr-defined]

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Deletes gradients and frees their buffers. Forwards without gradients still work.
        Megatron's reinforcement learning calls this before it generates."""
        self.param_and_grad_buffer.offload_to_cpu(move_params=False)
        if empty_cache:
            trim(self.engine.runtime)

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Allocates the buffers of gradients again, after `offload_grad_buffers`."""
        self.param_and_grad_buffer.reload_from_cpu(move_params=False)

    def broadcast_params(self) -> None:
        """Does nothing. The constructor has sent the weights of the first data-parallel rank to the
        others, before it sharded them."""

    def synchronize_param_gather(self) -> None:
        """Leaves no gather pending; afterwards modules hold the sharded parameters."""
        self.engine.to_sharded()

    def stop_communication(self) -> None:
        """Waits for all communication. Modules then have their sharded parameters. Gradients that
        the optimizer has used are not reduced again."""
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
