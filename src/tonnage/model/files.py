"""Find the files of a model and read what can be read without its weights.

A model is a local directory or a hub id. Everything here happens before a weight is loaded, and all that is
wrong with a model directory is reported at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ModelFiles:
    """A model on this disk: its directory and its weight files (none if weights are to be random)."""

    directory: Path
    weights: tuple[Path, ...]

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files."""
        return sum(path.stat().st_size for path in self.weights)


def find_model(model: str, *, random_weights: bool = False, tokenizer: bool = True) -> ModelFiles:
    """The files of a model directory or hub id.

    With ``random_weights`` only the configuration and the tokenizer are needed; the latter too can be left out.

    Raises:
        UserError: the directory or hub id does not exist, or files are missing; every missing file is named.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        directory = _from_hub(model, random_weights)
    problems = []
    if not (directory / "config.json").is_file():
        problems.append(
            Problem(
                where=str(directory),
                found="no config.json",
                needed="a Hugging Face model directory with a config.json",
                change="point `model` at the directory that holds the model's config.json",
            )
        )
    if tokenizer and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        problems.append(
            Problem(
                where=str(directory),
                found="no tokenizer files",
                needed=f"one of {', '.join(TOKENIZER_FILES)}",
                change="save the tokenizer beside the model (tokenizer.save_pretrained)",
            )
        )
    weights: tuple[Path, ...] = ()
    if not random_weights:
        weights, missing = _weight_files(directory)
        problems += missing
    if problems:
        raise UserError(*problems)
    return ModelFiles(directory, weights)


def _weight_files(directory: Path) -> tuple[tuple[Path, ...], list[Problem]]:
    if (directory / INDEX_FILE).is_file():
        names = sorted(set(json.loads((directory / INDEX_FILE).read_text())["weight_map"].values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            return (), [
                Problem(
                    where=str(directory / INDEX_FILE),
                    found=f"{len(missing)} of {len(names)} weight files missing: {', '.join(missing[:5])}",
                    needed="every file that the index names",
                    change="download the model again",
                )
            ]
        return tuple(directory / name for name in names), []
    if (directory / SINGLE_FILE).is_file():
        return (directory / SINGLE_FILE,), []
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    return (), [
        Problem(
            where=str(directory),
            found=f"no safetensors weights (only {', '.join(pickled[:3])})" if pickled else "no weights",
            needed=f"{SINGLE_FILE} or {INDEX_FILE} with its shards",
            change="save it again with safetensors (pickled weights are not read)"
            if pickled
            else "add the weights, or set `init: random` to train from scratch",
        )
    ]


def _from_hub(model: str, random_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", "*.model", "*.jinja", "*.txt"] + ([] if random_weights else ["*.safetensors"])
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HFValidationError, RepositoryNotFoundError) as error:
        found = f"no such directory and no such hub model ({type(error).__name__})"
    except (LocalEntryNotFoundError, OSError) as error:
        found = f"no such directory, and the hub cannot be reached ({type(error).__name__})"
    raise UserError(
        Problem(
            where=f"model: {model}",
            found=found,
            needed="a local model directory, or a hub id like EleutherAI/pythia-160m",
            change="check the spelling, or download the model and give its directory",
        )
    )


def read_model_config(files: ModelFiles, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's configuration.

    Raises:
        UserError: config.json cannot be read, or its model type is unknown to the installed transformers.
    """
    from transformers import AutoConfig, PreTrainedConfig

    try:
        config = AutoConfig.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(
            Problem(
                where=str(files.directory / "config.json"),
                found=str(error).strip().split("\n")[0],
                needed="a configuration that the installed transformers knows",
                change="mend config.json, or update transformers",
            )
        ) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def read_tokenizer(files: ModelFiles, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        UserError: the tokenizer files cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        tokenizer = AutoTokenizer.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(
            Problem(
                where=str(files.directory),
                found=f"tokenizer does not load: {str(error).strip().split(chr(10))[0]}",
                needed="tokenizer files that the installed transformers can read",
                change="save the tokenizer beside the model (tokenizer.save_pretrained)",
            )
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def positions_of(config: PreTrainedConfig) -> int | None:
    """Tokens that a model has positions for, ``None`` where it does not say."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return positions if isinstance(positions, int) else None


def check_fit(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int, *, resizable: int = 0
) -> None:
    """Check that tokenizer, model and ``max_length`` belong together.

    ``resizable``: number of tokens that we added ourselves; the embedding will grow for them.

    Raises:
        UserError: the tokenizer has ids the embedding lacks, or ``max_length`` is beyond the model's positions.
    """
    problems = []
    highest = max(tokenizer.get_vocab().values()) - resizable
    if highest >= config.vocab_size:
        problems.append(
            Problem(
                where="model",
                found=f"the tokenizer's highest token id is {highest}, the model's vocabulary has {config.vocab_size}",
                needed=f"a vocabulary of at least {highest + 1}",
                change="use the tokenizer that was made for this model",
            )
        )
    positions = positions_of(config)
    if positions is not None and max_length > positions:
        problems.append(
            Problem(
                where="data.max_length",
                found=f"max_length {max_length}",
                needed=f"at most {positions}, the positions that the model knows",
                change=f"data.max_length={positions}",
            )
        )
    if problems:
        raise UserError(*problems)
