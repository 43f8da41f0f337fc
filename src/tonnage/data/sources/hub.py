"""Data sets of the hub, and copies of them on this disk: which files belong to the split that is asked for.

A copy is a directory that says what its files are: by a README whose front matter has ``configs``, or by the names of
its files (``train.jsonl`` beside ``test.jsonl``, ``data/train-00000-of-00002.parquet``). ``datasets`` reads both, so it
is asked. Where a directory says nothing of the kind, all its files are rows to train on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonnage.config import Source
from tonnage.data.reading.rows import Part
from tonnage.errors import Problem, UserError
from tonnage.forms.conversation import first_line

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
class Resolved:
    files: list[Path]
    commit: str = ""
    """Of a hub data set, what its revision is now."""
    left: tuple[str, ...] = ()
    """Files that lie there and are not read: of other splits, texts among files of rows, files of other kinds."""
    parts: list[Part] = field(default_factory=list)


def problem_of(source: Source, found: str, needed: str, change: str = "") -> Problem:
    return Problem(found, needed, change, f"data: {source.path}")


def unusable(source: Source, found: str, needed: str, change: str = "") -> UserError:
    """The error for a source with which something is wrong."""
    return UserError(problem_of(source, found, needed, change))


def is_hub_id(path: str) -> bool:
    """Whether a path may be the name of a hub data set."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", path) is not None


def hub_files(source: Source) -> Resolved:
    """Arrow files that ``datasets`` keeps for one split of a hub data set. Raises ``UserError``."""
    if "[" in source.split:
        split, _, part = source.split.partition("[")
        match = re.fullmatch(r":(\d+)(%?)\]", part)
        first = "1000" if match is None else f"{int(match[1]) / 100:g}" if match[2] else match[1]
        is_all = match is not None and match[2] and int(match[1]) >= 100  # no fraction says this: 1 is one row
        change = f"set split: {split}" + ("" if is_all else f", first: {first}")
        raise unusable(source, f"a part of a split ({source.split})", "a whole split", change)
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
        raise UserError(_not_chosen(source, error) or _not_loaded(source, error)) from error
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    if not files:
        raise unusable(source, "the hub data set has no files", "at least one row")
    stored = [part for part in files[0].parts if COMMIT.fullmatch(part)]
    return Resolved(files, commit or next(iter(stored), ""))


def _not_chosen(source: Source, error: Exception) -> Problem | None:
    """What is wrong where ``datasets`` lists what there is to choose from: subsets or splits."""
    if names := _listed(error, r"(?:Config name is missing|BuilderConfig '.*' not found).*?\[(.*?)\]"):
        listed = ", ".join(names)
        fault = f"no subset {source.name!r}; there are {listed}"
        if source.name is None:
            fault = f"a data set of several subsets: {listed}"
        return problem_of(source, fault, "the name of one", f"set name: {names[0]} for this source")
    if splits := _listed(error, r"Unknown split .*?\[(.*?)\]"):
        fault = f"no split {source.split!r}; there are {', '.join(splits)}"
        needed = f"a data set with a split {source.split!r}"
        return problem_of(source, fault, needed, f"set split: {splits[0]} for this source")
    return None


def _listed(error: Exception, pattern: str) -> list[str]:
    match = re.search(pattern, str(error), re.DOTALL)
    return re.findall(r"'([^']*)'", match[1]) if match else []


def _not_loaded(source: Source, error: Exception) -> Problem:
    offline = "without a connection, only what was loaded before can be used"
    if source.files:
        fault = f"{', '.join(source.files)} of the hub data set does not load ({first_line(error)})"
        needed = "names of its files, or patterns that some of them fit"
        return problem_of(source, fault, needed, f"look at its files on the hub; {offline}")
    fault = f"no such file here, and as a hub id it does not load ({first_line(error)})"
    needed = f"a file, or a hub data set with a split {source.split!r}"
    return problem_of(source, fault, needed, f"check the path; {offline}")


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


def files_of_copy(directory: Path, files: Sequence[Path], source: Source) -> Resolved | None:
    """The files of one split of a directory that has splits, ``None`` if it has none. Raises ``UserError``."""
    if (directory / "README.md").is_file() and _has_configs(directory / "README.md"):
        return _of_split(directory, files, _by_readme(directory, source))
    split_of = {file: _split_of(file.relative_to(directory)) for file in files}
    if not set(split_of.values()) & {"test", "validation"}:
        return None
    mine = [file for file, split in split_of.items() if split == _SPLIT_OF.get(source.split, source.split)]
    loose = [file for file, split in split_of.items() if split is None and file.suffix != ".md"]
    if not mine:
        splits = ", ".join(sorted(filter(None, set(split_of.values()))))
        change = "set split for this source, or name the files"
        raise unusable(source, f"a directory with the splits {splits}", f"files of split {source.split!r}", change)
    if loose:
        names = [str(file.relative_to(directory)) for file in (loose[0], mine[0])]
        fault = f"{names[0]} among files whose names say a split ({names[1]})"
        change = "name the files, or a pattern such as train*.jsonl"
        raise unusable(source, fault, "to know which files are meant", change)
    return _of_split(directory, files, mine)


def _has_configs(readme: Path) -> bool:
    """Whether a README says what is in which file."""
    with readme.open("rb") as opened:
        head = opened.read(1 << 20)
    front = re.match(rb"---\s*\n(.*?)\n---\s*(\n|$)", head.removeprefix(b"\xef\xbb\xbf"), re.DOTALL)
    return front is not None and re.search(rb"^(configs|dataset_info)\s*:", front[1], re.MULTILINE) is not None


def _by_readme(directory: Path, source: Source) -> list[Path]:
    import datasets

    try:
        builder: Any = datasets.load_dataset_builder(str(directory), name=source.name)
        data_files = builder.config.data_files or {}
    except Exception as error:
        fault = f"a README whose front matter cannot be followed ({first_line(error)})"
        change = "name the files themselves, or mend README.md"
        unread = problem_of(source, fault, "configs that name files that are there", change)
        raise UserError(_not_chosen(source, error) or unread) from error
    splits = {str(split): [Path(str(file)) for file in paths] for split, paths in data_files.items()}
    if source.split not in splits:
        fault = f"no split {source.split!r} in README.md; there are {', '.join(splits)}"
        change = f"set split: {next(iter(splits), 'train')} for this source"
        raise unusable(source, fault, "one of them", change)
    return splits[source.split]


def _of_split(directory: Path, files: Sequence[Path], mine: list[Path]) -> Resolved:
    """The files ``mine`` of a directory; all others but texts about them are left."""
    taken = {file.resolve() for file in mine}
    others = (file for file in files if file.resolve() not in taken and file.suffix != ".md")
    return Resolved(mine, left=tuple(str(file.relative_to(directory)) for file in others))


def _split_of(file: Path) -> str | None:
    """The split that the name of a file, or of one of its folders, says."""
    for part in (file.name, *reversed(file.parts[:-1])):
        if match := _WORD.search(part.lower()):
            return _SPLIT_OF[match[1]]
    return None
