"""Data sets of the hub and copies of them: subsets, splits, revisions; a folder of this disk stands in for the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from data.conftest import write_rows
from data.test_sources import left_of, refused, rows_of
from tonnage.config import Data, Source
from tonnage.data import Prepared, prepare
from tonnage.data.sources import files as sources
from tonnage.errors import UserError

COMMIT, EARLIER = "0123456789abcdef" * 2 + "01234567", "fedcba9876543210" * 2 + "fedcba98"


def text(name: str) -> list[dict[str, str]]:
    return [{"text": name}]


def write(folder: Path, *names: str, readme: str | None = None) -> Path:
    """A folder in which each file holds one row with its name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / name, text(name))
    if readme is not None:
        (folder / "README.md").write_text(f"---\n{readme}\n---\n\n# About\n")
    return folder


Hub = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """Serve folders as data sets: ``hub(folder, sha=..., offline=...)``; gives the list of what was asked for."""
    load = datasets.load_dataset

    def serve(folder: Path, sha: str | None = COMMIT, offline: bool = False) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def info(self: object, name: str, *, revision: str | None, timeout: float) -> Any:
            asked.append({"info": name, "revision": revision})
            if offline:
                raise TimeoutError("timed out")
            return SimpleNamespace(sha=sha if revision in (None, "main") else revision)

        def loaded(path: str, /, split: str, **given: Any) -> Any:
            asked.append({"load": path, "split": split, **given})
            given.pop("revision", None)
            return load(str(folder), split=split, cache_dir=str(tmp_path / "hub cache"), **given)

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
        monkeypatch.setattr(datasets, "load_dataset", loaded)
        return asked

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return serve


SUBSETS = """configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train.jsonl}"""
FILES = ("main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl", "main/other.jsonl")


def test_name_revision_and_split_are_asked_for(hub: Hub, tmp_path: Path) -> None:
    asked = hub(write(tmp_path / "served", *FILES, readme=SUBSETS))
    assert rows_of("some/rows", name="main") == text("main/train.jsonl")
    assert rows_of("some/rows", name="main", split="test", revision="v2") == text("main/test.jsonl")
    assert asked == [
        {"info": "some/rows", "revision": None},
        {"load": "some/rows", "split": "train", "name": "main"},
        {"info": "some/rows", "revision": "v2"},
        {"load": "some/rows", "split": "test", "name": "main", "revision": "v2"},
    ]


def test_files_of_a_data_set_are_those_that_are_named(hub: Hub, tmp_path: Path) -> None:
    asked = hub(folder := write(tmp_path / "served", *FILES, "main/more.jsonl", readme=SUBSETS))
    both = ["main/more.jsonl", "socratic/train.jsonl"]
    for path in ("some/rows", folder):
        assert rows_of(path, files=(both[0],)) == text(both[0])
        assert rows_of(path, files=tuple(both)) == [*text(both[0]), *text(both[1])]
        fitting = [one for name in ("more", "other", "test", "train") for one in text(f"main/{name}.jsonl")]
        assert sorted(map(str, rows_of(path, files=("main/*.jsonl",)))) == sorted(map(str, fitting))
        assert "none.jsonl" in refused(path, files=("none.jsonl",))
    assert asked[1] == {"load": "some/rows", "split": "train", "data_files": {"train": [both[0]]}}
    assert "no directory here" in refused(folder / both[0], files=("none.jsonl",))


def test_a_subset_that_must_be_chosen_is_refused_with_the_names_there_are(hub: Hub, tmp_path: Path) -> None:
    folder = write(tmp_path / "served", *FILES, readme=SUBSETS)
    hub(folder)
    for path in ("some/rows", folder):
        message = refused(path)
        assert "a data set of several subsets: main, socratic" in message
        assert "set name: main for this source" in message
        message = refused(path, name="mian")
        assert "no subset 'mian'; there are main, socratic" in message
        assert rows_of(path, name="main") == text("main/train.jsonl"), "the advice works"


def test_a_split_that_is_not_there_is_refused_with_those_that_are(hub: Hub, tmp_path: Path) -> None:
    folder = write(tmp_path / "served", *FILES, readme=SUBSETS)
    hub(folder)
    for path in ("some/rows", folder):
        message = refused(path, name="main", split="dev")
        assert "no split 'dev'" in message
        assert "there are train, test" in message
        assert "set split: train for this source" in message


def prepared(path: str, tmp_path: Path, tokenizer: Any, **changes: Any) -> Prepared:
    options = Data(train=(Source(path=path, **changes),), max_length=64)
    return prepare(options, tokenizer, cache=tmp_path / "cache")


def test_the_commit_is_part_of_the_key_and_of_the_account(hub: Hub, tmp_path: Path, tokenizer: Any) -> None:
    folder = write(tmp_path / "served", "train.jsonl")
    paths = set()
    for sha, given, expected in (
        (COMMIT, {}, COMMIT),
        (EARLIER, {}, EARLIER),
        (COMMIT, {"revision": "main"}, COMMIT),
        (COMMIT, {"revision": EARLIER}, EARLIER),
    ):
        hub(folder, sha)
        found = prepared("some/rows", tmp_path, tokenizer, **given)
        assert found.account.sources[0].commit == expected
        assert found.account.to_json()["sources"][0]["commit"] == expected
        paths.add(found.train.path)
    assert len(paths) == 2, "one for each commit"


