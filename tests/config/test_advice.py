"""What a message says to change, done as it says, does away with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tonnage.config import keys, read_config
from tonnage.errors import Problem, UserError

MINIMAL = "model: owner/small\ndata: {train: owner/rows}\n"
KEY = r"[a-z_]+(?:\.\w+)*"


def edits(problem: Problem) -> list[str]:
    """What a reader of an advice does, one way after another: overrides as they are pasted; ``KEY=`` for a key that is
    to be left out."""
    names = {key.name for key in keys.all_keys()}
    found: list[str] = []
    said = problem.change
    for key, value in re.findall(
        rf"(?:write|set|or|,) ({KEY})(?: to |: |=)((?:\{{[^}}]*\}}|\[[^\]]*\]|[\w./~-]+))", said
    ):
        found.append(f"{key}: {value}")
    for key in re.findall(rf"(?:leave|remove|or) ({KEY})(?: out|,| or|$)", said):
        found.append(f"{key}=")
    for key in re.findall(rf"remove {KEY} or ({KEY})", said):
        found.append(f"{key}=")
    for key, bound in re.findall(rf"(?:raise|lower) ({KEY}) to (?:a multiple of )?(\d+)", said):
        found.append(f"{key}={bound}")
    for key, value in re.findall(rf"set ({KEY}), to ([\d.]+)", said):
        found.append(f"{key}={value}")
    at = re.match(rf"({KEY}) is ", problem.found)
    for value in re.findall(r"(?:^write|did you mean) ('[^']*'|\"[^\"]*\"|[\w.-]+)", said):
        if at and value not in names:
            found.append(f"{at[1]}={value}")
    unknown = re.match(rf"unknown key ({KEY})$", problem.found)
    for name in re.findall(rf"(?:did you mean|^write) ({KEY})(?:\?| instead)", said):
        if unknown and name in names:
            found.append(f"{unknown[1]} -> {name}")
    for key, value in re.findall(r"write ([a-z_.0-9]+)=(\.\.\.|[^,\s]+)", said):
        found.append(f"{key}={'alpaca' if value == '...' else value}")
    return [edit for edit in found if "->" in edit or re.sub(r"\.\d+", "", re.split("[=:]", edit)[0]) in names]


def problems(text: str, overrides: Sequence[str], folder: Path) -> tuple[Problem, ...]:
    file = folder / "config.yaml"
    file.write_text(text)
    try:
        read_config(file, overrides, check_files=False)
    except UserError as error:
        return error.problems
    return ()


MISTAKES = [
    ["steps=10", "epochs=2"],
    ["batch={}", "batch.tokens=4096", "batch.sequences=2"],
    ["batch.tokens=4096", "data.pack=false"],
    ["batch.tokens=100"],
    ["batch.sequences=2", "launch.workers=4"],
    ["launch.workers=3", "parallel.tensor=2"],
    ["launch.workers=4", "parallel.replicate=2", "memory.zero=0"],
    ["memory.optimizer_tier=device", "memory.optimizer_resident=6GB"],
    ["memory.activation_tier=host", "memory.recompute=none"],
    ["memory.recompute_blocks=4", "memory.recompute=selective"],
    ["memory.recompute_blocks=4", "launch.workers=2", "parallel.pipeline=2"],
    ["memory.recompute_blocks=4", "launch.workers=2", "parallel.pipeline=auto"],
    ["memory.parameter_tier=host", "memory.gradient_tier=device"],
    ["memory.parameter_tier=host", "memory.optimizer_tier=device", "memory.gradient_tier=host"],
    ["memory.parameter_tier=host", "memory.zero=2", "launch.workers=2"],
    ["memory.parameter_tier=host", "adapter.rank=4", "compile=on"],
    ["memory.parameter_tier=disk", "memory.zero=1", "launch.workers=2"],
    ["launch.workers=4", "parallel.tensor=2", "memory.parameter_tier=disk", "memory.zero=2"],
    ["launch.workers=4", "parallel.pipeline=2", "memory.parameter_tier=host", "memory.zero=1"],
    ["memory.sequence_tiles=8", "memory.tiles=4", "memory.zero=3", "launch.workers=2"],
    ["memory.sequence_tiles=8", "launch.workers=2", "parallel.pipeline=2", "parallel.schedule=zero_bubble"],
    ["memory.tiles=4", "launch.workers=2", "parallel.tensor=2"],
    ["memory.tiles=4", "launch.workers=2", "parallel.pipeline=2"],
    ["memory.tiles=4", "adapter={rank: 4}"],
    ["memory.tiles=4", "train=[embeddings]"],
    ["memory.tiles=4", "compile=on"],
    ["memory.tiles=4", "memory.zero=2", "launch.workers=2"],
    ["launch.workers=4", "parallel.pipeline=2", "parallel.schedule=zero_bubble"],
    ["launch.workers=2", "parallel.pipeline=2", "parallel.schedule=zero_bubble", "compile=on"],
    ["launch={with: slurm, workers: 3, nodes: 2}"],
    ["launch={with: slurm, workers: 4, nodes: 2, gpus_per_node: 8}"],
    ["launch={with: slurm, time: soon}"],
    ["launch.with=slurm", "launch.threads=8", "launch.cpus_per_worker=2"],
    ["launch={with: ray, workers: [8, 2]}"],
    ["launch={with: ray, nodes: 4, workers: 4}"],
    ["evaluate.every=10"],
    ["launch.nodes=2"],
    ["launch.with=slrum"],
    ["precision=bf61"],
    ["data.pack=yes"],
    ["data.max_length='1,024'"],
    ["data.max_length=512.0"],
    ["optimizer.lr='1e-5'"],
    ["learning_rate=1e-5"],
    ["data.max_seq_length=128"],
    ["optimizer.learning_rate=1e-4"],
    ["data.max_lenght=64"],
    ["data.train=[a/one, a/two]", "data.train.format=alpaca"],
    ["data.max_length:128"],
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=" ".join)
def test_advice_works_as_it_is_pasted(mistake: list[str], tmp_path: Path) -> None:
    nothing = ("unknown key", "not an override", "data.train is a list")  # which say nothing that an advice adds to
    before = problems(MINIMAL, mistake, tmp_path)
    assert before, "no mistake"
    for problem in before:
        assert problem.change, problem
        tried = edits(problem)
        assert tried, f"nothing to paste in: {problem.change}"
        for edit in tried:
            if "->" in edit:
                wrong, _, right = edit.partition(" -> ")
                after = problems(MINIMAL, [word.replace(f"{wrong}=", f"{right}=") for word in mistake], tmp_path)
            elif edit.endswith("="):
                key = edit[:-1]
                after = problems(MINIMAL, [word for word in mistake if not word.startswith(f"{key}=")], tmp_path)
            else:
                kept = [word for word in mistake if word != problem.where or not problem.found.startswith(nothing)]
                after = problems(MINIMAL, [*kept, edit], tmp_path)
            assert problem.found not in [other.found for other in after], (problem, edit)
