"""The loss of reward models: values and gradients of transformers' classifiers on each answer alone, in all layouts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, PreTrainedConfig

from tiny import VOCAB_SIZE, llama_config, load, neox_config
from tonnage.config import Objective
from tonnage.data import Pack
from tonnage.data.packs.prefixes import Prefix
from tonnage.data.tokens.encoder import Document, paired
from tonnage.errors import UserError
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta
from tonnage.model.scorer import is_scorer, make_scorer
from tonnage.training.batch import MicroBatch, documents_of
from tonnage.training.loss import LossModel
from tonnage.training.preferences import RewardLoss
from tonnage.training.weigh import Conditions, weigh

PROMPTS, ANSWERS = (9, 14, 5), ((4, 7), (6, 3), (2, 8))
WEIGHTS, MARGINS, CENTER = (1.0, 1.0, 2.0), (0.0, 0.7, 1.5), 0.05
SYSTEM = 3
"""Tokens that all prompts begin with."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
}


def config_of(family: str) -> PreTrainedConfig:
    match family:
        case "llama":
            return llama_config(initializer_range=0.3)
        case "gpt_neox":
            return neox_config(initializer_range=0.3)
        case "gpt2":
            own: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
            return CONFIG_MAPPING[family](**own | {"vocab_size": VOCAB_SIZE})
        case _:
            return CONFIG_MAPPING[family](**SHAPE)


def pairs() -> list[list[Tensor]]:
    """Of every pair both answers, each with the prompt before it, int64."""
    chance = torch.Generator().manual_seed(3)
    system = torch.randint(VOCAB_SIZE - 2, (SYSTEM,), generator=chance)
    made = []
    for length, sizes in zip(PROMPTS, ANSWERS, strict=True):
        prompt = torch.cat([system, torch.randint(VOCAB_SIZE - 2, (length - SYSTEM,), generator=chance)])
        answers = [torch.randint(VOCAB_SIZE - 2, (size,), generator=chance) for size in sizes]
        made.append([torch.cat([prompt, answer]) for answer in answers])
    return made


def pack() -> Pack:
    documents = []
    for pair, length, weight in zip(pairs(), PROMPTS, WEIGHTS, strict=True):
        answers = [Document(ids.numpy().astype(np.int32), [(length, len(ids) - 1, weight)]) for ids in pair]
        documents.append(paired(*answers))  # whose last token is no target: a line after what closes a turn
    weights = [np.zeros(len(document.tokens), np.float32) for document in documents]
    for document, of_document in zip(documents, weights, strict=True):
        for start, stop, weight in document.spans:
            of_document[start:stop] = weight
    return Pack(
        np.concatenate([document.tokens for document in documents]),
        np.concatenate(weights),
        np.array([len(document.tokens) for document in documents], np.int32),
        np.arange(len(documents)),
        np.zeros(len(documents), np.int16),
        np.zeros(len(documents), np.int32),
        carried={"margin": np.array(MARGINS)},
        forks=np.array([document.fork for document in documents]),
    )


def batches() -> dict[str, MicroBatch]:
    """The same pairs as rows of every kind."""
    prefixes = (Prefix(SYSTEM, -1),)
    return {
        "prompts and system once": MicroBatch.of([pack()], prefixes),
        "prompts once": MicroBatch.of([pack()]),
        "apart": MicroBatch.of([pack()], shares=False),
        "filled up": MicroBatch.of([pack()], prefixes).rounded(16),
        "padded": MicroBatch.padded(list(documents_of(pack())), 16),
    }


