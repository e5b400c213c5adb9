"""Every Python that megafp8 supports gets one version of megatron-core, and can compile the sources."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement

from megafp8.launch.doctor import versions
from megafp8.launch.doctor.versions import dotted, matches_version, megatron_core_for

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = [(3, minor) for minor in range(versions.PYTHON_FROM[1], versions.PYTHON_BELOW[1])]
SOURCES = ("megafp8", "tools", "launcher")
# The modules of the standard library that a Python lacks: those that another one has are given as standard input.
COMPILE = """
import ast, json, pathlib, sys
known, missing = set(json.load(sys.stdin)) - sys.stdlib_module_names, set()
for path in (path for folder in sys.argv[1:] for path in pathlib.Path(folder).rglob("*.py")):
    tree = ast.parse(path.read_bytes(), str(path))
    compile(tree, str(path), "exec")
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        missing |= {name for name in names if name.split(".")[0] in known}
print(*sorted(missing))
"""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of `setup`."""
    monkeypatch.chdir(ROOT)
    with patch("setuptools.setup") as setup:
        runpy.run_path("setup.py")
    return setup.call_args.kwargs


def applying(lines: list[str], python: tuple[int, int]) -> list[Requirement]:
    """The requirements of megatron-core that apply to a Python."""
    found = [Requirement(line) for line in lines if line.startswith("megatron-core")]
    return [each for each in found if each.marker is None or each.marker.evaluate({"python_version": dotted(python)})]


@pytest.mark.parametrize("python", PYTHONS, ids=dotted)
def test_each_python_gets_the_newest_megatron_core_that_is_made_for_it(
    python: tuple[int, int], package: dict[str, Any]
) -> None:
    (required,) = applying(package["install_requires"], python)
    (pinned,) = applying((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(), python)
    expected = {(3, 11): "0.16.1", (3, 12): "0.19.2", (3, 13): "0.19.2"}[python]
    assert str(pinned.specifier) == f"=={expected}"
    assert megatron_core_for((*python, 1)) == expected
    others = ("0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2", "0.20.0")
    allowed = [each for each in others if each in required.specifier]
    assert allowed == (["0.16.1"] if python < (3, 12) else ["0.16.1", "0.19.0", "0.19.2"])
    assert all(any(matches_version(each, known) for known in versions.MEGATRON_CORE_VERSIONS) for each in allowed)


def test_the_pythons_are_the_same_everywhere(package: dict[str, Any]) -> None:
    assert package["python_requires"] == f">={dotted(versions.PYTHON_FROM)},<{dotted(versions.PYTHON_BELOW)}"
    classifiers = [each.rpartition(" :: ")[2] for each in package["classifiers"] if ":: Python :: 3." in each]
    assert classifiers == [dotted(python) for python in PYTHONS]
    assert f"{dotted(PYTHONS[0])} to {dotted(PYTHONS[-1])}" == versions.PYTHONS
    assert f"Linux, Python {versions.PYTHONS}." in (ROOT / "README.md").read_text(encoding="utf-8")
    setup_venv = (ROOT / "tools/setup_venv.sh").read_text(encoding="utf-8")
    candidates = re.search(r"for candidate in \"\$1\" (.+) python3; do", setup_venv)[1].split()
    assert sorted(candidates) == sorted(f"python{dotted(python)}" for python in PYTHONS)
    assert f"not {PYTHONS[0]} <= sys.version_info[:2] <= {PYTHONS[-1]}" in setup_venv
    assert f"megafp8 needs Python {versions.PYTHONS} with venv" in setup_venv


@pytest.mark.parametrize(
    ("file", "tested_sets"),
    [("constraints.txt", versions.CPU_TESTED_SETS), ("constraints-gpu.txt", versions.GPU_TESTED_SETS[:1])],
)
def test_the_tested_sets_are_pinned(file: str, tested_sets: tuple[versions.TestedSet, ...]) -> None:
    pins = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / file).read_text(encoding="utf-8"), re.M)
    for tested in tested_sets:
        for name, version in tested.packages.items():
            assert any(pinned == name and matches_version(pin, version) for pinned, pin in pins), name


def test_the_container_installs_the_tested_set() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    installs = re.findall(r"pip install .+", dockerfile)
    assert len(installs) == 3 and all("-c constraints-gpu.txt" in each for each in installs)
    pins = (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8")
    cuda = re.search(r"^FROM nvidia/cuda:([\d.]+)-devel-", dockerfile, re.M)[1]
    assert f"cuda-toolkit=={cuda}\n" in pins, "nvcc of the image and torch's CUDA"
    python = dotted(versions.GPU_TESTED_SETS[0].python)
    assert f"python{python} -m venv /opt/venv" in dockerfile
    assert f"CUDNN_HOME=/opt/venv/lib/python{python}/site-packages/nvidia/cudnn" in dockerfile
    assert "Nobody has run this" in (ROOT / "Dockerfile.ngc").read_text(encoding="utf-8")


def interpreter(python: tuple[int, int]) -> Optional[str]:
    """A Python of this version, if one is installed: on the path, or among those of pyenv."""
    name = f"python{dotted(python)}"
    folders = sorted(Path.home().glob(f".pyenv/versions/{dotted(python)}.*/bin"))
    for found in (shutil.which(name), *(str(folder / name) for folder in folders)):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


@pytest.mark.parametrize("python", [each for each in PYTHONS if each != sys.version_info[:2]], ids=dotted)
def test_another_python_compiles_the_sources(python: tuple[int, int]) -> None:
    """Without warnings, and with the modules of the standard library that they import."""
    found = interpreter(python)
    if found is None:
        pytest.skip(f"Python {dotted(python)} is not installed")
    done = subprocess.run(
        [found, "-W", "error", "-c", COMPILE, *SOURCES],
        cwd=ROOT, input=json.dumps(sorted(sys.stdlib_module_names)), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
