"""Data sets of the hub, and copies of them on this disk: which files belong to the split that is asked for.

A copy is a directory that says what its files are: by a README whose front matter has ``configs``, or by the names of
its files (``train.jsonl`` beside ``test.jsonl``, ``data/train-00000-of-00002.parquet``). ``datasets`` reads both, so it
is asked. Where a directory says nothing of the kind, all its files are rows to train on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.config import Source
from tonnage.errors import Problem, UserError

HUB_SECONDS = 10.0
COMMIT = re.compile(r"[0-9a-f]{40}")
_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "dev", "val"),
}
"""Split -> words by which names of files tell it, as ``datasets`` has them."""
_SPLIT_OF = {word: split for split, words in _WORDS.items() for word in words}
_WORD = re.compile(rf"(?:^|[^a-z])({'|'.join(sorted(_SPLIT_OF, key=len, reverse=True))})(?=$|[^a-z])")


@dataclass(frozen=True)
class Found:
    """Files of a source."""

    files: list[Path]
    commit: str = ""
    """Of a hub data set."""
    left: tuple[str, ...] = ()
    """Files beside, of other splits."""


def is_hub_id(path: str) -> bool:
    """Whether a path may be the name of a hub data set."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", path) is not None


def hub_files(source: Source) -> Found:
    """Arrow files that ``datasets`` keeps for one split of a hub data set. Raises ``UserError``."""
    where = f"data: {source.path}"
    if "[" in source.split:
        split, _, part = source.split.partition("[")
        match = re.fullmatch(r":(\d+)(%?)\]", part)
        first = "1000" if match is None else f"{int(match[1]) / 100:g}" if match[2] else match[1]
        is_all = match is not None and match[2] and int(match[1]) >= 100  # no fraction says this: 1 is one row
        change = f"set split: {split}" + ("" if is_all else f", first: {first}")
        raise UserError(Problem(f"a part of a split ({source.split})", "a whole split", change, where))
    load_arguments: dict[str, Any] = {"name": source.name, "revision": source.revision}
    if source.files:
        load_arguments["data_files"] = {source.split: list(source.files)}
    try:
        import datasets

        with _no_waiting_for_the_hub(source) as commit:
            dataset = datasets.load_dataset(
                source.path,
                split=source.split,
                **{key: value for key, value in load_arguments.items() if value is not None},
            )
    except Exception as error:
        raise UserError(_no_data_set(source, error)) from error
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    if not files:
        raise UserError(Problem(found="the hub data set has no files", needed="at least one row", where=where))
    stored = [part for part in files[0].parts if COMMIT.fullmatch(part)]
    return Found(files, commit or next(iter(stored), ""))


def _no_data_set(source: Source, error: Exception) -> Problem:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = f"data: {source.path}"
    if (names := _names_to_choose_from(str(error))) is not None:
        return Problem(
            found=f"a data set of several subsets: {', '.join(names)}"
            if source.name is None
            else f"no subset {source.name!r}; there are {', '.join(names)}",
            needed="the name of one",
            change=f"set name: {names[0]} for this source",
            where=where,
        )
    if (splits := _splits_to_choose_from(str(error))) is not None:
        return Problem(
            found=f"no split {source.split!r}; there are {', '.join(splits)}",
            needed=f"a data set with a split {source.split!r}",
            change=f"set split: {splits[0]} for this source",
            where=where,
        )
    if source.files:
        return Problem(
            found=f"{', '.join(source.files)} of the hub data set does not load ({reason})",
            needed="names of its files, or patterns that some of them fit",
            change="look at its files on the hub; without a connection, only what was loaded before can be used",
            where=where,
        )
    return Problem(
        found=f"no such file here, and as a hub id it does not load ({reason})",
        needed=f"a file, or a hub data set with a split {source.split!r}",
        change="check the path; without a connection, only what was loaded before can be used",
        where=where,
    )


def _names_to_choose_from(message: str) -> list[str] | None:
    """Subsets that ``datasets`` lists where one must be chosen, or where the one that was named is none of them."""
    match = re.search(r"(?:Config name is missing|BuilderConfig '.*' not found).*?\[(.*?)\]", message, re.DOTALL)
    return re.findall(r"'([^']*)'", match[1]) if match else None