@pytest.fixture(scope="module", params=["llama", "gpt_neox", "gpt2", "qwen3", "gemma2"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LossModel, Any]:
    config = config_of(request.param)
    make_scorer(config)
    config.pad_token_id = None
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    model = build_on_meta(copy.deepcopy(config), torch.float32)
    ours = LossModel(model, dissect(model))
    allocate(model, torch.device("cpu"))
    load(model, folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    return ours, theirs


@pytest.mark.parametrize("layout", [*batches()])
def test_losses_and_gradients_are_those_of_answers_alone(models: tuple[LossModel, Any], layout: str) -> None:
    ours, theirs = models
    batch = batches()[layout]
    if batch.shared and theirs.config.model_type == "gemma2":
        pytest.skip("its attention, which caps scores, shares no prefixes")
    ours.own = reward_loss = RewardLoss(Objective(kind="reward", center=CENTER))
    for model in (ours, theirs):
        model.zero_grad(set_to_none=True)
    scores = [torch.stack([theirs(input_ids=ids[None]).logits[0, 0] for ids in pair]) for pair in pairs()]
    losses = [
        -F.logsigmoid(chosen - rejected - margin) + CENTER * (chosen + rejected) ** 2
        for (chosen, rejected), margin in zip(scores, MARGINS, strict=True)
    ]
    expected = sum(weight * loss for weight, loss in zip(WEIGHTS, losses, strict=True)) / 4.0
    got = ours(batch, 4.0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    got.backward()
    expected.backward()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert parameter.grad is not None, name
        assert float((parameter.grad - named[name].grad).norm() / named[name].grad.norm()) < 5e-5, name
    figures, total = reward_loss.figures(reward_loss.tally(torch.device("cpu")).tolist()), sum(WEIGHTS)
    means = (torch.tensor(WEIGHTS) @ torch.stack(scores).detach()) / total
    assert figures["reward_chosen"] == pytest.approx(float(means[0]), rel=1e-5, abs=1e-5)
    assert figures["reward_rejected"] == pytest.approx(float(means[1]), rel=1e-5, abs=1e-5)
    right = sum(weight for weight, (chosen, rejected) in zip(WEIGHTS, scores, strict=True) if chosen > rejected)
    assert figures["reward_accuracy"] == pytest.approx(right / total)
    assert "logprob_chosen" not in figures
    reward_loss.clear()
    assert float(ours(MicroBatch.blank(), 4.0).detach()) == 0


@torch.no_grad()
def test_scores_in_bf16_are_as_near_as_those_of_transformers(models: tuple[LossModel, Any]) -> None:
    """The last product is in fp32, the others as there."""
    ours, theirs = copy.deepcopy(models)

    def in_transformers() -> Tensor:
        return torch.stack([theirs(input_ids=ids[None]).logits[0, 0].double() for pair in pairs() for ids in pair])

    exact = in_transformers()
    ours.bfloat16()
    theirs.bfloat16()
    ours.own = reward_loss = RewardLoss(Objective(kind="reward"))
    ours(batches()["apart"], 1.0)
    scores = reward_loss.seen(torch.device("cpu"))[2:4].t().flatten()
    assert float((scores - exact).norm()) < 2 * float((in_transformers() - exact).norm())


def test_where_answers_end() -> None:
    """The last token, whether or not it is a target, wherever its answer lies."""
    expected = [int(ids[-1]) for pair in pairs() for ids in pair]
    for batch in batches().values():
        assert batch.input_ids.flatten()[list(batch.ends)].tolist() == expected


def test_which_families_score() -> None:
    config = llama_config()
    assert not is_scorer(config)
    make_scorer(config)
    assert is_scorer(config)
    assert config.num_labels == 1
    assert config.id2label == {0: "LABEL_0"}
    with pytest.raises(UserError, match="a family for which transformers has no AutoModelForSequenceClassification"):
        make_scorer(CONFIG_MAPPING["granite"]())
    several = llama_config(architectures=["LlamaForSequenceClassification"], num_labels=3)
    with pytest.raises(UserError, match="a classifier of 3 labels"):
        make_scorer(several)
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 2}
    other = CONFIG_MAPPING["ctrl"](**sizes)
    make_scorer(other)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(other)
    with pytest.raises(UserError, match="CTRLForSequenceClassification, whose head is no linear layer"):
        dissect(model)


@pytest.mark.slow
def test_a_scorer_weighs_what_its_backbone_does() -> None:
    """The head has one row, and costs nothing worth counting."""
    config = neox_config()
    causal = weigh(copy.deepcopy(config), conditions=Conditions("fp32", 32))
    make_scorer(config)
    scorer = weigh(config, conditions=Conditions("fp32", 32))
    assert scorer.blocks == causal.blocks
    assert scorer.vocab_size == causal.vocab_size
    assert scorer.head_parameters == config.hidden_size
    assert scorer.num_parameters == causal.num_parameters - causal.head_parameters + config.hidden_size
    assert scorer.outside is not None
    assert causal.outside is not None
    assert scorer.outside.head(100).flops(100) == 0 < causal.outside.head(100).flops(100)
    assert scorer.outside.final == causal.outside.final
