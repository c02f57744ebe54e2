"""A command whose reader has gone, as of `plan ... | head`."""

from __future__ import annotations

import os
import sys
from unittest import mock

import pytest

from megatron_fsdp_adapter.__main__ import main

CHECKS = ("__main__.py",)

ESTIMATE = ["estimate", "--preset", "llama3-8b", "--data-parallel-size", "2"]


def test_a_command_whose_output_nobody_reads_ends_quietly(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(ESTIMATE) == 141
        print("what is written at the end goes nowhere", file=output, flush=True)
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch, tmp_path):
    broken = mock.Mock(side_effect=BrokenPipeError("of a peer"))
    monkeypatch.setattr("megatron_fsdp_adapter.tools.cli.estimate.main", broken)
    with (tmp_path / "out").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError, match="of a peer"):
            main(ESTIMATE)
