"""The workflows of the public forge and the images' files: what they call is there, and no secret is needed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
VERSIONS = {str(version) for version in ("3.11", "3.12", "3.13")}
INSTALLED = {"mkdocs": "mkdocs-material"}
"""Programs that a step before installs -> the package."""


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    """Those of a workflow, by name."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
    return found


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each command that a workflow carries out, with every value that its matrix has."""
    for job in jobs(path).values():
        matrix = job.get("strategy", {}).get("matrix", {"": [""]})
        for step in job["steps"]:
            for line in step.get("run", "").replace("&&", "\n").splitlines():
                for name, values in matrix.items():
                    for value in values:
                        yield shlex.split(re.sub(r"\$\{\{ matrix\." + (name or "-") + r" \}\}", value, line))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_of_a_workflow_is_there(path: Path) -> None:
    words_of = list(commands(path))
    installed = " ".join(" ".join(words) for words in words_of if words[:2] == ["pip", "install"])
    assert words_of
    for words in words_of:
        assert not any("${{" in word for word in words), words
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif words[0] in ("python", "python3"):
            values = [word for word in words[2:] if re.fullmatch(r"[a-z]+|--[a-z]+", word)]
            command = [sys.executable, *words[1:2], *(word for word in values if word in ("build", "prove")), "--help"]
            told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert told.returncode == 0, told.stderr
            assert all(word in told.stdout for word in values if word.startswith("--")), words
        elif words[0] in INSTALLED:
            assert INSTALLED[words[0]] in installed, words
        elif words[0] != "pip":
            assert os.access(ROOT / words[0], os.X_OK), words


def test_checks_are_of_every_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"])))
    check = jobs(ROOT / ".github" / "workflows" / "check.yml")
    assert set(check["wheel"]["strategy"]["matrix"]["python"]) == named == VERSIONS
    (first,) = (
        step["with"]["python-version"] for step in check["check"]["steps"] if "python-version" in step.get("with", {})
    )
    assert {first, *check["versions"]["strategy"]["matrix"]["python"]} == named


def test_publishing_needs_a_tag_and_no_secret() -> None:
    path = ROOT / ".github" / "workflows" / "publish.yml"
    text = path.read_text()
    assert yaml.safe_load(text)[True] == {"push": {"tags": ["v*"]}}  # YAML reads the word "on" as true
    assert all("secrets." not in other.read_text() for other in WORKFLOWS)
    assert "password: ${{ github.token }}" in text  # of the run itself
    published = jobs(path)
    assert published["publish"]["needs"] == published["image"]["needs"] == "build"
    assert published["publish"]["permissions"]["id-token"] == "write"
    assert published["publish"]["environment"] == "pypi"
    uses = [step.get("uses", "") for step in published["publish"]["steps"]]
    assert any(use.startswith("pypa/gh-action-pypi-publish@") for use in uses)
    for other in WORKFLOWS:
        assert yaml.safe_load(other.read_text())["permissions"] == {"contents": "read"}, other


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_an_image_copies_what_is_there_and_is_nobody_special(path: Path) -> None:
    joined = re.sub(r"\\\n\s*", "", path.read_text())
    lines = [line.split(maxsplit=1) for line in joined.splitlines() if line and not line.startswith("#")]
    assert lines[0][0] == "FROM"
    ignored = (ROOT / ".dockerignore").read_text().split()
    for name, words in lines:
        if name == "COPY":
            for source in words.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source not in ignored
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", words], check=False).returncode == 0, words
    assert ["USER", "1000"] in lines
    assert ["ENTRYPOINT", '["tonnage"]'] in lines
    assert "--constraint /opt/tonnage/constraints.txt" in joined
