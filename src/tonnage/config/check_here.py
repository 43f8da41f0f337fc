"""What a config names and what is not here, or is of no use: files, directories, packages."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tonnage.config import sbatch
from tonnage.config.contradiction import Contradiction, did_you_mean
from tonnage.config.schema import Config, SlurmLaunch, Source
from tonnage.errors import refusals, user_error
from tonnage.files.paths import is_jinja, literal_variable, matching
from tonnage.files.places import check_vacant, check_writable, existing, kind_of
from tonnage.host.cachedir import default_directory
from tonnage.rundir.directory import RunDirectory, complete_checkpoints

DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow", ".txt")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def missing_files(config: Config) -> Iterator[Contradiction]:
    """Local files and directories that the config names and that are not there, or are of no use."""
    data, validation = config.data, config.data.validation
    yield from _looked_at("model", config.model, _model(config))
    if (tokenizer := config.tokenizer) is not None:
        yield from _looked_at("tokenizer", tokenizer, _of_hub("tokenizer", tokenizer, "a directory or a hub id"))
    sources = {
        "data.train": data.train,
        "data.validation": validation if isinstance(validation, tuple) else (),
        "evaluate.general": config.evaluate.general or (),
    }
    for side, members in sources.items():
        for index, source in enumerate(members):
            key = f"{side}.{index}.path"
            yield from _looked_at(key, source.path, _source(key, source))
    yield from _looked_at("data.template", data.template, _template(data.template))
    if isinstance(prompts := config.evaluate.prompts, str):
        yield from _looked_at("evaluate.prompts", prompts, _prompts(prompts))
    directory = str(Path.cwd())
    if isinstance(config.launch, SlurmLaunch) and ("\\" in directory or not sbatch.fits_on_a_line(directory)):
        yield Contradiction(
            ("launch.with",),
            f"the working directory {directory!r}, with a line break, a control character or a backslash",
            "one that can stand in the script of a job, which begins there",
            "start from another directory",
        )
    offload = [("memory.offload_dirs", path) for path in config.memory.offload_dirs]
    for key, path in (("output", config.output), ("data.cache", data.cache), *offload):
        if path is not None:
            yield from _looked_at(key, path, _directory(key, path))


def _looked_at(key: str, path: str, contradictions: Iterator[Contradiction]) -> Iterator[Contradiction]:
    """The contradictions of a path, or that it cannot be looked at."""
    try:
        yield from contradictions
    except OSError as error:
        yield Contradiction((key,), f"{key} {path} cannot be looked at: {error.strerror}", "a path that this user sees")


def _prompts(name: str) -> Iterator[Contradiction]:
    if not Path(name).exists():
        yield Contradiction(("evaluate.prompts",), f"evaluate.prompts: no file {name}", "a file of rows", _near(name))


def _template(name: str) -> Iterator[Contradiction]:
    if is_jinja(name) or not (name.endswith((".jinja", ".jinja2", ".j2")) or "/" in name):
        return
    path, keys = Path(name), ("data.template",)
    if not path.is_file():
        near = "" if path.exists() else _near(name)
        yield Contradiction(keys, f"data.template: no file {name}", "a Jinja file", near)
        return
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        yield Contradiction(
            keys, f"data.template {name} is not UTF-8 (byte {error.start})", "a Jinja file, which is text"
        )


def _directory(key: str, name: str) -> Iterator[Contradiction]:
    """A directory that need not exist yet, but can be made."""
    if variable := literal_variable(name):
        yield Contradiction(
            (key,),
            f"{key} is {name}, and there is no {variable} anywhere: it would be the name of a directory",
            "the path itself",
            f"write it out, or give {key}=... on the command line, where the shell puts in {variable}",
        )
        return
    nearest = existing(Path(name))
    if not nearest.is_dir():
        obstacle = name if nearest == Path(name).absolute() else f"{nearest}, in which {name} would be,"
        kind = kind_of(nearest.stat().st_mode)
        yield Contradiction((key,), f"{key} {obstacle} is {kind}", "a directory, which need not exist yet")


def _model(config: Config) -> Iterator[Contradiction]:
    path = Path(config.model)
    if path.is_dir():
        missing = []
        if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            missing.append("config.json")
        if config.init == "pretrained" and not any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES):
            missing.append("weights (*.safetensors)")
        if missing:
            change = ""
            if missing == ["weights (*.safetensors)"]:
                change = "name a directory with weights, or write init: random to train from random ones"
            needed = "a Hugging Face model directory"
            yield Contradiction(("model",), f"model directory {path} has no {' and no '.join(missing)}", needed, change)
    else:
        yield from _of_hub("model", config.model, "a model directory or a hub id")


def _of_hub(key: str, name: str, needed: str) -> Iterator[Contradiction]:
    """What is wrong with the name of a directory that may be a hub id instead."""
    path = Path(name)
    if path.exists() and not path.is_dir():
        yield Contradiction((key,), f"{key} {path} is a file", needed, f"name {path.parent}")
    elif not path.exists() and not HUB_ID.fullmatch(name):
        yield Contradiction((key,), f"no {key} directory {path}", needed, _near(name))


def _source(key: str, source: Source) -> Iterator[Contradiction]:
    path, keys = Path(source.path), (key,)
    needed = "a file, glob, directory or hub id"
    if any(letter in source.path for letter in "*?[") and not path.exists():
        try:
            if next(matching(path), None) is None:
                yield Contradiction(keys, f"no file matches {source.path}", needed)
        except ValueError as error:
            yield Contradiction(keys, f"{source.path[:200]} is no pattern: {error}", needed)
    elif path.is_dir():
        if not any(looks_like_data(item) for item in path.rglob("*")):
            yield Contradiction(
                keys, f"{path} holds no data file", f"a file ending in one of {', '.join(DATA_SUFFIXES)}"
            )
    elif path.is_file():
        if path.stat().st_size == 0:
            yield Contradiction(keys, f"{path} is empty (0 bytes)", "a file with rows in it")
        elif not os.access(path, os.R_OK):
            yield Contradiction(keys, f"{path} cannot be read by this user", "a readable file")
    elif path.exists():
        yield Contradiction(keys, f"{path} is neither a file nor a directory", needed)
    elif not HUB_ID.fullmatch(source.path) or looks_like_data(path):
        yield Contradiction(keys, f"no such file: {source.path}", needed, _near(source.path))


def looks_like_data(path: Path) -> bool:
    """Whether a name ends like a data file's."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(DATA_SUFFIXES)


