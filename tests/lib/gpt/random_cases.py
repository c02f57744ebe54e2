"""Fresh random models and steps. A failing test names its seed; FSDP_TEST_SEED repeats it."""

from __future__ import annotations

import os
import random

from .gpt import Case


def fresh_seed() -> int:
    """Another number in each call, or the one in the environment variable FSDP_TEST_SEED."""
    given = os.environ.get("FSDP_TEST_SEED")
    if given:
        return int(given)
    return random.SystemRandom().randrange(1 << 24)


def random_case(seed: int) -> Case:
    """A model of uneven sizes, all drawn from `seed`. Norms and biases are far smaller than a
    shard, so that some ranks hold nothing of them."""
    draw = random.Random(seed)
    heads = draw.choice((1, 2, 3))
    return Case(
        num_layers=draw.choice((1, 2)),
        hidden=heads * draw.choice((4, 6, 10)),
        heads=heads,
        ffn=draw.randrange(17, 60),
        vocab=draw.randrange(31, 90),
        seq=draw.randrange(5, 14),
        batch=draw.choice((1, 2)),
        tied=draw.random() < 0.3,
        swiglu=draw.random() < 0.5,
        positions=draw.choice(("rope", "learned_absolute")),
        seed=seed,
    )
