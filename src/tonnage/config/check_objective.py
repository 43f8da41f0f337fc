"""What ``objective`` may not say, and what preferences and a teacher do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.config.contradiction import Contradiction, of_other_kinds
from tonnage.config.schema import COMPARED, REFERRED, Config, Objective

ONLY_OF: dict[str, tuple[str, ...]] = {
    "power": ("eaft",),
    "beta": COMPARED,
    "label_smoothing": ("dpo",),
    "margin": ("simpo",),
    "center": ("reward",),
    "per_token": ("dpo", "hinge"),
    "supervised": ("distil", "dpo", "ipo", "hinge", "simpo"),
    "reference": REFERRED,
    "reference_revision": REFERRED,
    "teacher": ("distil",),
    "teacher_revision": ("distil",),
    "top_k": ("distil",),
    "temperature": ("distil",),
    "desirable": ("kto",),
    "undesirable": ("kto",),
}
"""Keys of ``objective`` -> the kinds that know them."""


def check_objective(config: Config) -> Iterator[Contradiction]:
    """Keys that the kind of objective does not know, and ways to read rows that leave no answer whole."""
    objective = config.objective
    yield from of_other_kinds("objective", objective, Objective(kind=objective.kind), ONLY_OF)
    if objective.is_preference:
        yield from _of_preferences(config)
    if objective.scores:
        yield from _of_scores(config)
    if objective.distils:
        yield from _of_teacher(objective)
    yield from _tiles(config)
    if config.data.carry and objective.kind != "supervised":
        yield from _carried(config)


def _of_preferences(config: Config) -> Iterator[Contradiction]:
    data, kind = config.data, config.objective.kind
    if data.over_length in ("truncate", "split"):
        yield Contradiction(
            ("data.over_length", "objective.kind"),
            f"data.over_length is {data.over_length}, and objective.kind is {kind}",
            "whole rows: of an answer that is cut, what is compared is not what was judged",
            "write data.over_length: drop, or raise data.max_length, which holds a prompt and both answers of a pair; "
            "with kto the row's answer and one of another row",
        )
    if data.train_on != "assistant":
        yield Contradiction(
            ("data.train_on", "objective.kind"),
            f"data.train_on is {data.train_on}, and objective.kind is {kind}",
            "assistant: answers are compared, and nothing before them",
            "leave data.train_on out",
        )


def _of_scores(config: Config) -> Iterator[Contradiction]:
    """What a model that scores texts, and writes none, cannot be asked."""
    evaluate = config.evaluate
    writing = {
        "evaluate.prompts": bool(evaluate.prompts),
        "evaluate.scorer": evaluate.scorer != "none",
        "evaluate.general": evaluate.general is not None,
    }
    for key in (key for key, is_set in writing.items() if is_set):
        yield Contradiction(
            (key, "objective.kind"),
            f"{key}, and objective.kind is reward",
            "an objective whose model writes texts: one of reward gives scores",
            f"leave {key} out",
        )
    if config.trust_remote_code:
        yield Contradiction(
            ("trust_remote_code", "objective.kind"),
            "trust_remote_code, and objective.kind is reward",
            "a family that transformers itself can give a head of scores",
            "leave trust_remote_code out",
        )


def _carried(config: Config) -> Iterator[Contradiction]:
    yield Contradiction(
        ("data.carry", "objective.kind"),
        f"data.carry is {', '.join(config.data.carry)}, and objective.kind is {config.objective.kind}",
        "objective.kind supervised: columns are for a loss of one's own",
        "leave data.carry out",
    )


def _tiles(config: Config) -> Iterator[Contradiction]:
    """Tiles of a vocabulary of which the likeliest tokens are needed."""
    objective, tiles = config.objective, config.memory.tiles
    if not objective.goes_with_tiles and tiles != "auto" and tiles > 1:
        tokens = "a teacher's tokens" if objective.distils else "the likeliest"
        yield Contradiction(
            ("memory.tiles", "objective.kind"),
            f"memory.tiles is {tiles}, and objective.kind is {objective.kind}",
            f"a vocabulary that is whole, or divided by parallel.tensor: {tokens} are not looked for in tiles",
            "leave memory.tiles out, or use parallel.tensor",
        )


def _of_teacher(objective: Objective) -> Iterator[Contradiction]:
    if objective.teacher is None:
        yield Contradiction(
            ("objective.kind",),
            "objective.kind is distil, and there is no objective.teacher",
            "a model to learn from, a directory or a hub id",
            "write objective.teacher: MODEL",
        )
    if objective.supervised > 1:
        yield Contradiction(
            ("objective.supervised",),
            f"objective.supervised is {objective.supervised:g}, and objective.kind is distil",
            "the share of the answers' own loss, from 0 to 1, which leaves the rest to the teacher",
            "write a number from 0 to 1",
        )