def _near(text: str) -> str:
    """A hint: names spelt alike in the deepest directory of a path that exists."""
    path = Path(text)
    if variable := literal_variable(text):
        return f"{variable} is not put in here: write the path out, or give it on the command line, where a shell does"
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, where nothing is: mend the link"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    names = sorted(item.name for item in path.parent.iterdir())
    return did_you_mean(str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=2))


def check_trackers(config: Config) -> None:
    """Refuse trackers whose package is not installed where the run starts, and a hub that knows nobody.

    Raises:
        UserError: one is missing, or nobody is logged in.
    """
    _check_push(config)
    missing = [name for name in config.track if not _is_installed(name)]
    if missing:
        raise user_error(
            found=f"{', '.join(missing)}, which is not installed",
            needed="the packages of the trackers that are named",
            change=f"pip install 'tonnage[{','.join(missing)}]', or leave track out: metrics.jsonl has everything",
            where="track",
        )


def _check_push(config: Config) -> None:
    """Refuse to push saves to the hub as nobody."""
    from huggingface_hub import constants, get_token

    if config.checkpoint.push is None or (get_token() and not constants.HF_HUB_OFFLINE):
        return
    offline = constants.HF_HUB_OFFLINE
    change = "unset HF_HUB_OFFLINE" if offline else "hf auth login, or set HF_TOKEN"
    raise user_error(
        found="HF_HUB_OFFLINE is set" if offline else "nobody is logged in to the Hugging Face hub",
        needed="a hub that takes what is pushed",
        change=f"{change}, or leave checkpoint.push out",
        where="checkpoint.push",
    )


def _is_installed(name: str) -> bool:
    """Whether a package is; a directory of its name, as Weights & Biases leaves behind, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def check_output(config: Config) -> None:
    """Refuse an output directory that holds a run or anything else, or cannot be made.

    What a run left that was killed before it began does not count, nor do the cache and the places for offload that the
    config puts there. Raises ``UserError``.
    """
    run = RunDirectory(config.output)
    change = "write output=... with another name"
    if run.is_locked_elsewhere():
        raise run.is_taken(f"; or {change}")
    if run.is_run() and os.path.lexists(run.plan):
        if complete_checkpoints(run.checkpoints):
            change = f"go on with it: tonnage train --resume {run.word}, or {change}"
        observed = f"output {config.output} already holds a run"
        raise user_error(observed, "a directory of its own for every run", change, "output")
    own, directory = set(run.beginnings()), run.path.absolute()
    caches: list[str | Path] = [config.data.cache] if config.data.cache else []
    for place in (default_directory(), *caches, *config.memory.offload_dirs):
        path = Path(place).absolute()
        if path != directory and path.is_relative_to(directory):
            own.add(run.path / path.relative_to(directory).parts[0])
    with refusals("the run's directory could not be made", run.path):
        check_vacant(run.path, "a new or empty directory for a run", change, is_own=own.__contains__, where="output")
        if not run.is_locked_here():
            check_writable(run.path)
