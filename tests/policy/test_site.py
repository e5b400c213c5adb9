"""The documentation builds as a site without a broken link or anchor, and no generated page is in the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_external_references import FOLDERS

import megafp8

ROOT = Path(__file__).resolve().parents[2]
needs_mkdocs = pytest.mark.skipif(
    not (find_spec("material") and find_spec("mkdocstrings")),
    reason="mkdocs-material or mkdocstrings is not installed: '.[docs]'",
)


def build(project: Path, site: Path) -> subprocess.CompletedProcess:
    """Build the site of a checkout into a folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of docs/ beside links to everything else."""
    for path in ROOT.iterdir():
        if path.name not in ("docs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


@needs_mkdocs
def test_the_site_builds(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "overview/index.html", "contributing/index.html", "flag_reference/index.html"):
        assert (tmp_path / "site" / page).is_file()
    reference = (tmp_path / "site/api/index.html").read_text(encoding="utf-8")
    assert all(f'id="megafp8.{name}"' in reference for name in megafp8.__all__ if name != "recipes")
    assert 'href="../getting_started/"' in (tmp_path / "site/overview/index.html").read_text(encoding="utf-8")


@needs_mkdocs
def test_broken_links_and_pages_outside_the_navigation_fail(checkout: Path, tmp_path: Path) -> None:
    with (checkout / "docs/glossary.md").open("a", encoding="utf-8") as page:
        page.write("\n[a page](nowhere.md), [a file](../examples/nowhere.sh), [an anchor](differences.md#nowhere)\n")
    (checkout / "docs/unlisted.md").write_text("# Unlisted\n", encoding="utf-8")
    done = build(checkout, tmp_path / "site")
    assert done.returncode != 0
    for name in ("nowhere.md", "examples/nowhere.sh", "differences.md#nowhere", "unlisted.md"):
        assert name in done.stderr


def test_no_generated_page_is_in_the_repository() -> None:
    folders = (ROOT / name for name in (*FOLDERS, "notes"))
    pages = [*ROOT.glob("*.htm*"), *(path for folder in folders for path in folder.rglob("*.htm*"))]
    assert [path for path in pages if path.suffix != ".jinja"] == [], "publish a picture, Markdown or JSON instead"
