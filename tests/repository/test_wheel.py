"""The wheel, built from this checkout and installed into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_fsdp_adapter import __version__

CHECKS = ("__init__.py",)

ROOT = Path(__file__).parents[2]
SOURCES = ("megatron_fsdp_adapter", "pyproject.toml", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def test_a_wheel_has_its_command_its_types_and_its_license(tmp_path: Path) -> None:
    source = tmp_path / "source"
    site = tmp_path / "site"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            copy = shutil.copytree
        else:
            copy = shutil.copy
        copy(ROOT / name, source / name)
    subprocess.run(
        [*PIP, "install", "-q", "--no-deps", "--no-build-isolation", "--target", site, source],
        check=True,
        timeout=120,
    )
    installed = {str(path.relative_to(site)) for path in site.rglob("*")}
    info = f"megatron_fsdp_adapter-{__version__}.dist-info"
    assert {
        "megatron_fsdp_adapter/py.typed",
        f"{info}/licenses/LICENSE",
        f"{info}/entry_points.txt",
    } <= installed
    assert not {"tests", "scripts"} & installed
    said = subprocess.run(
        [site / "bin/megatron-fsdp-adapter", "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        timeout=60,
    )
    assert said.stdout == f"megatron_fsdp_adapter {__version__}\n"
