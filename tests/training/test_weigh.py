"""What a row costs, traced without weights, against closed forms and against real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from transformers import (
    Gemma4TextConfig,
    GPTNeoXConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
)

from tonnage.kernels.fp8 import Fp8Products, fp8_linear
from tonnage.kernels.switches import switched_off
from tonnage.model.anatomy import dissect
from tonnage.model.attention import packing_arguments
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.parallel.recompute import recompute_blocks
from tonnage.planning.profile import HEAD_CHUNK, BlockCost, Line, ModelProfile
from tonnage.training import weigh as module
from tonnage.training.isolation import isolation_of
from tonnage.training.ledger import Ledger
from tonnage.training.weigh import Conditions, weigh, weigh_once

# All sizes differ, so that no term passes for another (documents of 96, hidden 320, and so on).
NEOX: dict[str, Any] = {
    "vocab_size": 1500,
    "hidden_size": 320,
    "intermediate_size": 1280,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
}
LLAMA: dict[str, Any] = {
    "vocab_size": 2200,
    "hidden_size": 384,
    "intermediate_size": 1000,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}

MIXTURE: dict[str, Any] = LLAMA | {
    "moe_intermediate_size": 200,
    "shared_expert_intermediate_size": 328,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@cache
def on_cpu(family: str) -> ModelProfile:
    configs = {"gpt_neox": GPTNeoXConfig(**NEOX), "llama": LlamaConfig(**LLAMA), "qwen2_moe": Qwen2MoeConfig(**MIXTURE)}
    return weigh(configs[family], None, Conditions(document_tokens=96))


def test_saved_bytes_of_llama_are_the_closed_form() -> None:
    """What goes into two norms and comes out of them, queries, keys, values and attention, the three of SwiGLU."""
    profile = weigh(LlamaConfig(**LLAMA), None, Conditions(document_tokens=96, device_type="cuda"))
    h, hk, f, heads = 384, 2 * 64, 1000, 6
    closed = 4 * h + 4 * h + 2 * (2 * h + 2 * hk) + 6 * f + 4 * heads + 8
    assert profile.blocks["none"].saved.per_token == closed
    assert profile.blocks["full"].saved == Line(0, 2 * h)


def test_saved_bytes_of_neox_are_the_closed_form() -> None:
    profile = weigh(GPTNeoXConfig(**NEOX), None, Conditions(document_tokens=96, device_type="cuda"))
    h, f, heads = 320, 1280, 5
    # Input, two norms with their means and deviations, the fused query-key-value, rotated queries and keys, attention.
    closed = 2 * h + 4 * h + 16 + 6 * h + 6 * h + 2 * h + 4 * f + 4 * heads
    assert profile.blocks["none"].saved.per_token == closed
    assert profile.blocks["full"].saved == Line(0, 2 * h)


def test_products_are_two_per_parameter_and_token() -> None:
    config = LlamaConfig(**LLAMA)
    profile = weigh(config, None, Conditions(document_tokens=96, device_type="cuda"))
    in_products = profile.block_parameters - 2 * 384
    block = profile.blocks["none"]
    assert block.forward_flops.per_token == 2 * in_products
    assert block.backward_flops.per_token == 4 * in_products
    assert profile.blocks["full"].backward_flops.per_token >= 6 * in_products - 2 * 384 * 1000  # the last is not needed
    assert profile.outside is not None
    assert profile.outside.small_head.flops.per_token == 6 * 384 * 2200


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "full"])  # what selective keeps does not pass through autograd's hooks
@pytest.mark.parametrize(
    "config", [GPTNeoXConfig(**NEOX), LlamaConfig(**LLAMA), Qwen2MoeConfig(**MIXTURE)], ids=["neox", "llama", "mixture"]
)
def test_what_a_block_saves_is_what_torch_saves(config: PreTrainedConfig, kind: Any) -> None:
    """A real model, real tensors: storages that autograd keeps, one block more against one block less."""

    def kept(num_blocks: int) -> int:
        config.num_hidden_layers = num_blocks
        model = build_on_meta(config, torch.bfloat16)
        anatomy = dissect(model)
        recompute_blocks(anatomy.blocks, kind)
        allocate(model, torch.device("cpu"))
        initialise_randomly(model, 0)
        own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = anatomy.backbone(
                torch.arange(288).unsqueeze(0), use_cache=False, **packing_arguments((96,) * 3, torch.device("cpu"))
            ).last_hidden_state
        assert hidden.requires_grad
        return sum(storages.values())

    real = kept(4) - kept(3)
    assert on_cpu(config.model_type).blocks[kind].saved(288) == pytest.approx(real, rel=0.005)


def test_traffic_is_what_operations_read_and_write_and_no_question_about_a_tensor_counts() -> None:
    with FakeTensorMode(), Ledger() as ledger:
        a, b = torch.empty(100, 8), torch.empty(100, 8)
        ledger.mark()
        for tensor in (a, b):
            assert tensor.device.type == "cpu"
            assert tensor.view(-1).t().shape == (800,)
        c = a + b
        c.add_(a)
        mark = ledger.mark()
    assert mark.traffic == (3 + 3) * 3200
    assert mark.made == 3200


def test_a_product_in_emulated_fp8_holds_what_the_allocator_lends() -> None:
    """torchao's class of tensors makes copies in fp32 that nobody sees who looks at its product as one operation."""
    products = Fp8Products("fp8-emulated")

    def multiply(turn: Callable[[str, Callable[[], Any]], Any]) -> None:
        rows, weight = (torch.zeros(size, 320, dtype=torch.bfloat16, requires_grad=True) for size in (1000, 480))
        output = turn("forward", lambda: fp8_linear(rows, weight, None, products))
        slopes = torch.zeros_like(output)
        turn("backward", lambda: output.backward(slopes))

    lent, held = dict[str, int](), dict[str, int]()

    def watch(name: str, run: Callable[[], Any]) -> Any:
        with profile(profile_memory=True) as profiled:
            result = run()
        events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        lent[name] = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
        return result

    with FakeTensorMode(), Ledger() as ledger:

        def note(name: str, run: Callable[[], Any]) -> Any:
            before, result = ledger.mark(), run()
            held[name] = max(ledger.mark().heights) - before.live
            return result

        multiply(note)
    multiply(watch)
    assert held == lent