def test_without_a_connection_the_commit_is_that_of_what_was_loaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "some___rows" / "default" / "0.0.0" / COMMIT / "rows-train.arrow"
    file.parent.mkdir(parents=True)
    datasets.Dataset.from_list(text("a")).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(file)
    hub(tmp_path, offline=True)
    stored = SimpleNamespace(cache_files=[{"filename": str(file)}])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: stored)
    found = sources.resolve(Source(path="some/rows"), 0)
    assert found.commit == COMMIT
    assert rows_of("some/rows") == text("a")


def test_a_hub_id_without_a_network_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def unreachable(*given: Any, **named: Any) -> None:
        asked.append(given[1:])
        assert named["timeout"] <= 10
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", lambda *given, **named: pytest.fail("it waits again"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"(?s)as a hub id it does not load .*Couldn't reach.*without a connection"):
        sources.resolve(Source(path="nobody/has-this"), 0)
    assert asked == [("nobody/has-this",)]
    assert not datasets.config.HF_HUB_OFFLINE, "other uses of the hub are not affected"


def test_a_hub_that_has_no_such_data_set_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*given: Any, **named: Any) -> None:
        raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]

    def load(name: str, split: str) -> None:
        assert not datasets.config.HF_HUB_OFFLINE
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/rows' doesn't exist on the Hub.")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unknown)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert "as a hub id it does not load (Dataset 'some/rows' doesn't exist" in refused("some/rows")


# Copies on this disk


@pytest.mark.parametrize(
    ("files", "split", "taken"),
    [
        (("train.jsonl", "test.jsonl"), "train", ("train.jsonl",)),
        (("train.jsonl", "test.jsonl"), "test", ("test.jsonl",)),
        (("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/validation.jsonl"), "train", 2),
        (("data/train.jsonl", "data/validation.jsonl"), "validation", ("data/validation.jsonl",)),
        (("data/train.jsonl", "data/dev.jsonl"), "validation", ("data/dev.jsonl",)),
        (("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"), "train", ("train/a.jsonl", "train/b.jsonl")),
        (("rows_train.jsonl", "rows_eval.jsonl"), "eval", ("rows_eval.jsonl",)),
        (("training.jsonl", "testing.jsonl"), "train", ("training.jsonl",)),
    ],
)
def test_files_whose_names_say_a_split(files: tuple[str, ...], split: str, taken: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "test copy", *files)
    mine = files[:taken] if isinstance(taken, int) else taken
    assert rows_of(folder, split=split) == [{"text": name} for name in mine]
    assert set(left_of(folder, split=split)) == set(files) - set(mine)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("test.jsonl",), "a directory with the splits test"),
        (("test/a.jsonl", "validation/a.jsonl"), "a directory with the splits test, validation"),
        (("a.jsonl", "test_cases.jsonl"), "a directory with the splits test"),
        (("train.jsonl", "test.jsonl", "more.jsonl"), "more.jsonl among files whose names say a split (train.jsonl)"),
    ],
)
def test_test_files_are_never_trained_on(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", *files)
    assert message in refused(folder)
    assert len(rows_of(folder / "**" / "*.jsonl")) == len(files), "files that are named are read"


def test_names_that_say_no_split_are_all_rows(tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", "a.jsonl", "contest.jsonl", "latest.jsonl", "trained.jsonl", "train.jsonl")
    assert len(rows_of(folder)) == 5


def test_a_copy_obeys_its_readme(tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", *FILES, readme=SUBSETS)
    assert rows_of(folder, name="main") == text("main/train.jsonl")
    assert left_of(folder, name="main") == ("main/other.jsonl", "main/test.jsonl", "socratic/train.jsonl")
    assert rows_of(folder, name="main", split="test") == text("main/test.jsonl")
    assert rows_of(folder, name="socratic") == text("socratic/train.jsonl")


def test_a_readme_that_says_nothing_of_files_says_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", "a.jsonl", readme="license: mit\ntags: [configs]")
    assert rows_of(folder) == text("a.jsonl")
    folder = write(tmp_path / "copy", "test.jsonl", "train.jsonl", "a.jsonl", readme="license: mit")
    assert "a.jsonl among files whose names say a split" in refused(folder)


@pytest.mark.parametrize("path", ["gone.jsonl", "../rows.jsonl", "[", "3"])
def test_a_readme_that_cannot_be_followed_is_refused(path: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "copy", "a.jsonl", readme=f"configs:\n- config_name: default\n  data_files: {path}")
    (tmp_path / "copy" / "train.jsonl").write_text('{"text": "never"}\n')
    message = refused(folder)
    assert "README" in message or "no such" in message or "no regular file" in message


def test_what_was_saved_with_datasets_obeys_split(tmp_path: Path) -> None:
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_list([{"prompt": name, "completion": "a"}]) for name in ("train", "test")}
    )
    both.save_to_disk(tmp_path / "saved")
    assert rows_of(tmp_path / "saved") == [{"prompt": "train", "completion": "a"}]
    assert rows_of(tmp_path / "saved", split="test") == [{"prompt": "test", "completion": "a"}]
    assert [Path(name).parts[0] for name in left_of(tmp_path / "saved")] == ["test"]


def test_what_is_left_stands_in_the_account(tmp_path: Path, tokenizer: Any) -> None:
    folder = write(tmp_path / "copy", "train.jsonl", "test.jsonl")
    account = prepared(str(folder), tmp_path, tokenizer).account
    assert (account.sources[0].files, account.sources[0].left) == (1, ("test.jsonl",))
    assert json.loads(json.dumps(account.to_json()))["sources"][0]["left"] == ["test.jsonl"]
