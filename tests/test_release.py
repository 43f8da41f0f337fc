"""What a release needs: the version in one place, a changelog that knows it, the licence, workflows that are YAML."""

from __future__ import annotations

import glob
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import tonnage

ROOT = Path(__file__).parent.parent


def release(root: Path, tag: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([root / "scripts" / "check_release", tag], capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("scripts/check_release", "src/tonnage/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_tag_is_released_if_it_is_the_version_and_the_changelog_knows_it(copy: Path) -> None:
    version = tonnage.__version__
    other = release(copy, "v9.9.9")
    assert other.returncode == 1
    assert f"tag v{version}, or change the version" in other.stderr
    changes = copy / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace(f"## [{version}] - ", "## [0.0.1] - "))
    unknown = release(copy, f"v{version}")
    assert unknown.returncode == 1
    assert f"has no section '## [{version}] - DATE'" in unknown.stderr
    changes.write_text(changes.read_text().replace("## [Unreleased]", f"## [{version}] - 2030-01-02", 1))
    assert release(copy, f"v{version}").returncode == 0


def test_the_version_and_the_licence_stand_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    assert project["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_workflows_and_forms_are_yaml() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(files) >= 5
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text()), dict), file


def test_nothing_is_installed_unasked_that_trackers_or_clusters_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {word.split(">=")[0] for word in project["dependencies"]}
    assert len(core) < 12
    assert not {"tensorboard", "wandb", "mlflow", "trackio", "ray"} & core
    assert {"tensorboard", "wandb", "mlflow", "trackio", "ray"} <= project["optional-dependencies"].keys()


def test_every_file_of_the_package_goes_into_the_wheel() -> None:
    """``scripts/release.py build`` compares the wheel itself."""
    package = ROOT / "src" / "tonnage"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tonnage"]
    packed = {name for pattern in settings for name in glob.glob(pattern, root_dir=package, recursive=True)}  # noqa: PTH207
    names = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    files = {name for name in names if "__pycache__" not in name}
    data = {name for name in files if not name.endswith(".py")}
    assert len(data) > 40
    assert data <= packed
    for name in files - data:  # or it is no package for setuptools
        assert (package / name).parent.joinpath("__init__.py").exists(), name