@pytest.mark.slow
def test_the_head_peaks_at_a_chunk_of_logits() -> None:
    profile = weigh(GPTNeoXConfig(**NEOX), None, Conditions(document_tokens=96, device_type="cuda"))
    assert profile.outside is not None
    small, large = profile.outside.small_head, profile.outside.large_head
    assert profile.outside.head(HEAD_CHUNK) is small
    assert profile.outside.head(HEAD_CHUNK + 1) is large
    assert large.peak.per_token == 320 * 2  # the gradient of its input: logits exist by the chunk
    assert HEAD_CHUNK * 1500 * 2 < large.peak.fixed < HEAD_CHUNK * 1500 * 4  # in 16 bits, and their gradient there too
    with switched_off(["softmax"]):
        plain = weigh(GPTNeoXConfig(**NEOX), None, Conditions(document_tokens=96, device_type="cuda"))
    assert plain.outside is not None
    assert plain.outside.large_head.peak.fixed > HEAD_CHUNK * 1500 * (4 + 2)


def test_a_model_is_weighed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = Conditions(precision="bf16", document_tokens=96, device_type="cuda")
    first = weigh_once(LlamaConfig(**LLAMA), None, conditions, cache=tmp_path)
    monkeypatch.setattr(module, "weigh", None)
    assert weigh_once(LlamaConfig(**LLAMA), None, conditions, cache=tmp_path) == first
    elsewhere: Any = LlamaConfig(**LLAMA)
    elsewhere._name_or_path = str(tmp_path)
    assert weigh_once(elsewhere, None, conditions, cache=tmp_path) == first
    elsewhere.auto_map = {"AutoConfig": "code.Config"}
    with pytest.raises(TypeError):  # its own code may be different there
        weigh_once(elsewhere, None, conditions, cache=tmp_path)
    with pytest.raises(TypeError):  # another model is weighed anew
        weigh_once(LlamaConfig(**LLAMA | {"hidden_size": 192}), None, conditions, cache=tmp_path)
    for file in (tmp_path / "profiles").iterdir():
        file.write_text("{")
    with pytest.raises(TypeError):  # and so is one whose file is damaged
        weigh_once(LlamaConfig(**LLAMA), None, conditions, cache=tmp_path)


def test_counting_alone_traces_nothing() -> None:
    profile = weigh(LlamaConfig(**LLAMA))
    assert profile.blocks == {}
    assert profile.outside is None


@pytest.mark.slow
def test_of_a_mixture_what_a_token_goes_through_is_multiplied_and_what_is_there_is_counted() -> None:
    """Two of eight experts; the router; a shared one that all tokens go through."""
    config = Qwen2MoeConfig(**MIXTURE)
    profile = weigh(config, None, Conditions(document_tokens=96))
    h, attention = 384, 384 * (384 + 2 * 128 + 384)
    experts, shared, routers = 3 * h * 200, 3 * h * 328, h * 8 + h
    norms_and_biases = 2 * h + 384 + 2 * 128
    assert profile.block_parameters == attention + 8 * experts + shared + routers + norms_and_biases
    for block in (
        profile.blocks["none"],
        weigh(config, None, Conditions(document_tokens=96, device_type="cuda")).blocks["none"],
    ):
        assert block.forward_flops.per_token == 2 * (attention + 2 * experts + shared + routers)
        assert block.backward_flops.per_token == 4 * (attention + 2 * experts + shared + routers)


