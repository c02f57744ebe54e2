"""What an optimizer does not go with is one sentence, whoever is asked: Megatron-LM's arguments, a
recipe of Megatron-Bridge, the optimizer of a wrapped model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.megatron.options import validation
from megatron_fsdp_adapter.megatron.options.optimizer_pairs import PAIRS, Pair
from tests.distributed.gpt import Case, build_trainer
from tests.launch.launch_cases import recipe

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23)
STREAMED = "chunked_optimizer_state_offload"

BREAKING: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"optimizer": "sgd"}, STREAMED, "optimizer='sgd'"),
)
"""Of each pair: fields of the optimizer's config, the switch of the DDP config, what is named."""


@pytest.mark.parametrize(
    ("pair", "broken"), list(zip(PAIRS, BREAKING, strict=True)),
    ids=lambda one: one.ddp_option if isinstance(one, Pair) else one[2],
)  # fmt: skip
def test_arguments_recipes_and_configs_are_told_the_same(
    one_rank: torch.device, pair: Pair, broken: tuple[dict[str, Any], str, str]
) -> None:
    options, switch, named = broken
    said = f"{named} with {switch}=True: {pair.message}"
    arguments = {**validation.PLAIN_OPTIONS, "overlap_param_gather": True, **options}
    assert said not in validation.launch_problems(SimpleNamespace(**arguments), {})
    args = SimpleNamespace(**arguments, **{switch: True})
    assert said in validation.launch_problems(args, {})

    cfg = recipe(**{f"ddp__{switch}": True})
    vars(cfg.optimizer).update(options)
    assert f"optimizer.{said}" in validation.bridge_problems(cfg, {})

    with pytest.raises(ValueError) as caught:
        build_trainer(CASE, "optim", one_rank, ddp={switch: True}, optimizer=options)
    assert str(caught.value).count(said) == 1
