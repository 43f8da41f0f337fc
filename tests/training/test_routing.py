"""The router's loss, held against transformers' own, and what is counted of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tiny import MIXTURES, mixture_config
from tonnage.config import Objective
from tonnage.data import Pack
from tonnage.errors import UserError
from tonnage.model.anatomy import dissect
from tonnage.model.attention import Shared
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.parallel.recompute import RecomputeMode, recompute_blocks
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel
from tonnage.training.preferences import PairLoss
from tonnage.training.routing import (
    PATIENCE,
    ExpertLoad,
    Routing,
    balance,
    members_of,
    num_experts,
    routers_of,
    weight_of_router_loss,
)

WEIGHT = 0.5
LENGTHS = (12, 20, 9)


def loss_model(family: str, kind: RecomputeMode = "none") -> LossModel:
    model = build_on_meta(mixture_config(family), torch.float32)
    anatomy = dissect(model)
    found = LossModel(model, anatomy, routing=Routing(model, anatomy.blocks, num_experts(model), WEIGHT))
    recompute_blocks(anatomy.blocks, kind)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, 0)
    return found


def documents() -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randint(0, 250, (1, length), generator=chance) for length in LENGTHS]


def row(those: list[torch.Tensor], filled_up: int = 0) -> MicroBatch:
    """Documents side by side, of which all is supervised but the first token; and tokens that are no data."""
    lengths = tuple(one.shape[1] for one in those)
    ids = torch.cat([*those, torch.zeros(1, filled_up, dtype=torch.int64)], 1)
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    positions = torch.cat([torch.arange(s, s + n - 1) for s, n in zip(starts, lengths, strict=True)])
    return MicroBatch(
        ids,
        (*lengths, filled_up) if filled_up else lengths,
        positions,
        ids[0, positions + 1],
        torch.ones(len(positions)),
        documents=tuple(range(len(lengths))),
    )


def theirs(found: LossModel, family: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss with and without the routers' and gradients, by transformers' own loss, one document at a time."""
    plain = AutoModelForCausalLM.from_config(mixture_config(family, router_aux_loss_coef=WEIGHT)).eval()
    plain.load_state_dict(found.model.state_dict())
    supervised, tokens = sum(LENGTHS) - len(LENGTHS), sum(LENGTHS)
    total = routers = 0.0
    for ids in documents():
        output = plain(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        length = ids.shape[1]
        alone = output.loss - WEIGHT * output.aux_loss
        (alone * (length - 1) / supervised + WEIGHT * output.aux_loss * length / tokens).backward()
        total += float(alone) * (length - 1) / supervised
        routers += float(output.aux_loss) * length / tokens
    return total, routers, {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_loss_and_gradients_in_every_layout_are_those_of_transformers(family: str, kind: RecomputeMode) -> None:
    for layout in ([row(documents())], [row([one], filled_up=7) for one in documents()], [MicroBatch.blank()]):
        found = loss_model(family, kind)
        denominators: Any = (float(sum(LENGTHS) - len(LENGTHS)), None, float(sum(LENGTHS)))
        if layout[0].documents == ():  # what changes nothing
            layout = [*layout, row(documents())]
        losses = [found(batch, *denominators) for batch in layout]
        for loss in losses:
            loss.backward()
        total, routers, gradients = theirs(found, family)
        assert found.routing is not None
        assert float(found.routing.loss) == pytest.approx(routers, rel=1e-5)
        assert float(sum(losses)) == pytest.approx(total + WEIGHT * routers, rel=1e-5)
        ours = {name: one.grad for name, one in found.model.named_parameters() if one.grad is not None}
        assert ours.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert float((ours[name] - gradient).norm()) < 1e-4 * float(gradient.norm()), name
        assert found.routing.counts[:, :-1].sum(1).tolist() == [2 * sum(LENGTHS)] * 2, "once, and data alone"


@pytest.mark.parametrize("shares", [True, False], ids=["prompt once", "prompt twice"])
def test_of_a_pair_every_answer_counts_for_its_tokens_and_half_of_the_prompt(shares: bool) -> None:
    """By transformers' own loss, an answer with its prompt at a time."""
    prompt, chosen, rejected = 20, 5, 3
    found = loss_model("qwen3_moe")
    ids = torch.randint(0, 250, (prompt + chosen + rejected,), generator=torch.Generator().manual_seed(1)).numpy()
    weights = np.array([0] * prompt + [1] * (chosen + rejected), np.float32)
    zero, fork = np.zeros(1, np.int32), np.array([[prompt, prompt + chosen]])
    pack = Pack(ids.astype(np.int32), weights, np.array([len(ids)], np.int32), zero, zero - 1, zero, forks=fork)
    found.own = PairLoss(Objective(kind="orpo"))
    found(MicroBatch.of([pack], shares=shares), 1.0, None, float(len(ids))).backward()
    plain = AutoModelForCausalLM.from_config(mixture_config("qwen3_moe", router_aux_loss_coef=WEIGHT)).eval()
    plain.load_state_dict(found.model.state_dict())
    expected = 0.0
    for answer, size in ((ids[prompt : prompt + chosen], chosen), (ids[prompt + chosen :], rejected)):
        whole = torch.from_numpy(np.concatenate([ids[:prompt], answer]))[None]
        output = plain(input_ids=whole, output_router_logits=True, use_cache=False)
        expected += float(output.aux_loss.detach()) * (prompt / 2 + size) / len(ids)
    assert found.routing is not None
    assert float(found.routing.loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_routers_are_found_in_every_family(family: str) -> None:
    found = loss_model(family)
    model: Any = found.model
    ids = documents()[0]
    logits: list[torch.Tensor] = []
    with torch.no_grad():
        for router, index in routers_of(model):
            router.register_forward_hook(lambda _, __, output, index=index: logits.append(output[index]))
        told = model.base_model(input_ids=ids, output_router_logits=True, use_cache=False)
    if not logits:  # transformers 5.17 records no routers of some families
        assert "router_logits" not in (model.base_model._can_record_outputs or {})
        assert getattr(told, "router_logits", None) is None
        with pytest.raises(UserError, match="without routers that transformers records"):
            weight_of_router_loss(WEIGHT, model)
        return
    for ours, one in zip(logits, told.router_logits, strict=True):
        assert torch.equal(ours, one)
    assert found.routing is not None
    one_document = torch.ones(1, ids.shape[1])
    each = balance([one.reshape(-1, 5) for one in logits], 2, one_document, one_document.sum(1)) / ids.shape[1]
    everywhere: Any = tuple(one.reshape(-1, 5) for one in logits)
    expected = load_balancing_loss_func(everywhere, 5, 2)
    assert float(each) == pytest.approx(float(expected), rel=1e-5)


def test_what_documents_share_belongs_to_each_of_them() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    ids = torch.zeros(1, 10, dtype=torch.int64)
    batch = MicroBatch(ids, (3, 2, 1, 2, 2), nothing, nothing, torch.zeros(0), (7, 8, 9), (Shared(0, 2),))
    assert members_of(batch).tolist() == [
        [1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
    ]


def test_the_weight_is_what_is_asked_or_what_the_model_asks_for() -> None:
    def weight(asked: Any, family: str = "qwen3_moe", pipeline: int = 1, **config: Any) -> float:
        model = build_on_meta(mixture_config(family, **config), torch.float32)
        return weight_of_router_loss(asked, model, pipeline=pipeline)

    assert weight("auto") == 0
    assert weight("auto", router_aux_loss_coef=0.02, output_router_logits=True) == 0.02
    assert weight(0.0, router_aux_loss_coef=0.02, output_router_logits=True) == 0
    assert weight("model", router_aux_loss_coef=0.02) == 0.02  # asked for or not
    assert weight("model", router_aux_loss_coef=0.0) == 0
    assert weight(0.01) == 0.01
    with pytest.raises(UserError, match=r"parallel\.pipeline=2"):
        weight(0.01, pipeline=2)


def test_a_model_without_experts_has_no_router_loss_of_its_own() -> None:
    dense = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    assert weight_of_router_loss("model", build_on_meta(dense, torch.float32)) == 0


class Alone:
    """A world of one."""

    def once(self, *values: float) -> tuple[float, ...]:
        return values

    sum = once


def test_experts_that_starve_are_told_once() -> None:
    found, said = loss_model("qwen3_moe").routing, list[str]()
    assert found is not None
    load = ExpertLoad([found], Alone(), said.append)  # type: ignore[arg-type]
    for step in range(1, PATIENCE + 4):
        found.counts[:, :5] = torch.tensor([[4, 3, 2, 1, 0], [2, 2, 2, 2, 2]])
        told = load.after_step(1.0)
        assert not found.counts.any(), "a step begins"
        assert told["experts"] == {"most": 2.0, "least": 0.0, "starving": int(step >= PATIENCE)}
    assert len(said) == 1
    assert f"no token in the last {PATIENCE} steps went to expert 4 of block 0;" in said[0]
    found.counts[:, 4] = 1
    assert load.after_step(1.0)["experts"]["starving"] == 0
    assert load.shares()[1] == pytest.approx([0.2] * 5, abs=0.01)
