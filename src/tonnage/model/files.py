"""Find the files of a model and read what can be read without its weights.

A model is a local directory or a hub id. Everything here happens before a weight is loaded, and all that is
wrong with a model directory is reported at once. What a directory says is a stranger's word: it is read within bounds,
nothing outside of the directory is read on its behalf, and no code of its own runs unless the user said so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import Problem, UserError, user_error
from tonnage.model import adapter_files
from tonnage.model.adapter_files import AdapterFiles, read_adapter
from tonnage.model.code import check_config_code, named_code, refused, without_code
from tonnage.model.rope import has_rope, scale, set_positions
from tonnage.model.stored import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", TOKENIZER_CONFIG)
PASSED_OVER = (
    *TOKENIZER_FILES,
    *("chat_template.jinja", "chat_template.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("vocab.txt", GENERATION),
)
"""Files that change what a tokenizer does. transformers ignores those that are directories."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.npz", "*.ckpt")
FILE_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]{1,240}\.safetensors")
COMMIT = re.compile(r"[0-9a-f]{40}")
MOST = (
    (r"vocab_size", 10_000_000),
    (r"labels", 100_000),
    (r"layer|block|expert|head|(^|_)groups?(_|$)", 10_000),
)
"""What configurations and models make lists of, or loop over (a pattern of keys), and the most that any model may
have."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on this disk: its directory and its weight files (none if weights are to be random)."""

    directory: Path
    weights: tuple[Path, ...]
    index: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor -> name of the file that holds it, where there is an index of several files."""
    commit: str | None = None
    """Of the hub's repository, 40 hexadecimal digits; None for a local directory."""

    adapter: AdapterFiles | None = None
    """Additions to these weights, where the model was given as the directory of an adapter."""
    tokenizer: Path | None = None
    """Directory of the tokenizer, where that is another."""

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files."""
        return sum(path.stat().st_size for path in self.weights)


def find_model(
    model: str,
    *,
    revision: str | None = None,
    random_weights: bool = False,
    tokenizer: bool = True,
    code: bool = False,
) -> ModelFiles:
    """The files of a model directory or hub id; of the latter at a ``revision``: a branch, tag or commit; None is main.

    With ``random_weights`` only the configuration and the tokenizer are needed; the latter too can be left out. With
    ``code`` the Python files of a hub model are fetched too.

    Raises:
        UserError: the directory, hub id or revision does not exist, or files are missing or cannot be read; every one
            of them is named.
    """
    directory, commit = Path(model).expanduser(), None
    if _is_directory(directory):
        if revision is not None:
            needed = "a hub id: a local directory is as it is"
            change = "leave revision out, or give the model's hub id"
            raise user_error(f"a revision of the local directory {model}", needed, change, "revision")
    else:
        directory = _from_hub(model, revision, random_weights=random_weights, code=code)
        commit = directory.name if COMMIT.fullmatch(directory.name) else None
    if not (directory / CONFIG).is_file() and (directory / adapter_files.CONFIG).is_file():
        return _adapted(directory, random_weights=random_weights, tokenizer=tokenizer, code=code)
    problems = []
    if not (directory / CONFIG).is_file():
        problems.append(
            Problem(
                where=str(directory),
                found="no config.json",
                needed="a Hugging Face model directory with a config.json, or an adapter's with an adapter_config.json",
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
    index: Mapping[str, str] = {}
    if not random_weights:
        try:
            weights, index = _weight_files(directory)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return ModelFiles(directory, weights, index, commit)


def _adapted(directory: Path, *, random_weights: bool, tokenizer: bool, code: bool) -> ModelFiles:
    """The files of the model that an adapter belongs to, with the adapter's; its own tokenizer comes first."""
    _check_inside(directory, [adapter_files.CONFIG, adapter_files.WEIGHTS, adapter_files.POSITIONS])
    adapter = read_adapter(directory)
    own = any((directory / name).is_file() for name in TOKENIZER_FILES)
    base, revision = adapter.base, adapter.revision
    if (Path(base) / adapter_files.CONFIG).is_file() and not (Path(base) / CONFIG).is_file():
        raise user_error(
            where=str(directory / adapter_files.CONFIG),
            found=f"an adapter of an adapter ({base})",
            needed="the adapter of a model",
            change="merge the first one into its model: tonnage export RUN DIR --merge",
        )
    if Path(base).is_dir():
        revision = None
    files = find_model(
        base, revision=revision, random_weights=random_weights, tokenizer=tokenizer and not own, code=code
    )
    return replace(files, adapter=adapter, tokenizer=directory if own else None)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long for any
        return False


