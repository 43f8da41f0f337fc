"""Keys of ``objective``: what each kind knows, what pairs do not go with, and the learning rates that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.config import Config, read_config
from tonnage.errors import UserError

NEEDED = ["model=owner/small", "data.train=owner/rows"]


def config(*words: str) -> Config:
    return read_config(None, [*NEEDED, *words], check_files=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.beta=0.3"], "objective.beta is 0.3, and objective.kind is supervised"),
        (["objective={kind: ipo, label_smoothing: 0.1}"], "label_smoothing is 0.1, and objective.kind is ipo"),
        (["objective={kind: dpo, margin: 0.5}"], "objective.kind simpo, which knows it"),
        (["objective={kind: simpo, per_token: true}"], "objective.kind dpo or hinge, which know it"),
        (["objective={kind: orpo, supervised: 1.0}"], "objective.supervised is 1.0, and objective.kind is orpo"),
        (["objective={kind: dpo, label_smoothing: 0.5}"], "objective.label_smoothing is 0.5"),
        (["objective=grpo"], "one of supervised, dft, eaft, distil, dpo, ipo, hinge, kto, orpo, simpo, reward"),
        (["objective={kind: dpo, gamma: 1}"], "unknown key objective.gamma"),
        (["objective={kind: dft, power: 2}"], "objective.kind eaft, which knows it"),
        (["objective=eaft", "memory.tiles=4"], "the likeliest are not looked for in tiles"),
        (["objective=dft", "data.carry=[score]"], "columns are for a loss of one's own"),
        (["objective=dpo", "data.over_length=truncate"], "whole rows: of an answer that is cut"),
        (["objective=dpo", "data.over_length=split"], "whole rows: of an answer that is cut"),
        (["objective=dpo", "data.train_on=all"], "assistant: answers are compared, and nothing before them"),
        (["objective=dpo", "data.carry=[score]"], "columns are for a loss of one's own"),
        (["objective=dpo", "data.validation=0.1", "evaluate.gate={token_accuracy: '>= 0.5'}"], "nothing tells token"),
        (["data.validation=0.1", "checkpoint.best=eval_reward_accuracy"], "nothing tells eval_reward_accuracy"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        config(*words)
    assert message in str(error.value)


def test_a_kind_alone_is_a_section(tmp_path: Path) -> None:
    assert config("objective=simpo").objective == config("objective.kind=simpo").objective
    assert (config("objective=simpo").objective.beta, config("objective=dpo").objective.beta) == (2.0, 0.1)
    in_parts = config("objective=dpo", "objective.beta=0.05").objective
    assert in_parts == config("objective={kind: dpo, beta: 0.05}").objective
    good = ["objective=dpo", "data.validation=0.1", "evaluate.gate={eval_reward_accuracy: '>= 0.5'}"]
    assert config(*good, "checkpoint.best=eval_reward_accuracy").objective.has_reference
    assert not config("objective=orpo").objective.has_reference


def test_learning_rates_where_none_is_given() -> None:
    adapter = "adapter.rank=8"
    rates = {
        "full": config(),
        "adapter": config(adapter),
        "pairs": config("objective=dpo"),
        "pairs, adapter": config("objective.kind=orpo", adapter),
        "said": config("objective=dpo", adapter, "optimizer.lr=3e-5"),
    }
    assert {name: made.optimizer.lr for name, made in rates.items()} == {
        "full": 2e-5,
        "adapter": 2e-4,
        "pairs": 1e-6,
        "pairs, adapter": 1e-5,
        "said": 3e-5,
    }
    assert config("adapter=auto").for_adapter().lr == 2e-4
    assert config("adapter=auto", "objective=dpo").for_adapter().lr == 1e-5
    for lr in (3e-6, 1e-6):  # what is said is not taken for the default
        assert config("adapter=auto", "objective=dpo", f"optimizer.lr={lr}").for_adapter().lr == lr
    assert config("objective=dpo", "optimizer.weight_decay=0.1").optimizer.lr == 1e-6
