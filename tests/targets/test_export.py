"""Exports for other programs, by the command: the page's own lines, what is refused, and that what differs is found."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from forked import tonnage
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint import compare
from tonnage.checkpoint.verify import verify
from tonnage.config.schema import Adapter
from tonnage.decide.handing import only_merged
from tonnage.errors import UserError
from tonnage.targets.commands import Servable, commands

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
ROWS = re.findall(r"^\| (\S+) \| `(tonnage export [^`]*)` \| (.*) \|$", PAGE, re.MULTILINE)
CONVERTER = """
import sys
assert sys.argv[2:4] == ["--outfile", sys.argv[3]] and sys.argv[4] == "--outtype", sys.argv
open(sys.argv[3], "wb").write(b"GGUF")
"""
"""Stands for llama.cpp's where only its being called is looked at."""


def write_config(folder: Path, **changes: Any) -> Path:
    config: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 192,
            "template": "plain",
            "cache": str(folder / "c"),
        },
        "batch": {"sequences": 8},
        "steps": 1,
        "optimizer": {"lr": 1e-3},
        "launch": {"threads": 1},
        "precision": "fp32",
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, one that trained an adapter, and what stands for a clone of llama.cpp."""
    folder = tmp_path_factory.mktemp("exports")
    config = llama_config(num_hidden_layers=1, initializer_range=0.2)
    write_model(folder / "model", config)
    (folder / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 256, "temperature": 0.6, "top_p": 0.9})  # refused by transformers: nothing is drawn
    )
    write_rows(folder / "rows.jsonl", alpaca_rows(40))
    (folder / "llama.cpp").mkdir()
    (folder / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    for output, more in (("runs/gsm8k", {}), ("runs/lora", {"adapter": {"rank": 3}})):
        result = tonnage("train", write_config(folder, output=str(folder / output), **more), cwd=folder)
        assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_lines_of_the_page_run_and_print_the_programs_command(row: tuple[str, str, str], folder: Path) -> None:
    _, line, then = row
    converts = "--converter" in line
    more = ["--no-compare"] if converts else []  # what stands for the converter writes no model
    result = tonnage(*shlex.split(line)[1:], *more, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    told = [line.removeprefix("Serve it: ") for line in result.stdout.splitlines() if line.startswith("Serve it: ")]
    shown = re.findall(r"`([^`]*)`", then.replace("-bf16", "-f32"))  # the run of the page is of another precision
    exact = " --dtype float32" if "vllm" in then else ""
    assert told == [f"{command}{exact}" if "vllm serve" in command else command for command in shown]
    directory = folder / shlex.split(line)[3]
    assert verify(directory) == []
    assert "## Serve it" in (directory / "README.md").read_text()
    if converts:
        assert {path.name for path in directory.iterdir()} == {"README.md", "checksums.json", "gguf-f32.gguf"}
        assert "AutoModel" not in (directory / "README.md").read_text()
    else:
        assert "logits: in transformers those of the run" in result.stdout
    if (directory / "Modelfile").is_file():
        text = (directory / "Modelfile").read_text()
        assert text.splitlines()[1] == "FROM ."
        assert 'PARAMETER stop "<|end|>"' in text
        assert "PARAMETER temperature 0.6" in text
        assert "PARAMETER num_ctx 512" in text


@pytest.mark.slow
def test_what_another_program_cannot_read_is_refused_before_anything_is_written(folder: Path) -> None:
    for words, found, change in (
        (("lora", "--for", "ollama"), "an adapter, and Ollama reads whole models", "--merge --for ollama"),
        (("gsm8k", "--for", "gguf"), "no converter of llama.cpp", "git clone --depth 1"),
        (("gsm8k", "--for", "gguf", "--converter", "nowhere"), "no nowhere", "git clone"),
        (("gsm8k", "--for", "vllm", "--converter", "llama.cpp"), "vLLM reads this model as it is", "leave --converter"),
    ):
        run, *rest = words
        result = tonnage("export", f"runs/{run}", "never", *rest, cwd=folder, PATH=str(Path(sys.executable).parent))
        assert result.returncode == 2, words
        assert found in result.stderr, result.stderr
        assert change in result.stderr, result.stderr
        assert not (folder / "never").exists()
    script = folder / "refuses.py"
    script.write_text("import sys\nsys.exit('NotImplementedError: BPE pre-tokenizer was not recognized')\n")
    result = tonnage("export", "runs/gsm8k", "never", "--for", "gguf", "--converter", script, cwd=folder)
    assert "BPE pre-tokenizer was not recognized" in result.stderr
    assert result.returncode == 2
    assert not (folder / "never").exists()
    merged = tonnage("export", "runs/lora", "merged", "--merge", "--for", "ollama", cwd=folder)
    assert merged.returncode == 0, merged.stderr
    adapter = tonnage("export", "runs/lora", "adapter", "--for", "vllm", cwd=folder)
    assert "--enable-lora --max-lora-rank 8 --lora-modules adapter=adapter" in adapter.stdout


@pytest.mark.slow
def test_an_adapter_names_its_model_from_wherever_it_is_used(folder: Path, tmp_path: Path) -> None:
    """Also one that was trained further, by words that are right in one directory only."""
    config = write_config(folder, output="runs/further", model="runs/near/export", adapter={"rank": 3})
    near = tonnage("train", config, "output=runs/near", "model=model", cwd=folder)
    assert near.returncode == 0, near.stderr
    further = tonnage("train", config, "adapter=auto", cwd=folder)
    assert further.returncode == 0, further.stderr
    for run in ("near", "further"):
        shown = tonnage("export", f"runs/{run}", f"{run}-for-vllm", "--for", "vllm", cwd=folder).stdout
        assert f"vllm serve {folder / 'model'} --enable-lora" in shown
        evaluated = tonnage("eval", folder / "runs" / run, "--data", folder / "rows.jsonl", cwd=tmp_path)
        assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.parametrize(
    ("adapter", "model", "has"),
    [
        ({}, {}, []),
        ({"rank": 512}, {}, []),
        ({"rank": 320, "init": "pissa"}, {}, ["a rank above 512"]),
        ({"also": ["norms"]}, {}, ["weights trained whole"]),
        ({"kind": "dora"}, {"adapts_experts": True}, ["additions to stacked experts", "lengths of rows (DoRA)"]),
        ({"kind": "oft", "oft_block_size": 8}, {}, ["rotations of inputs (OFT)"]),
        ({"patterns": [{"match": "q_proj", "rank": 2}]}, {}, ["ranks by pattern"]),
        ({}, {"embedding_additions": 1}, ["additions to an embedding"]),
    ],
)
def test_what_vllm_does_not_compute_of_an_adapter(adapter: Any, model: Any, has: list[str]) -> None:
    profile: Any = SimpleNamespace(**{"adapts_experts": False, "embedding_additions": 0, "tower": None} | model)
    assert only_merged(Adapter.model_validate(adapter), profile) == has


def trained(model: Any) -> compare.RunParameters:
    """The parameters of a model, as a run's."""
    from tonnage.model.build import on_meta

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return compare.RunParameters(on_meta(model.config, torch.float32), list(values), values.__getitem__)