def _weight_files(directory: Path) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    if (directory / INDEX_FILE).exists():
        _check_inside(directory, [INDEX_FILE])
        index = _read_index(directory / INDEX_FILE)
        names = sorted(set(index.values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if dangling := [directory / name for name in missing if (directory / name).is_symlink()]:
            raise UserError(*map(_dangling, dangling[:5]))
        if missing:
            raise user_error(
                where=str(directory / INDEX_FILE),
                found=f"{len(missing)} of {len(names)} weight files missing: {', '.join(missing[:5])}",
                needed="every file that the index names",
                change="download the model again",
            )
        _check_inside(directory, names)
        return tuple(directory / name for name in names), index
    if (directory / SINGLE_FILE).is_file():
        _check_inside(directory, [SINGLE_FILE])
        return (directory / SINGLE_FILE,), {}
    if (file := directory / SINGLE_FILE).is_symlink() or (file := directory / INDEX_FILE).is_symlink():
        raise UserError(_dangling(file))
    others = sorted(path.name for pattern in OTHER_WEIGHTS for path in directory.glob(pattern))
    raise user_error(
        where=str(directory),
        found=f"no safetensors weights (only {', '.join(others[:3])})" if others else "no weights",
        needed=f"{SINGLE_FILE} or {INDEX_FILE} with its shards",
        change="save it again with safetensors (other files are not read)"
        if others
        else "add the weights, or set `init: random` to train from scratch",
    )


def _dangling(link: Path) -> Problem:
    """What is said of a link to a file that is not there."""
    return Problem(
        where=str(link),
        found=f"a link to {link.readlink()}, where no file is",
        needed="weights",
        change="put the file there, or download the model again (a copied hub cache has links into its blobs)",
    )


def _read_index(path: Path) -> Mapping[str, str]:
    """Name of a tensor -> name of a file beside the index."""
    weight_map = read_json_object(path).get("weight_map")
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    wrong = [name for name in files if not (isinstance(name, str) and FILE_NAME.fullmatch(name))]
    if wrong or not files:
        observed = f"an index that names {str(wrong[0])[:80]!r}" if wrong else "an index that names no file"
        raise user_error(
            where=str(path),
            found=observed,
            needed="weight_map: the name of every tensor and of a .safetensors file in the same directory",
            change="download the model again",
        )
    assert isinstance(weight_map, dict)
    return weight_map


def _check_inside(directory: Path, names: list[str]) -> None:
    """Refuse links out of a model directory; the hub's cache, whose snapshots link to its blobs, is one directory."""
    inside = [whole := directory.resolve()]
    inside += [parent.parent / "blobs" for parent in whole.parents if parent.name == "snapshots"]
    for name in names:
        try:
            target = (directory / name).resolve()
        except (OSError, RuntimeError):  # a link to itself
            target = Path("/")
        if not any(target.is_relative_to(place) for place in inside):
            raise user_error(
                where=str(directory / name),
                found="a link out of the model directory",
                needed="files in the directory itself",
                change="copy the file that it points to, or give the directory that holds it",
            )


def _from_hub(model: str, revision: str | None, *, random_weights: bool, code: bool, key: str = "model") -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.model", "*.jinja", "*.txt"] + ([] if random_weights else ["*.safetensors"])
    needed = "a local model directory, or a hub id like EleutherAI/pythia-160m"
    change = "check the spelling, or download the model and give its directory"
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns + ["*.py"] * code))
    except RevisionNotFoundError as error:
        observed = f"no revision {revision} of this hub model ({type(error).__name__})"
        needed = "a branch, tag or commit"
        change = "write one that the model's page lists under Files and versions"
    except GatedRepoError:
        observed, needed = "a hub model that must be asked for", "a user of the hub whom its owner has let in"
        change = f"ask on https://huggingface.co/{model}, then log in: hf auth login"
    except (HFValidationError, RepositoryNotFoundError) as error:
        observed = f"no such directory and no such hub model ({type(error).__name__})"
    except (LocalEntryNotFoundError, OSError) as error:
        observed = f"no such directory, and the hub cannot be reached ({type(error).__name__})"
    raise user_error(where=f"{key}: {model}", found=observed, needed=needed, change=change)