@pytest.mark.slow
def test_blocks_of_several_kinds_are_weighed_one_kind_after_the_other() -> None:
    """What a block costs on average, and the most of any at a moment."""

    def block(dense: int) -> BlockCost:
        config = Qwen2MoeConfig(**MIXTURE | {"num_hidden_layers": 6, "mlp_only_layers": list(range(dense))})
        return weigh(config, None, Conditions(document_tokens=96), recomputes=["none"]).blocks["none"]

    mixed, mixture, plain = block(4), block(0), block(6)
    for name in ("saved", "forward_flops", "backward_flops", "forward_traffic", "backward_made"):
        for tokens in (96, 1000):
            values = [getattr(cost, name)(tokens) for cost in (mixed, mixture, plain)]
            assert values[0] == pytest.approx((2 * values[1] + 4 * values[2]) / 6)
            assert values[1] != values[2]
    for name in ("forward_peak", "backward_peak", "evaluation_peak"):
        values = [getattr(cost, name)(1000) for cost in (mixed, mixture, plain)]
        assert values[0] == max(values[1:])


GEMMA_4 = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers",
    [
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 6},
        {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] + 2 * ["full_attention"]},
        {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "use_double_wide_mlp": True},
    ],
)
def test_layers_whose_heads_have_another_size_are_weighed_with_it(layers: dict[str, Any]) -> None:
    """Where it stands by the number of the layer, as in Gemma 4, and fewer layers are run."""
    config = Gemma4TextConfig(**GEMMA_4 | layers)
    profile = weigh(config, None, Conditions(document_tokens=32), recomputes=["none"])
    size = fmean(16 if kind == "full_attention" else 8 for kind in config.layer_types or ())
    assert profile.attention_size == round(4 * size)
    assert isolation_of(config, device=torch.device("cpu")).arrangement == "packed"


@pytest.mark.matrix
def test_what_goes_token_by_token_is_weighed_in_short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state space without kernels: what short documents tell of longer ones is what those cost."""
    config = JambaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_offset=3,
        num_experts=1,
        mamba_dt_rank=8,
    )
    found = []
    for lengths in ((), (4, 8, 16)):
        monkeypatch.setattr(module, "SCANNED", lengths or (64,))  # of documents of 24 at once, or of shorter ones
        found.append(
            weigh(
                config,
                None,
                Conditions(
                    precision="fp32", document_tokens=24, device_type="cpu", arrangement="padded", attention="eager"
                ),
            )
        )
    for kind in found[0].blocks:
        whole, short = (one.blocks[kind] for one in found)
        for one in fields(BlockCost):
            of_whole, of_short = (getattr(cost, one.name) for cost in (whole, short))
            if isinstance(of_whole, Line):
                assert of_short.per_token == pytest.approx(of_whole.per_token, rel=1e-3), (kind, one.name)
            for tokens in (500, 2000):
                assert of_short(tokens) == pytest.approx(of_whole(tokens), rel=0.03), (kind, one.name)


OF_TWO_KINDS: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "chunk"),
    [
        pytest.param(
            Mamba2Config(
                vocab_size=264, hidden_size=64, num_hidden_layers=1, num_heads=4, head_dim=32, n_groups=1, chunk_size=32
            ),
            32,
            id="a state space",
        ),
        pytest.param(
            Mamba2Config(
                vocab_size=264,
                hidden_size=64,
                num_hidden_layers=1,
                num_heads=4,
                head_dim=32,
                n_groups=1,
                chunk_size=256,
            ),
            256,
            id="a state space in long chunks",
        ),
        pytest.param(
            Qwen3_5TextConfig(
                **OF_TWO_KINDS,
                head_dim=16,
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                layer_types=["full_attention", "linear_attention"],
            ),
            64,
            id="a gated delta rule",
        ),
        pytest.param(
            Lfm2Config(**OF_TWO_KINDS, layer_types=["full_attention", "conv"]),
            1,
            id="a convolution",
        ),
    ],
)
def test_documents_cost_a_multiple_of_the_chunks_in_which_blocks_go_through_them(
    config: PreTrainedConfig, chunk: int
) -> None:
    """What transformers' classes call a chunk, found without their word for it."""
    profile = weigh(
        config,
        None,
        Conditions(precision="fp32", document_tokens=100, device_type="cpu", arrangement="padded", attention="eager"),
        recomputes=("none",),
    )
    assert profile.chunk == chunk
