"""What ``mkdocs`` is told besides: README and the benchmarks are pages as well, and links to the code lead to it.

Pages link to files of the repository by their paths, which is right where the repository itself is read. On the site
such a link leads to the repository, if ``mkdocs.yml`` says where that is (``repo_url``), and else is plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "benchmarks/README.md": "benchmarks.md"}
"""Files of the repository that are pages of the site -> where."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in ``docs``."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they must be on the site."""
    sources = {target: source for source, target in PAGES.items()}
    written = ROOT / sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_the_site(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        if not target or "://" in target:
            return found[0]
        path = (written.parent / target).resolve().relative_to(ROOT).as_posix()
        if path in PAGES:
            return f"{image}[{text}]({PAGES[path]}{anchor or ''})"
        if path.startswith("docs/"):
            return f"{image}[{text}]({path.removeprefix('docs/')}{anchor or ''})"
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    pieces = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(piece if piece.startswith("```") else LINK.sub(on_the_site, piece) for piece in pieces)
