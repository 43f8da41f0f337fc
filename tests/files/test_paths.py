"""Paths as people write them."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from tonnage.errors import UserError
from tonnage.files.paths import NotAPathError, expanded, is_there, literal_variable, path_word, word


def test_tilde_is_a_home_directory_at_the_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert [expanded(text) for text in ("~", "~/a b", "~/")] == ["/home/me", "/home/me/a b", "/home/me"]
    for same in ("a/~", "./~/x", "/~", "a~", "owner/name", "rows*.jsonl", "$HOME/x", "a\nb"):
        assert expanded(same) == same
    somebody = pwd.getpwall()[0]
    assert expanded(f"~{somebody.pw_name}/x") == str(Path(somebody.pw_dir, "x"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("~no-such-user/x", "'~no-such-user'"),
        ("a\0b", "NUL"),
        ("x" * 256, "255 in each"),
        ("é" * 128, "255 in each"),
        ("x/" * 2050, "4,096 bytes"),
    ],
)
def test_what_is_no_path(text: str, why: str) -> None:
    with pytest.raises(NotAPathError, match=why):
        expanded(text)
    with pytest.raises(UserError, match=why) as refused:
        word(text)
    assert len(str(refused.value)) < 500


def test_words_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert word("~/x") == "/home/me/x"
    assert path_word("~/x") == Path("/home/me/x")


def test_variables_that_are_names_of_nothing(tmp_path: Path) -> None:
    assert literal_variable("$A/b") == "$A"
    assert literal_variable(f"{tmp_path}/x${{B_2}}/c") == "${B_2}"
    assert literal_variable("price-in-$") == literal_variable("$") == literal_variable("$(pwd)") == ""
    (tmp_path / "$A").mkdir()
    assert literal_variable(f"{tmp_path}/$A/b") == ""


def test_what_cannot_be_seen_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_there(tmp_path)
    assert not any(map(is_there, (tmp_path / "x", tmp_path / ("x" * 300), Path("x/" * 3000))))

    def closed(path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", closed)
    assert not is_there(tmp_path / "x")
