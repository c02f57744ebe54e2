"""torchft's manager of this job, one of several replicas of a Megatron-LM run."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch

from ..options.table import ELASTIC, read

RETRIES = 100
"""Requests for a quorum before this replica gives up: a lighthouse may restart."""

_asked: dict[str, Any] = {}
"""Values of the command line, if the runner has hooked a loop that takes elastic steps."""
_managers: list[Any] = []
"""The manager of this process, once there is one."""


def ask(args: Any) -> None:
    """Notes that the arguments of a command line ask for replicas, or that they do not."""
    _asked.clear()
    lighthouse = getattr(args, ELASTIC, None)
    if lighthouse:
        _asked["lighthouse"] = lighthouse
        _asked["minutes"] = getattr(args, "distributed_timeout_minutes", 10)


def is_asked() -> bool:
    """True if the runner was started with `--fsdp-elastic`."""
    return bool(_asked)


def manager_of(ddp_config: Any, device: torch.device) -> Any:
    """torchft's manager of this process, made once; None if replicas are not asked for. Collective
    over the ranks of this replica.

    ValueError: asked for, but no loop takes elastic steps; or torchft is missing."""
    lighthouse = read(ddp_config, ELASTIC)
    if not lighthouse:
        return None
    if not is_asked():
        raise ValueError(
            f"{ELASTIC}={lighthouse!r}: only Megatron-LM's training loop takes elastic steps, "
            "started by `-m megatron_fsdp_adapter` with --fsdp-elastic. Start it so, or leave "
            "the option unset"
        )
    if not _managers:
        _managers.append(_made(lighthouse, device, _asked["minutes"]))
    return _managers[0]


def _made(lighthouse: str, device: torch.device, minutes: float) -> Any:
    try:
        import torchft
    except ImportError as error:
        raise ValueError(
            f"{ELASTIC}={lighthouse!r}: torchft cannot be imported ({error}). Install "
            "megatron-fsdp-adapter[elastic]"
        ) from error
    kind = torchft.ProcessGroupGloo if device.type == "cpu" else torchft.ProcessGroupNCCL
    patience = timedelta(minutes=minutes)
    return torchft.Manager(
        pg=_counting(kind)(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        # A replica that sends its state ends if that takes longer. Reductions have a limit of their
        # own, which the steps set (`limit.py`).
        timeout=patience,
        # The first quorum waits for replicas that are still starting.
        quorum_timeout=patience,
        lighthouse_addr=address(lighthouse),
        replica_id=socket.gethostname(),
        store_addr=_reachable(os.environ["MASTER_ADDR"]),
        quorum_retries=RETRIES,
    )


def _reachable(host: str) -> str:
    """The host of this replica's store for other nodes. On one node torchrun calls it localhost."""
    return socket.gethostname() if host in ("localhost", "127.0.0.1", "::1") else host


def address(lighthouse: str) -> str:
    """The address that torchft takes for `host:port`."""
    return lighthouse if "://" in lighthouse else f"http://{lighthouse}"


def _counting(kind: Any) -> Any:
    """A class of torchft's process groups, which counts its `quorums`."""

    class Counting(kind):  # type: ignore[misc]
        quorums = 0

        def configure(self, *args: Any, **options: Any) -> None:
            self.quorums += 1
            super().configure(*args, **options)

    return Counting
