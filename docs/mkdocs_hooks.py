"""Hooks of MkDocs: publish the files outside docs/ to which pages link, and resolve the links to them.

Pages link to each other and to other files of the repository by relative paths, which a code host resolves. MkDocs
publishes docs/ only. These hooks add PAGES and every linked file outside docs/ to the site, and rewrite links to the
place that a file has there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "benchmarks/RESULTS.md": "results.md"}
# One page for each topic of RESULTS.md, which links to them; they are not in the navigation.
PAGES |= {f"benchmarks/results/{path.name}": f"results/{path.name}" for path in ROOT.glob("benchmarks/results/*.md")}
# The target of a link or image up to its anchor; links with a scheme and links within a page are left out.
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)[^)\s#]+")


def site_path(path: str) -> str:
    """Path in the site of a file of the repository; both are relative to their roots."""
    return PAGES.get(path) or path.removeprefix("docs/")


def linked_path(page: Path, link: str) -> str:
    """Path in the repository of the target of a page's link."""
    return os.path.relpath(page.parent / link, ROOT)


def linked_files(page: Path) -> Iterator[str]:
    """Existing files outside docs/ to which a page links."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path = linked_path(page, link)
        if not path.startswith(("docs/", "..")) and (ROOT / path).is_file():
            yield path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add PAGES, and the files to which pages link."""
    pages = [ROOT / page for page in PAGES] + [Path(file.abs_src_path) for file in files.documentation_pages()]
    for path in sorted({*PAGES, *(path for page in pages for path in linked_files(page))}):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite relative links from the repository's layout to the site's."""
    source, folder = Path(page.file.abs_src_path), os.path.dirname(page.file.src_uri)
    return LINK.sub(lambda link: os.path.relpath(site_path(linked_path(source, link[0])), folder or "."), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the backslash of `\\|` in code spans of tables, as code hosts do; Python-Markdown keeps it."""
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)