def find_tokenizer(name: str) -> Path:
    """The directory of a tokenizer that is not the model's own; of one on the hub, a copy on this disk.

    Raises:
        UserError: there is none of that name, or it holds no tokenizer.
    """
    directory = Path(name).expanduser()
    if not _is_directory(directory):
        directory = _from_hub(name, None, random_weights=True, code=False, key="tokenizer")
    if not any((directory / file).is_file() for file in TOKENIZER_FILES):
        problem = Problem(
            where="tokenizer",
            found=f"no tokenizer files in {directory}",
            needed=f"one of {', '.join(TOKENIZER_FILES)}",
            change="name the directory of a tokenizer, or leave tokenizer out for the model's own",
        )
        raise UserError(problem)
    return directory


def read_model_config(files: ModelFiles, *, trust_remote_code: bool = False, scores: bool = False) -> PreTrainedConfig:
    """The configuration of the model that is trained. Of a model of more than text, that is its text model's; with
    ``scores``, that of the family's scorer.

    Raises:
        UserError: as ``read_whole_config``; it is a scorer's, or, with ``scores``, the family has none.
    """
    from tonnage.model.scorer import check_causal, make_scorer
    from tonnage.model.towers import text_config

    whole = read_whole_config(files, trust_remote_code=trust_remote_code)
    config = text_config(whole)
    if files.adapter is not None and files.adapter.positions:
        set_positions(config, files.adapter.positions, str(files.adapter.directory / adapter_files.POSITIONS))
    if files.adapter is not None and files.adapter.scores != scores:
        raise user_error(
            where=str(files.adapter.directory),
            found=f"an adapter of a {'causal language' if scores else 'reward'} model",
            needed=f"an adapter of a {'reward' if scores else 'causal language'} model",
            change="merge it first, with peft or tonnage export --merge"
            if scores
            else "choose another model; to train its scores: objective: reward",
        )
    if not scores:
        check_causal(config, str(files.directory))
        return config
    if type(config) is not type(whole):
        raise user_error(
            where=str(files.directory),
            found=f"a {whole.model_type}, a model of more than text",
            needed="objective.kind reward: a model of text alone, whose family has a head of scores",
            change="choose a model of text, or another objective",
        )
    make_scorer(config)
    return config


