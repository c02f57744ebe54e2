"""The wrapper, and what it is made of."""

from .fully_shard import *  # noqa: F403
