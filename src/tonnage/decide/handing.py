"""An export for another program: its files beside the model, compared with the run, and the command that serves it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import read_config
from tonnage.data.prompt import stop_tokens
from tonnage.data.text.choice import of_tokenizer
from tonnage.decide.quantized_export import quantize_export
from tonnage.errors import user_error
from tonnage.rundir.directory import RunDirectory
from tonnage.targets.commands import PROGRAMS, RANKS, Servable, commands

if TYPE_CHECKING:
    from tonnage.checkpoint.compare import RunParameters
    from tonnage.config.schema import Adapter
    from tonnage.kernels.fake_quantized import Scheme
    from tonnage.planning.profile import ModelProfile

KEPT = ("README.md", "Modelfile", "LICENSE", "LICENSE.txt")
"""Beside GGUF files, which hold the rest."""
ROUNDED = {"fp32": 2e-3, "fp16": 3e-2, "bf16": 6e-2}
"""How far llama.cpp's logits may be off, by the type of the weights: it computes with activations of that type."""
SHARD_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Wishes:
    """What whoever asks for an export may choose."""

    dtype: str = "auto"
    shard_bytes: int = SHARD_BYTES
    merge: bool = False
    """Of a run that trains an adapter: the whole model."""
    target: str = "transformers"
    """The program that it is for."""
    converter: str | None = None
    """What writes GGUF."""
    compares: bool = False
    """Whether logits are compared with the run's."""
    quantized: bool = False
    """Whether weights that were rounded in training are written so."""

    def __post_init__(self) -> None:
        assert self.target in PROGRAMS


PLAIN = Wishes()


@dataclass(frozen=True)
class Handing:
    """For which program an export is made, and how."""

    wishes: Wishes
    converter: list[str]
    """The command that writes GGUF; empty where none is written."""
    context: int
    """Tokens that Ollama is told to hold, or fewer where the model has fewer positions."""
    scores: bool
    """Whether the model gives scores, which no program here serves."""
    scheme: Scheme | None
    """In which weights are written, if not as they are."""


def converter_of(wishes: Wishes, run: Path, directory: str, architecture: str, *, is_adapter: bool) -> list[str]:
    """The command that converts for a program, if there has to be one; an export that cannot be made is refused before
    anything is written.

    Raises:
        UserError: the program reads no adapters, or GGUF is needed and nothing converts to it.
    """
    from tonnage.targets.gguf import find_converter
    from tonnage.targets.ollama import READS

    target = wishes.target
    if is_adapter and target not in ("transformers", "vllm"):
        raise user_error(
            where=f"--for {target}",
            found=f"an adapter, and {PROGRAMS[target]} reads whole models",
            needed="--merge, which adds the adapter to its model",
            change=f"tonnage export {run} {directory} --merge --for {target}",
        )
    if target == "gguf" or (target == "ollama" and architecture not in READS):
        return find_converter(wishes.converter, run=str(run), directory=directory, target=target)
    if wishes.converter is not None:
        raise user_error(
            where="--converter",
            found=f"a converter to GGUF, and {PROGRAMS[target]} reads this model as it is",
            needed="--for gguf, or a model that Ollama does not read",
            change="leave --converter out",
        )
    return []


def finish(handing: Handing, directory: str, dtype: str, temporary: Path, trained: RunParameters) -> list[str]:
    """Complete an export in its temporary directory; returns lines for the user."""
    from tonnage.checkpoint.compare import compare

    notes = [compare(trained, temporary)] if handing.wishes.compares else []
    if handing.scheme is not None:
        notes.append(quantize_export(temporary, handing.scheme))
    name = ""
    if handing.converter:
        name, lines = _converted(handing, temporary, trained, directory, dtype)
        notes += lines
    if handing.wishes.target == "ollama":
        notes += _write_modelfile(handing, temporary, name, directory)
    if handing.converter:
        for path in temporary.iterdir():
            if path.is_file() and path.suffix != ".gguf" and path.name not in KEPT:
                path.unlink()
    if (temporary / "README.md").is_file() and not handing.scores:
        _complete_card(temporary / "README.md", handing.wishes.target, Servable(".", dtype, gguf=name))
    return notes


def only_merged(adapter: Adapter, model: ModelProfile) -> list[str]:
    """What a run's adapter has that vLLM and llama.cpp do not compute, so that they take it merged into its model."""
    has = {
        "additions to stacked experts": model.adapts_experts,
        "additions to an embedding": model.embedding_additions > 0,
        "additions to a vision tower": model.tower is not None and model.tower.trained > 0,
        "weights trained whole": bool(adapter.also),
        "lengths of rows (DoRA)": adapter.kind == "dora",
        "rotations of inputs (OFT)": adapter.kind == "oft",
        "ranks by pattern": bool(adapter.patterns),
        f"a rank above {RANKS[-1]}": adapter.kind != "oft" and adapter.exported_rank > RANKS[-1],
    }
    return [what for what, is_so in has.items() if is_so]


def next_of(run: RunDirectory) -> str:
    """What to do with the model of a run that is over: commands, or words where none of them takes it."""
    if read_config(run.config, [], check_files=False).objective.scores:
        return "AutoModelForSequenceClassification of transformers loads the model, and scores texts"
    return f"tonnage chat {run.word}    tonnage eval {run.word} --data FILE"


