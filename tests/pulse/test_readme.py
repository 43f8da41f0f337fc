"""Every command and config line of the README and the docs runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import entry
from forked import tonnage
from tiny import alpaca_rows, llama_config, write_model, write_rows

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FIRST_RUN = (ROOT / "docs" / "first-run.md").read_text()


def carry_out(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line)
    assert words[0] == "tonnage"
    # What is measured beside other tests is not kept.
    own = {"TONNAGE_CACHE": str(folder / "cache")} if words[1] == "doctor" else {}
    return tonnage(*words[1:], cwd=folder, said="Say in capitals.\n", **own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's config; its model and rows are tiny ones, its run is shorter."""
    folder = tmp_path_factory.mktemp("readme")
    write_model(folder / "EleutherAI" / "pythia-70m", llama_config(max_position_embeddings=1024))
    write_rows(folder / "gsm8k_train.json", alpaca_rows(200))
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = yaml.safe_load(text)
    assert config["steps"] == 100
    (folder / "gsm8k.yaml").write_text(text.replace("steps: 100", "steps: 4").replace("tokens: 8192", "tokens: 4096"))
    (command,) = re.findall(r"^\$ (tonnage .*)$", README, re.MULTILINE)
    result = carry_out(command, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_the_run_leaves_the_files_that_are_listed(folder: Path) -> None:
    listing = FIRST_RUN.split("What a run leaves behind")[1]
    names = re.findall(r"(?:^  |\s{2,})([a-z]+(?:\.[a-z]+|/))(?=\s)", listing, re.MULTILINE)
    assert {"config.yaml", "metrics.jsonl", "tokenizer/", "export/", "data.json"} <= set(names)
    for name in names:
        assert (folder / "runs/gsm8k" / name).exists(), name


def commands_of_the_table() -> list[str]:
    rows = re.findall(r"^\| (`tonnage .*?) \|", README, re.MULTILINE)
    return [line for row in rows for line in re.findall(r"`(tonnage .*?)`", row)]


def test_the_table_names_every_command() -> None:
    listed = re.findall(r"^│ (\w+) ", entry.tonnage("--help").out, re.MULTILINE)
    assert {line.split()[1] for line in commands_of_the_table()} == set(listed)


FILL = {
    "CONFIG": "gsm8k.yaml",
    "RUN": "runs/gsm8k",
    "DIR": "exported",
    "FILE": "gsm8k_train.json",
    "MODEL": "EleutherAI/pythia-70m",
    "ROWS": "gsm8k_train.json",
}


LONG = ("tonnage init", "tonnage profile", "tonnage doctor", "tonnage bench")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow if line.startswith(LONG) else ())
        for line in commands_of_the_table()
        if line not in ("tonnage demo", "tonnage serve RUN", "tonnage page")  # tests/serving and page have what goes on
    ],
)
def test_commands_of_the_table_run(line: str, folder: Path) -> None:
    words = [FILL.get(word, word) for word in line.replace("[key=value ...]", "output=runs/again steps=2").split()]
    if words[1] == "generate":
        words += ["--prompt", "'Say in capitals.'", "--max-new-tokens", "4"]
    if words[1] == "eval":
        words += ["--max-length", "1024", "--exact-match", "2", "--max-new-tokens", "4"]
    if words[1] == "profile":
        words += ["--steps", "1"]
    if words[1] == "bench":
        words += ["--shape", "llama-4m", "--steps", "1"]
    if words[1] == "doctor":
        words += ["--quick", "--json"]
    if words[1] == "import":
        (folder / "ds_config.json").write_text('{"train_batch_size": 64, "bf16": {"enabled": true}}')
        words[2] = "ds_config.json"
    if words[1] == "launch":
        words += ["--image", "tonnage:1", "--claim", "shared", "--to", "manifests"]
    if words[1] == "verify":
        words[2] = "runs/gsm8k"
    result = carry_out(" ".join(words), folder)
    if words[1] == "stop":  # nothing works there any more (tests/api/test_stop.py has what does)
        assert (result.returncode, "nobody works on this run" in result.stderr) == (2, True)
        return
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    anchors = {path: anchors_of(path) for path in (ROOT / "docs").glob("*.md")}
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert path.exists(), target
        assert not anchor or path not in anchors or anchor in anchors[path], f"{target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """What a page's headings can be linked by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_show_the_same_config_and_short_sentences() -> None:
    (one,), (other,) = (re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) for page in (README, FIRST_RUN))
    assert yaml.safe_load(one) == yaml.safe_load(other)
    assert README.count("\n") < 120
    words = re.sub(r"```.*?```|\]\([^)]*\)", "", README, flags=re.DOTALL)
    sentences = [line for part in re.split(r"\n\s*\n|\n\* |\|", words) for line in re.split(r"(?<=[.!?])\s+", part)]
    assert max(len(sentence.split()) for sentence in sentences) <= 40


def test_ways_in_are_there() -> None:
    """``scripts/release.py prove`` installs it in both ways, on every Python."""
    makefile, project = (ROOT / "Makefile").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, *_ = re.findall(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    pip, uv, *makes = (shlex.split(line, comments=True) for line in first.splitlines())
    assert pip[:2] == ["pip", "install"]
    assert uv == ["uv", "tool", "install", "."]
    assert pip[2].removeprefix(".[").removesuffix("]") in project["optional-dependencies"]
    assert [words[0] for words in makes] == ["make", "make"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for _, target in makes)
    numbers = re.findall(r"(?:Python|torch|transformers) (\d+\.\d+)", README.partition("## Beside others")[0])
    assert len(numbers) == 3
    for number in numbers:
        assert f">={number}" in f"{project['requires-python']} {project['dependencies']}", number
    assert (
        README.index("```")
        < README.index("examples/notebooks/")
        < README.index("## Beside others")
        < README.index("```yaml")
    )