def test_other_logits_are_found(tmp_path: Path) -> None:
    """A weight that changed, and a tie that config.json does not have."""
    directory = write_model(tmp_path / "model", llama_config(num_hidden_layers=1, initializer_range=0.2))
    run = trained(compare.load_plainly(directory))
    assert "0 apart at most" in compare.compare(run, directory)
    weights = load_file(directory / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    changed = {**weights, name: weights[name] * 1.01}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"logits in transformers that are .* from the run's"):
        compare.compare(run, directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match="logits in transformers"):
        compare.compare(run, directory)
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(UserError, match="transformers"):
        compare.compare(run, directory)


def test_too_little_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    run = trained(compare.load_plainly(directory))
    monkeypatch.setattr(compare, "free_memory", lambda: 10**8)
    assert compare.compare(run, directory).endswith("GB of memory, and 0.1 are free")


def test_commands_quote_what_a_shell_would_read() -> None:
    assert commands("mlx", Servable("my models/a'b", "bf16")) == ["mlx_lm.server --model 'my models/a'\"'\"'b'"]
    assert commands("vllm", Servable("out", "bf16", base="o/m", rank=48))[0].endswith(
        "--max-lora-rank 64 --lora-modules out=out"
    )
    assert Servable("./Größe X/", "").name == "gr-e-x"


@pytest.mark.slow
def test_vllm_loads_an_export(folder: Path) -> None:
    vllm = pytest.importorskip("vllm")
    tonnage("export", "runs/gsm8k", "for-vllm", "--for", "vllm", "--dtype", "bf16", cwd=folder)
    answers = vllm.LLM(str(folder / "for-vllm")).generate(["a"], vllm.SamplingParams(temperature=0, max_tokens=8))
    assert len(answers[0].outputs[0].token_ids) <= 8