def read_whole_config(files: ModelFiles, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """All of the model's configuration. It names code of its own (``auto_map``) only if that may run.

    Raises:
        UserError: config.json cannot be read, its model type is unknown to the installed transformers, or what it says
            cannot be.
    """
    from transformers import AutoConfig, PreTrainedConfig

    path = files.directory / CONFIG
    described = read_json_object(path)
    problems = list(_impossible(described, path))
    if not isinstance(described.get("model_type"), str) and named_code(described, "AutoConfig") is None:
        observed = "no model_type" if "model_type" not in described else "a model_type that is no text"
        needed = "the family of the model, such as llama"
        problems.append(Problem(observed, needed, "use the config.json that came with the model", str(path)))
    if problems:
        raise UserError(*problems)
    if not trust_remote_code:
        check_config_code(described, path)
    try:
        config = AutoConfig.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # a stranger's values meet the classes of 200 families
        raise user_error(
            where=str(path),
            found=_first_line(error),
            needed="a configuration that the installed transformers knows",
            change="mend config.json, or update transformers",
        ) from error
    assert isinstance(config, PreTrainedConfig)
    for section in (config, *filter(None, (getattr(config, name, None) for name in config.sub_configs))):
        section._attn_implementation = None  # a file may name kernels of a hub repository, which are code
        section._experts_implementation = None
    return config if trust_remote_code else without_code(config, path)


def read_model(
    model: str,
    *,
    revision: str | None = None,
    random_weights: bool = False,
    tokenizer: bool = True,
    trust_remote_code: bool = False,
    untied: bool = False,
    scores: bool = False,
    rope: Mapping[str, Any] | None = None,
) -> tuple[ModelFiles, PreTrainedConfig]:
    """The files of a model and its configuration; ``untied``, it has a head of its own whatever the files say;
    ``scores``, it is the family's scorer; ``rope``, how its positions are scaled, if they are. If an adapter has a
    larger embedding, the vocabulary is the adapter's.

    Raises:
        UserError: as ``find_model``, ``read_model_config`` and ``rope.scale``.
    """
    files = find_model(
        model, revision=revision, random_weights=random_weights, tokenizer=tokenizer, code=trust_remote_code
    )
    config = read_model_config(files, trust_remote_code=trust_remote_code, scores=scores)
    if rope is not None:
        scale(config, rope)
    if untied:
        config.tie_word_embeddings = False
    if files.adapter is not None:  # which may have been trained with more tokens
        config.vocab_size = max(config.vocab_size, files.adapter.vocabulary)
    return files, config


def _impossible(described: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Numbers that would keep a machine busy for hours before anything noticed."""
    nested = [(f"{name}.", value) for name, value in described.items() if isinstance(value, dict)]
    for prefix, values in [("", described), *nested]:
        for name, value in values.items():
            most = next((number for pattern, number in MOST if re.search(pattern, name)), None)
            is_size = name != "vocab_size" and re.search(r"size|dim", name) is not None
            if most is None or is_size or not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if abs(value) > most:
                yield Problem(
                    where=str(path),
                    found=f"{prefix}{name} is {str(value)[:40]}",
                    needed=f"at most {most:,}",
                    change="use the config.json that came with the model",
                )


def read_tokenizer(files: ModelFiles, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        UserError: the tokenizer files cannot be read, or only code of their own can read them.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    directory = files.tokenizer or files.directory
    _check_files(directory)
    path, named = directory / TOKENIZER_CONFIG, None
    if path.exists():
        named = named_code(read_json_object(path), "AutoTokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        _try_out(tokenizer)
    except BaseException as error:  # the tokenizers library panics in ways that are no exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        if named is not None and not trust_remote_code and "custom code" in str(error):
            raise refused(named, path) from error
        raise user_error(
            where=str(files.directory),
            found=f"tokenizer does not load: {_first_line(error)}",
            needed="tokenizer files that the installed transformers can read",
            change="save the tokenizer beside the model (tokenizer.save_pretrained)",
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    templates = tokenizer.chat_template
    listed = list(templates.values()) if isinstance(templates, dict) else [templates]
    if any(not isinstance(one, str | None) for one in listed):
        raise user_error(
            where=str(files.directory),
            found="a chat template that is no text",
            needed="a Jinja template, or several by name",
            change="mend chat_template in tokenizer_config.json",
        )
    if not tokenizer.get_vocab():
        raise user_error("a tokenizer without tokens", "a vocabulary", where=str(files.directory))
    return tokenizer


def _check_files(directory: Path) -> None:
    """Refuse what has the name of a tokenizer's file and is no file: transformers would ignore it."""
    for name in PASSED_OVER:
        path = directory / name
        if os.path.lexists(path) and not path.is_file():
            observed = "a link that leads nowhere" if not path.exists() else "no regular file"
            raise user_error(observed, f"a file, as {name} is one", "put the file there, or take this away", str(path))


def _try_out(tokenizer: PreTrainedTokenizerBase) -> None:
    """Use the tokenizer once: transformers takes any value from its files, and only use shows which it cannot
    handle."""
    tokenizer.decode(tokenizer("a")["input_ids"])
    _ = tokenizer.all_special_ids, tokenizer.added_tokens_decoder


def positions_of(config: PreTrainedConfig) -> int | None:
    """Tokens that a model has positions for, ``None`` where it does not say."""
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return positions if isinstance(positions, int) else None


def _first_line(error: BaseException) -> str:
    """What an error of a library says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else ""
    return message[:300] or type(error).__name__


def check_fit(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Check that tokenizer, model and ``max_length`` belong together.

    Raises:
        UserError: no part of the model is one of text, the tokenizer has ids the embedding lacks, or ``max_length`` is
            beyond the model's positions.
    """
    if not isinstance(getattr(config, "vocab_size", None), int):  # of a model of images and text, it is a part's
        raise user_error(
            where=f"model type {config.model_type}",
            found="a model of more than text, whose text transformers has no causal language model for",
            needed="a model of text, or one whose text model is of a known family",
            change="choose a decoder-only text model",
        )
    problems = []
    highest = max(tokenizer.get_vocab().values())
    if highest >= config.vocab_size:
        problems.append(
            Problem(
                where="model",
                found=f"the tokenizer's highest token id is {highest}, the model's vocabulary has {config.vocab_size}",
                needed=f"a vocabulary of at least {highest + 1}",
                change="use the tokenizer that was made for this model, or give the model rows for its tokens "
                "(model.resize_token_embeddings(len(tokenizer)), and save it)",
            )
        )
    positions = positions_of(config)
    if positions is not None and max_length > positions:
        problems.append(
            Problem(
                where="data.max_length",
                found=f"max_length {max_length}",
                needed=f"at most {positions}, the positions that the model knows",
                change=f"data.max_length={positions}"
                + (f", or rope='{{type: yarn, factor: {-(-max_length // positions)}}}'" if has_rope(config) else ""),
            )
        )
    if problems:
        raise UserError(*problems)
