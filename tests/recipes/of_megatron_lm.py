"""Functional test configurations of Megatron-LM that turn FSDP on, and what this package says to
each. As a script, in a process of its own: Megatron-LM's folder goes first on the path.

    python -m tests.recipes.of_megatron_lm path/to/Megatron-LM
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_fsdp_adapter.launch import megatron_lm, runner
from megatron_fsdp_adapter.megatron.options import validation
from tests.recipes import classify

CASES = Path("tests", "functional_tests", "test_cases")
FLAGS = ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2")
OTHER = "--use-torch-fsdp2"


TAGS = {"0.19.1": "core_v0.19.0"}
"""Releases whose tag is not what they say of themselves."""


def source_name(checkout: Path) -> str:
    """Of a checkout, such as "Megatron-LM core_v0.19.0": read, not imported."""
    tree = ast.parse((checkout / "megatron" / "core" / "package_info.py").read_text())
    numbers = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }  # fmt: skip
    version = ".".join(str(numbers[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return f"Megatron-LM {TAGS.get(version, f'core_v{version}')}"


def configurations(checkout: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, content) of those that turn FSDP on, sorted."""
    for path in sorted((checkout / CASES).rglob("model_config.yaml")):
        content = yaml.safe_load(path.read_text())
        arguments = content.get("MODEL_ARGS")
        if isinstance(arguments, dict) and any(arguments.get(flag) for flag in FLAGS):
            yield path.parent.relative_to(checkout / CASES).as_posix(), content


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """What Megatron-LM's test runner makes of MODEL_ARGS."""
    words: list[str] = []
    for flag, value in arguments.items():
        if value is False:
            continue
        words.append(flag)
        if value is not True:
            text = str(value)
            words += [text] if text.startswith(("(", "[")) else text.split()
    return words


def classified(checkout: Path) -> Iterator[dict[str, Any]]:
    """A row for each configuration."""
    from megatron_fsdp_adapter.megatron.seams import core_api

    source = source_name(checkout)
    for name, content in configurations(checkout):
        words = command_line(content["MODEL_ARGS"])
        if OTHER in words:
            on = {"use_torch_fsdp2": True}
            yield {**classify.result(name, source, on, {}, []), "class": "other wrapper"}
            continue
        args = runner.parse_arguments(checkout / "pretrain_gpt.py", words)
        megatron_lm.complete(args, words)
        options = validation.launch_options(args)
        environment = {k: str(v) for k, v in (content.get("ENV_VARS") or {}).items()}
        with classify.on_hopper(environment):
            lines = [
                *validation.launch_problems(args, environment),
                *classify.construction_lines(
                    options, options, core_api.asks_tokens_on_the_host()
                ),
            ]
            waits = classify.waits_for(options)
        refused = classify.by_option(lines)
        on = classify.turned_on(refused, options)
        yield classify.result(name, source, on, refused, waits)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(folder))
    print("ROWS" + json.dumps(list(classified(folder))))
