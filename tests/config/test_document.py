"""Every key is documented, and the page in docs is what the schema says."""

from __future__ import annotations

from pathlib import Path

from tonnage.config import document, keys


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == document.render(), "run: python -m tonnage.config.document > docs/config.md"


def test_every_key_has_one_sentence() -> None:
    for key in keys.all_keys():
        assert key.sentence.endswith("."), key.name
        assert ". " not in key.sentence, key.name
        assert key.takes, key.name


def test_keys_are_named_as_they_are_written() -> None:
    names = {key.name for key in keys.all_keys()}
    assert {"launch.with", "data.train.path", "optimizer.lr", "seed"} <= names
    assert "launch.launcher" not in names