def _splits_to_choose_from(message: str) -> list[str] | None:
    match = re.search(r"Unknown split .*?\[(.*?)\]", message, re.DOTALL)
    return re.findall(r"'([^']*)'", match[1]) if match else None


@contextmanager
def _no_waiting_for_the_hub(source: Source) -> Iterator[str]:
    """Ask the hub once, for ``HUB_SECONDS`` at most, and use what is here if it does not answer; gives the commit.

    ``datasets`` by itself tries six times, which takes half a minute without a network and minutes behind a firewall
    that drops packets.
    """
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    before, commit = datasets.config.HF_HUB_OFFLINE, ""
    try:
        api = HfApi(endpoint=datasets.config.HF_ENDPOINT)
        info = api.dataset_info(source.path, revision=source.revision, timeout=HUB_SECONDS)
        commit = str(getattr(info, "sha", None) or "")
    except (HfHubHTTPError, ValueError):
        pass  # it has answered, or no hub has such a name: ``datasets`` says why it will not give the data set
    except Exception:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield commit
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def files_of_copy(directory: Path, files: Sequence[Path], source: Source) -> Found | None:
    """The files of one split of a directory that has splits, ``None`` if it has none. Raises ``UserError``."""
    if (directory / "README.md").is_file() and _has_configs(directory / "README.md"):
        return _by_readme(directory, files, source)
    of_split = {file: _split_of(file.relative_to(directory)) for file in files}
    if not set(of_split.values()) & {"test", "validation"}:
        return None
    mine = [file for file, split in of_split.items() if split == _SPLIT_OF.get(source.split, source.split)]
    loose = [file for file, split in of_split.items() if split is None and file.suffix != ".md"]
    where = f"data: {source.path}"
    if not mine:
        raise UserError(
            Problem(
                found=f"a directory with the splits {', '.join(sorted({s for s in of_split.values() if s}))}",
                needed=f"files of split {source.split!r}",
                change="set split for this source, or name the files",
                where=where,
            )
        )
    if loose:
        raise UserError(
            Problem(
                found=f"{loose[0].relative_to(directory)} among files whose names say a split "
                f"({mine[0].relative_to(directory)})",
                needed="to know which files are meant",
                change="name the files, or a pattern such as train*.jsonl",
                where=where,
            )
        )
    return Found(mine, left=_left(directory, files, mine))


def _has_configs(readme: Path) -> bool:
    """Whether a README says what is in which file."""
    with readme.open("rb") as opened:
        head = opened.read(1 << 20)
    front = re.match(rb"---\s*\n(.*?)\n---\s*(\n|$)", head.removeprefix(b"\xef\xbb\xbf"), re.DOTALL)
    return front is not None and re.search(rb"^(configs|dataset_info)\s*:", front[1], re.MULTILINE) is not None


def _by_readme(directory: Path, files: Sequence[Path], source: Source) -> Found:
    import datasets

    try:
        builder: Any = datasets.load_dataset_builder(str(directory), name=source.name)
        data_files = builder.config.data_files or {}
    except Exception as error:
        problem = _no_data_set(source, error)
        if "as a hub id" in problem.found:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            problem = Problem(
                found=f"a README whose front matter cannot be followed ({reason})",
                needed="configs that name files that are there",
                change="name the files themselves, or mend README.md",
                where=problem.where,
            )
        raise UserError(problem) from error
    splits = {str(split): [Path(str(file)) for file in paths] for split, paths in data_files.items()}
    if source.split not in splits:
        raise UserError(
            Problem(
                found=f"no split {source.split!r} in README.md; there are {', '.join(splits)}",
                needed="one of them",
                change=f"set split: {next(iter(splits), 'train')} for this source",
                where=f"data: {source.path}",
            )
        )
    mine = splits[source.split]
    return Found(mine, left=_left(directory, files, mine))


def _left(directory: Path, files: Sequence[Path], mine: Sequence[Path]) -> tuple[str, ...]:
    taken = {file.resolve() for file in mine}
    return tuple(
        str(file.relative_to(directory)) for file in files if file.resolve() not in taken and file.suffix != ".md"
    )


def _split_of(file: Path) -> str | None:
    """The split that the name of a file, or of one of its folders, says."""
    for part in (file.name, *reversed(file.parts[:-1])):
        if match := _WORD.search(part.lower()):
            return _SPLIT_OF[match[1]]
    return None
