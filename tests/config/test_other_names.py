"""What other programs call our keys: every hint names a key, and says what an import does."""

from __future__ import annotations

import pytest

from tonnage.config import keys
from tonnage.config.other_names import OURS, SENTENCES, hint
from tonnage.migration.keys import TABLES, DocumentedKey

COUNTED = {"num_machines", "num_nodes", "nnodes"}
"""With others in an import, which knows how many workers each has."""


def imported(name: str) -> list[DocumentedKey]:
    return [key for table in TABLES if (key := table.find(name)) is not None]


def test_every_key_that_is_named_is_one() -> None:
    known = {key.name for key in keys.all_keys()}
    assert set(OURS.values()) <= known
    assert not set(OURS) & set(SENTENCES)
    top = {name.rpartition(".")[2] for name in known}
    assert not (set(OURS) | set(SENTENCES)) & top, "what is ours needs no hint"


@pytest.mark.parametrize("name", sorted(set(OURS) - COUNTED))
def test_an_import_maps_it_to_the_same_key(name: str) -> None:
    mapped = [key for key in imported(name) if key.verdict == "mapped" and key.to]
    assert not mapped or any(OURS[name] in key.to for key in mapped)
    refused = [key for key in imported(name) if key.verdict == "not supported"]
    # ms-swift's max_epochs is where a run of num_train_epochs ends sooner
    assert mapped or all("num_train_epochs" in key.reason for key in refused)


def test_what_is_nothing_here_is_nothing_in_an_import() -> None:
    for name in SENTENCES:
        if hint(name).startswith("nothing") and name != "optim":  # which says how moments rest, too
            assert not [key for key in imported(name) if key.verdict == "mapped"], name


def test_spelling_does_not_matter() -> None:
    assert hint("Learning-Rate") == hint("learning_rate") == hint("--learning-rate") == "write optimizer.lr instead"
    assert hint("lr") == hint("") == hint("anything") == ""
