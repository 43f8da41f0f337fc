"""What differs between the config of a run that was saved and one that goes on."""

from __future__ import annotations

from tonnage.config import Config, as_json, compare


def test_a_key_that_is_younger_than_a_run_was_at_its_default() -> None:
    sources = ["a.jsonl", {"path": "b.jsonl", "weight": 2.0}]
    config = Config.model_validate({"model": "m", "data": {"train": sources}, "steps": 3, "memory": {"zero": 1}})
    stored = as_json(config)
    for section, keys in (
        (stored, ("adapter", "train")),
        (stored["optimizer"], ("warmup_from",)),
        *((source, ("first",)) for source in stored["data"]["train"]),
    ):
        for key in keys:
            section.pop(key, None)
    assert compare(stored, config) == []
    other = config.model_copy(update={"train": ("model.norm.*",), "seed": 4})
    assert {change.key for change in compare(stored, other)} == {"train", "seed"}
    assert {change.key for change in compare(stored | {"gone": 1}, config)} >= {"gone", "adapter"}  # of another version