def serving(run: RunDirectory, directory: str, target: str, dtype: str, *, merge: bool) -> list[str]:
    """The commands that serve what was exported to ``directory``; none where it gives scores."""
    from tonnage.model.adapter_files import CONFIG as ADAPTER
    from tonnage.model.stored import read_json_object

    config = read_config(run.config, [], check_files=False)
    if config.objective.scores:
        return []
    chosen = config.dtype if dtype == "auto" else dtype
    gguf = next((path.name for path in sorted(Path(directory).glob("*.gguf"))), "")
    if isinstance(config.adapter, str) or merge:
        return commands(target, Servable(directory, chosen, gguf=gguf))
    described = read_json_object(Path(directory) / ADAPTER)
    base, revision = str(described["base_model_name_or_path"]), described.get("revision") or ""
    return commands(target, Servable(directory, chosen, base, config.adapter.exported_rank, gguf, revision))


def _complete_card(card: Path, target: str, exported: Servable) -> None:
    lines = "\n".join(commands(target, exported))
    program = PROGRAMS[target] if target != "transformers" else "tonnage, for trying it"
    text = f"## Serve it\n\nWith {program}, in this directory:\n\n```\n{lines}\n```\n\n"
    written = card.read_text(encoding="utf-8")
    if target in ("gguf", "ollama") and exported.gguf:  # transformers does not read it as the card says
        written = re.sub(r"## Use\n\n```python\n.*?```\n\n", "", written, flags=re.DOTALL)
        written = written.replace("library_name: transformers", "library_name: gguf", 1)
    card.write_text(written.replace("## Data\n\n", f"{text}## Data\n\n", 1), encoding="utf-8")


def _write_modelfile(handing: Handing, directory: Path, gguf: str, where: str) -> list[str]:
    from tonnage.model.files import find_model, positions_of, read_tokenizer, read_whole_config
    from tonnage.model.stored import read_json_object
    from tonnage.targets.ollama import MODELFILE, go_template_of, modelfile

    files = find_model(str(directory))
    tokenizer = read_tokenizer(files)
    template, notes = go_template_of(of_tokenizer(tokenizer), where)
    stops = [str(tokenizer.convert_ids_to_tokens(token)) for token in stop_tokens(tokenizer)]
    positions = positions_of(read_whole_config(files).get_text_config())
    text = modelfile(
        f"./{gguf}" if gguf else ".",
        template,
        stops=stops,
        generation=read_json_object(directory / "generation_config.json"),
        context=handing.context if positions is None else min(positions, handing.context),
        title=Servable(where, "").name,
    )
    (directory / MODELFILE).write_text(text, encoding="utf-8")
    return notes


def _converted(
    handing: Handing, directory: Path, trained: RunParameters, where: str, dtype: str
) -> tuple[str, list[str]]:
    """Convert to GGUF and read that back; the name of the first file, and lines for the user."""
    from tonnage.targets.gguf import TYPES, convert

    stem = f"{Servable(where, dtype).name}-{TYPES[dtype]}"
    shard_bytes = handing.wishes.shard_bytes if handing.wishes.shard_bytes != SHARD_BYTES else None
    files = convert(handing.converter, directory, f"{stem}.gguf", dtype, shard_bytes)
    name = files[0].name
    if not handing.wishes.compares:
        return name, []
    return name, [_read_back(directory, name, trained, dtype)]


def _read_back(directory: Path, name: str, trained: RunParameters, dtype: str) -> str:
    """Compare a GGUF file with the model it was made from, with a library that is installed; a line for the user."""
    from tonnage.checkpoint.compare import load_plainly, logits_of, prompts, told

    if missing := trained.enough_memory():
        return f"{name}: {missing}"
    if find_spec("llama_cpp") is None and find_spec("gguf") is None:
        return f"{name}: not read back, for neither llama-cpp-python nor gguf is installed (pip install gguf)"
    plain = load_plainly(directory)
    token_rows = prompts(plain.get_input_embeddings().weight.shape[0])
    expected = logits_of(plain, token_rows)
    del plain
    if find_spec("llama_cpp") is not None:
        logits = _in_llama_cpp(directory / name, token_rows)
        return told(logits, expected, directory / name, "llama.cpp", ROUNDED[dtype])
    from transformers import GgufConfig

    how: dict[str, Any] = {"gguf_file": name, "quantization_config": GgufConfig(gguf_file=name, dequantize=True)}
    read = load_plainly(directory, **how)
    return told(logits_of(read, token_rows), expected, directory / name, "transformers (of the GGUF file)")


def _in_llama_cpp(path: Path, token_rows: list[list[int]]) -> list[Any]:
    """Logits, fp32 (tokens, vocabulary), of llama.cpp's Python binding, with keys and values in fp32."""
    import torch
    from llama_cpp import GGML_TYPE_F32, Llama

    longest = max(map(len, token_rows))
    options = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "logits_all": True, "verbose": False}
    model = Llama(str(path), n_ctx=longest + 8, n_threads=torch.get_num_threads(), **options)
    logits = []
    for tokens in token_rows:
        model.reset()
        model.eval(tokens)
        logits.append(torch.from_numpy(model.scores[: len(tokens)].copy()).float())
    model.close()
    return logits
