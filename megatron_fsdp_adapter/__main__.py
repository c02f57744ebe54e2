"""`python -m megatron_fsdp_adapter SCRIPT.py ...` or `COMMAND ...`; `megatron-fsdp-adapter` is the
same where the package is installed."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import warnings

from . import __version__

COMMANDS = {
    "convert": "megatron_fsdp_adapter.cli.convert",
    "diff": "megatron_fsdp_adapter.cli.diff",
    "doctor": "megatron_fsdp_adapter.cli.doctor",
    "estimate": "megatron_fsdp_adapter.cli.estimate",
    "inspect": "megatron_fsdp_adapter.cli.inspect",
    "plan": "megatron_fsdp_adapter.cli.plan",
    "verify": "megatron_fsdp_adapter.cli.verify",
}
REMOVED = {
    "plan --curve": "removed. Run `plan --gpus N` for each number of GPUs",
    "plan --explain": "removed. A profiler shows what a run launches",
    "plan --plot": "removed. Draw the values of --json",
    "plan --bf16-wire": "removed. Give --megatron-fsdp-grad-comm-dtype bf16, or leave it out",
    **{f"plan --{name}": f"not modeled: {what}. Leave it out" for name, what in {
        "tp-comm-overlap": "a plan would overestimate the time of tensor-parallel communication",
        "overlap-moe-expert-parallel-comm": "a plan would overestimate the time of exchanges",
        "optimizer-cpu-offload": "`estimate` counts its memory",
        "chunked-optimizer-state-offload": "`estimate` counts its memory",
        "fsdp-unsharded-budget-gib": "`estimate` counts its memory",
        "suggested-communication-unit-size": "`estimate` counts its memory",
        "cpu-offloading": "activations in host memory",
        "fp4-format": "there are no measurements of FP4",
        "cuda-graph-modules": "graphs of layers and of an iteration are",
    }.items()},
    "estimate --padding-bound": "removed, because no run has the option. Leave it out",
    "estimate --max-segments": "removed, because no run has the option. Leave it out",
    "doctor --plan": "removed. Give the model and the run to `plan`",
    "doctor --no-poison": "removed. Fresh buffers of a proof are filled with NaN. Leave it out",
    "convert --from": "removed. The format of the source is detected",
    "convert --block-mib": "removed. Blocks have 64 MiB",
    "convert --quiet": "removed. Lines of progress go to stderr, every 10 seconds",
    "diff --block-mib": "removed. Blocks have 64 MiB",
    "diff --quiet": "removed. Lines of progress go to stderr, every 10 seconds",
    "diff --all": "removed. --json has everything",
    "verify --quiet": "removed. Lines of progress go to stderr, every 10 seconds",
    "verify --jobs": "removed. Up to 8 files are read at a time",
    "convert --hf-config": "removed. Megatron-Bridge converts from and to Hugging Face",
}
"""Options that a command had, or has not -> why not, and what to do."""
USAGE = f"""\
usage: python -m megatron_fsdp_adapter path/to/pretrain_gpt.py --use-megatron-fsdp ...
       python -m megatron_fsdp_adapter {{{",".join(COMMANDS)}}} ...
       python -m megatron_fsdp_adapter --version
       a command explains itself with --help; a script gets all arguments after it"""


def _command(argv: list[str]) -> int:
    """Runs a command; if `head` or `less` has closed the pipe, ends with the status of SIGPIPE."""
    if not sys.warnoptions:
        # Warnings about packages that Megatron lacks and commands do not need, and about a single
        # process.
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")
    for word in argv[1:]:
        gone = REMOVED.get(f"{argv[0]} {word.partition('=')[0]}")
        if gone is not None:
            print(f"{argv[0]}: {word}: {gone}", file=sys.stderr)
            return 2
    try:
        status = int(importlib.import_module(COMMANDS[argv[0]]).main(argv[1:]))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout.fileno()):
            raise
        # Python writes buffered output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _nobody_reads(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(found & select.POLLERR for _, found in poll.poll(0))


def main(argv: list[str] | None = None) -> int:
    """Runs a command, or a script with the wrapper installed; else prints the usage and returns
    2. argv: default: the arguments of this process."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return _command(argv)
    if argv and argv[0].endswith(".py"):
        from .launch.runner import run

        return run(argv)
    if argv == ["--version"]:
        print(f"megatron_fsdp_adapter {__version__}")
        return 0
    asked = argv[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
