"""The site of the documentation: built without a complaint, and of nobody else's files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ELSEWHERE = re.compile(
    r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//|@import|@font-face'
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--config-file={config}", f"--site-dir={site}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_the_site_is_built_and_asks_nobody(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert len(pages) > 12
    for page in [*pages, *(tmp_path / "site").glob("*.svg")]:
        assert not (found := ELSEWHERE.search(page.read_text())), (page.name, found)


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One\n\n[a](#two)\n")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({**settings, "hooks": [], "nav": [{"Home": "index.md"}]}))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "there is no such anchor" in done.stderr


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w-]+\.md)$", text, re.MULTILINE))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= listed
    assert yaml.safe_load(text)["theme"]["font"] is False
