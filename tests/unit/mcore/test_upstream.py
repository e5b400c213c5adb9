"""docs/dev/upstream.md: its tables are those of the code, and the faults that it shows still exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from reproducers import PAGE, reproducers, wrong_endings

from megafp8.launch.doctor import versions
from megafp8.mcore import cpu_patches, patches

ROOT = Path(__file__).resolve().parents[3]
TEXT = PAGE.read_text(encoding="utf-8")


def rows_after(heading: str, header: str) -> list[list[str]]:
    """Cells of the first table below a heading whose header begins with `header`."""
    below = TEXT[TEXT.index(f"## {heading}\n") :]
    lines = below[below.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_lists_the_patches_with_their_versions() -> None:
    rows = rows_after("megatron-core on a CPU", "patch")
    expected = [[patch.name, f"`{patch.versions}`" if patch.versions else "all"] for patch in cpu_patches.PATCHES]
    assert [row[:2] for row in rows] == expected


def test_the_page_lists_the_patches_of_transformer_engine() -> None:
    """Their module imports Transformer Engine, so its text is read."""
    tree = ast.parse((ROOT / "megafp8/te/patches.py").read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = [call.args[0].value for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Patch"]
    tested = {each.packages["transformer-engine"] for each in versions.GPU_TESTED_SETS}
    rows = rows_after("Transformer Engine", "patch")
    assert [row[0] for row in rows] == names and names
    assert all(versions.matches_version(version, row[1]) for row in rows for version in tested)


def test_the_page_lists_the_tested_sets_of_the_doctor() -> None:
    columns = ("torch", "megatron-core", "transformer-engine", "triton")
    expected = [
        [each.name, versions.dotted(each.python)]
        + [each.packages.get(name, "") for name in columns]
        + [each.cudnn or "", each.driver or "", f"`{each.command}`"]
        for each in (*versions.CPU_TESTED_SETS, *versions.GPU_TESTED_SETS)
    ]
    assert rows_after("Tested versions", "set") == expected


def test_the_page_lists_the_ends_of_support() -> None:
    expected = [
        [each.package, each.version, str(each.tested), str(each.ends or ""), each.reason]
        for each in versions.SUPPORTED_VERSIONS
    ]
    assert rows_after("Ends of support", "package") == expected


def test_every_tested_version_is_in_the_table_of_ends() -> None:
    tested_sets = (*versions.CPU_TESTED_SETS, *versions.GPU_TESTED_SETS)
    tested = [(versions.PYTHON, versions.dotted(each.python)) for each in tested_sets]
    for each in tested_sets:
        tested += [(name, version) for name, version in each.packages.items() if name != "triton"]
    assert set(tested) == {(each.package, each.version) for each in versions.SUPPORTED_VERSIONS}


def runs_here(library: str) -> bool:
    """Whether a reproducer is for the installed version of a library, and needs no GPU."""
    name, _, versions = library.partition(" ")
    return name == "torch" or (name == "megatron-core" and patches.is_installed(versions))


@pytest.mark.skipif(torch.cuda.is_available(), reason="most faults are those of a machine without a GPU")
def test_the_faults_of_the_page_still_exist() -> None:
    """One that does not is fixed: what works around it can go."""
    numbers = [number for number, (library, _) in enumerate(reproducers()) if runs_here(library)]
    assert len(numbers) > 8
    assert wrong_endings(numbers) == []
