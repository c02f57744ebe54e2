"""Which weights are Muon's, of which matrices they are made, and what is refused with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_fsdp_adapter.megatron.compat import core_api
from megatron_fsdp_adapter.megatron.optimizer.emerging import KINDS
from megatron_fsdp_adapter.megatron.optimizer.muon import FUSED, summary
from megatron_fsdp_adapter.megatron.optimizer.muon import updates as is_muons
from megatron_fsdp_adapter.optim.muon.matrices import row_blocks
from megatron_fsdp_adapter.optim.muon.newton_schulz import coefficients_of, orthogonalized
from megatron_fsdp_adapter.plan.memory import OPTIMIZER_STATE, Precision, group_bytes
from megatron_fsdp_adapter.tools.cli import precision_options
from tests.lib.gpt.gpt import (
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    optimizer_config,
    train_step,
)
from tests.lib.gpt.muon_reference import Reference

CHECKS = (
    "megatron/optimizer/muon.py",
    "megatron/optimizer/emerging.py",
    "megatron/optimizer/lion.py",
    "optim/muon/matrices.py",
)

MUON = {"optimizer": "muon"}
NESTEROV = next(
    name for name in ("muon_nesterov", "muon_use_nesterov") if hasattr(OptimizerConfig, name)
)
CASE = Case(swiglu=True)


def pairs_of(trainer: Trainer) -> dict[str, Any]:
    pairs = trainer.wrapper.engine.pairs
    return {pair.managed.fqns[0].removeprefix("module."): pair for pair in pairs}


def test_the_first_update_is_orthogonal_and_adam_has_the_rest(one_rank: torch.device) -> None:
    """A run that silently trains with Adam does not pass."""
    trainer = build_trainer(CASE.but(weight_decay=0.0), "optim", one_rank, optimizer=MUON)
    before = trainer.params()
    train_step(trainer, batches(CASE, 0, 0, one_rank))
    after = trainer.params()
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    for half in ((after[weight] - before[weight]) / CASE.lr).chunk(2):
        values = torch.linalg.svdvals(half / max(half.shape) ** 0.5)
        assert values.median() > 0.6, values
        assert values.max() < 1.4, values
    state = trainer.optimizer.optimizer.state
    for name, pair in pairs_of(trainer).items():
        if is_muons(pair):
            expected = {"momentum_buffer"}
        else:
            expected = {"step", "exp_avg", "exp_avg_sq"}
        assert set(state[pair.sharded]) == expected, name
    text = summary([trainer.wrapper], optimizer_config(CASE, **MUON))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    attention = "decoder.layers.*.self_attention"
    assert f"{attention}.linear_qkv.weight 2 Muon: 24 x 24, 24 x 24, 24 x 24" in rows
    assert "decoder.layers.*.mlp.linear_fc1.weight 2 Muon: 40 x 24, 40 x 24" in rows


@pytest.mark.parametrize("kind", ["muon", "lion"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_state_is_as_large_as_the_formula_says(
    one_rank: torch.device, strategy: str, kind: str
) -> None:
    """`estimate` goes by names, and comes to the same weights."""
    if kind != "muon" and not core_api.HAS_EMERGING_FUNCTION:
        pytest.skip("this core has no such optimizer, or makes it of all weights")
    trainer = build_trainer(CASE, strategy, one_rank, optimizer={"optimizer": kind})
    train_step(trainer, batches(CASE, 0, 0, one_rank))
    kept = trainer.optimizer.optimizer.state.values()
    values = []
    for state in kept:
        for name, value in state.items():
            if name != "step":
                values.append(value)
    found = sum(value._local_tensor.nbytes for value in values)
    groups = trainer.wrapper.engine.groups
    row = trainer.wrapper.engine.config.strategy
    moments = precision_options.MOMENTS[kind]
    decides = KINDS[kind].updates
    precision = Precision(moments=moments)
    expected = [group_bytes(g.layout, row, precision, 0)[OPTIMIZER_STATE] for g in groups]
    assert found == sum(expected)
    for pair in trainer.wrapper.engine.pairs:
        spec = pair.group.layout.specs[pair.index]
        assert moments[0](spec) == decides(pair), spec.fqns


def test_muon_and_state_in_host_memory_are_refused_by_the_formula() -> None:
    with pytest.raises(ValueError, match="'muon' .* with its state in host memory"):
        Precision(moments=precision_options.MOMENTS["muon"], offload=True)


def test_marks_and_classes_decide(one_rank: torch.device) -> None:
    """`use_muon=False`; learned positions, which core does not mark as an embedding."""

    def change(model: torch.nn.Module) -> None:
        model.decoder.layers[0].mlp.linear_fc2.weight.use_muon = False  # type: ignore[union-attr]

    case = CASE.but(positions="learned_absolute")
    trainer = build_trainer(case, "optim", one_rank, change, optimizer=MUON)
    found = {name for name, pair in pairs_of(trainer).items() if is_muons(pair)}
    layers = {name for name in pairs_of(trainer) if "layers" in name and name.endswith("weight")}
    fused = {name for name in layers if "norm" not in name}
    assert found == fused - {"decoder.layers.0.mlp.linear_fc2.weight"}
    of_muon = set()
    for group in trainer.optimizer.param_groups:
        if group.get("optimizer") == "muon":
            for param in group["params"]:
                of_muon.add(id(param))
    assert of_muon == {id(pairs_of(trainer)[name].sharded) for name in found}
    forward_backward(trainer, batches(case, 0, 0, one_rank))
    assert trainer.optimizer.step()[0]


def _root_of_ratio(rows: int, columns: int) -> float:
    return (rows / columns) ** 0.5


def _root_of_tall_ratio(rows: int, columns: int) -> float:
    return max(1, rows / columns) ** 0.5


def _part_of_root(rows: int, columns: int) -> float:
    return 0.2 * max(rows, columns) ** 0.5


HONORED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "momentum": ({"muon_momentum": 0.5}, {"momentum": 0.5}),
    "nesterov": ({NESTEROV: True}, {"nesterov": True}),
    "fewer steps": ({"muon_num_ns_steps": 2}, {"coefficients": coefficients_of("quintic", 2)}),
    "coefficients": (
        {"muon_coefficient_type": "simple"}, {"coefficients": coefficients_of("simple", 5)}),
    "unit_rms_norm": (
        {"muon_scale_mode": "unit_rms_norm"},
        {"scale": _root_of_ratio}),
    "shape_scaling": (
        {"muon_scale_mode": "shape_scaling"},
        {"scale": _root_of_tall_ratio}),
    "factor": (
        {"muon_extra_scale_factor": 0.2},
        {"scale": _part_of_root}),
    "QKV as one matrix": ({"muon_split_qkv": False}, {"splits_qkv": False}),
    "how the parts of tensor parallelism would be taken": ({"muon_tp_mode": "duplicated"}, {}),
}  # fmt: skip
"""Options of the config, and what they are to `Reference`."""


@pytest.mark.parametrize("name", HONORED)
def test_each_option_of_muon_is_honored(one_rank: torch.device, name: str) -> None:
    """Two steps, of which the second tells of momentum. What the option changes is far more than
    the bound; the last one changes nothing."""
    options, changed = HONORED[name]
    if not all(hasattr(OptimizerConfig, option) for option in options):
        pytest.skip(f"this core has no {list(options)}")
    case = CASE.but(clip=0.0, bias=False)
    exact = {**MUON, "muon_fp32_matmul_prec": "highest"}
    trainer = build_trainer(case, "optim", one_rank, optimizer={**exact, **options})
    numbers = case.lr, case.weight_decay, case.adam_eps, float("inf")
    references = [Reference(trainer.wrapper.config, *numbers, **kind) for kind in (changed, {})]
    params = {name: pair.unsharded for name, pair in pairs_of(trainer).items()}
    for step in range(2):
        before = trainer.params()
        forward_backward(trainer, batches(case, step, 0, one_rank))
        gradients = trainer.gradients()
        assert trainer.optimizer.step()[0]
        found = trainer.params()
        wanted, plain = (r.step(params, before, gradients, 0.0) for r in references)
    apart = {}
    for weight, pair in pairs_of(trainer).items():
        if is_muons(pair):
            error = (found[weight] - wanted[weight]).abs().max()
            other = (found[weight] - plain[weight]).abs().max()
            apart[weight] = (float(error), float(other))
    assert max(error for error, _ in apart.values()) <= 2e-3 * case.lr, apart
    if changed:
        assert max(other for _, other in apart.values()) > 0.1 * case.lr, apart


ATTENTION = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 3}


@pytest.mark.parametrize("gated", [False, True])
def test_fused_attention_is_split_as_core_reads_it(gated: bool) -> None:
    """Each of q, gate, k and v is orthogonal by itself."""
    config = SimpleNamespace(**ATTENTION, attention_output_gate=gated)
    parts = FUSED["linear_qkv"](config)
    if gated:
        assert parts == (6, 6, 3, 3)
    else:
        assert parts == (6, 3, 3)
    rows = 2 * sum(parts)
    blocks = row_blocks(rows, parts)
    torch.manual_seed(4)
    fused = torch.randn(rows, 40)
    for number, height in enumerate(parts):
        taken = torch.cat([fused[start:stop] for start, stop in blocks[number]])
        start = sum(parts[:number])
        as_read = fused.view(2, -1, 40)[:, start : start + height].reshape(-1, 40)
        assert torch.equal(taken, as_read)
        found = orthogonalized(taken[None], coefficients_of("quintic", 5))[0]
        assert (torch.linalg.svdvals(found) - 1).abs().max() < 0.35


def test_latent_attention_is_split_as_core_reads_it() -> None:
    """Keys and values of each head; latents, and the keys' part for positions."""
    config = SimpleNamespace(
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
        kv_channels=3,
    )
    heads = 2
    fused = torch.randn(2 * (8 + 6), 9)
    keys, values = fused.view(heads, 14, 9).split([8, 6], dim=1)
    for blocks, expected in zip(
        row_blocks(len(fused), FUSED["linear_kv_up_proj"](config)), (keys, values), strict=True
    ):
        taken = torch.cat([fused[start:stop] for start, stop in blocks])
        assert torch.equal(taken, expected.reshape(-1, 9))
    assert FUSED["linear_kv_down_proj"](config) == (10, 4)
    assert FUSED["linear_qkv_down_proj"](config) == (12, 10, 4)
    assert FUSED["linear_kv"](config) == (3, 3)


@pytest.mark.skipif(hasattr(OptimizerConfig, "lion_beta1"), reason="this core has it")
def test_lion_is_refused_where_core_has_none(one_rank: torch.device) -> None:
    with pytest.raises(ValueError, match="optimizer='lion': not in this megatron-core"):
        build_trainer(CASE, "optim", one_rank, optimizer={"optimizer": "lion"})


def test_a_fused_weight_that_is_none_is_refused(one_rank: torch.device) -> None:
    def change(model: torch.nn.Module) -> None:
        for layer in model.decoder.layers:  # type: ignore[union-attr]
            layer.self_attention.config.kv_channels = 5

    with pytest.raises(ValueError, match=r"linear_qkv.weight of 72 rows looks like a fused"):
        build_trainer(CASE.but(num_layers=1), "optim", one_rank, change, optimizer=MUON)
