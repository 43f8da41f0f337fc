"""Every stored tensor goes where it belongs, or the files are refused: nothing is lost and nothing left out unsaid."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from stored_models import Tensors, changed, check, refusal, same, without
from tiny import llama_config, load, neox_config, write_model
from tonnage.errors import UserError
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, load_weights
from tonnage.model.files import find_model, read_model_config
from tonnage.model.matching import check_weights, match
from tonnage.model.stored import read_headers
from tonnage.parallel.stages import keep_stage
from tonnage.rundir.weights import Carried, WeightFacts

UNTIED = llama_config(tie_word_embeddings=False)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PreTrainedConfig], Path]:
    """A directory with a model of each config, made once."""
    there: dict[str, Path] = {}

    def make(config: PreTrainedConfig) -> Path:
        key = config.to_json_string()
        if key not in there:
            there[key] = write_model(tmp_path_factory.mktemp("model"), config)
        return there[key]

    return make


Make = Callable[[PreTrainedConfig], Path]


def loaded(directory: Path, **allowed: Any) -> PreTrainedModel:
    files = find_model(str(directory))
    config = read_model_config(files)
    check_weights(files, config, **allowed)
    model = build_on_meta(config, torch.float32)
    allocate(model, torch.device("cpu"))
    load(model, directory, **allowed)
    return model


def test_whole_weights_have_nothing_to_say(made: Make) -> None:
    for config in (llama_config(), UNTIED, neox_config()):
        files = find_model(str(made(config)))
        read = read_model_config(files)
        before = read.to_dict()
        assert check_weights(files, read) == WeightFacts()
        assert read.to_dict() == before, "the configuration is left as it is"


def test_each_tensor_that_is_lost_is_missed(made: Make, tmp_path: Path) -> None:
    for config in (UNTIED, neox_config()):
        for key in load_file(made(config) / "model.safetensors"):
            message = refusal(changed(made(config), tmp_path / "lost", without(key)))
            assert "1 of the model's" in message
            assert key.replace("embed_out", "lm_head") in message


def test_what_is_missing_is_initialised_if_the_user_says_so(made: Make, tmp_path: Path) -> None:
    whole = made(UNTIED)
    lost = changed(whole, tmp_path / "lost", without(HEAD))
    assert 'tie_word_embeddings": true' in refusal(lost)
    assert check(lost, allow_missing=["lm_head.*"]) == WeightFacts(missing=(HEAD,))
    model = loaded(lost, allow_missing=["lm_head.*"])
    kept = load_file(whole / "model.safetensors")
    for name, value in model.named_parameters():
        if name != HEAD:
            assert torch.equal(value, kept[name]), name
    fresh = model.get_parameter(HEAD)
    assert fresh.std().item() == pytest.approx(UNTIED.initializer_range, rel=0.1)
    assert not torch.equal(fresh, kept[HEAD])


class Copies(TorchDispatchMode):
    """Counts numbers that are copied into memory of their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.numbers += found.numel()
        return found


def test_what_is_there_is_not_copied_because_something_is_missing(made: Make, tmp_path: Path) -> None:
    """On a GPU there would be no room for a second copy of the model."""
    folder = changed(made(UNTIED), tmp_path / "lost", without(HEAD))
    model = build_on_meta(read_model_config(find_model(str(folder))), torch.float32)
    allocate(model, torch.device("cpu"))
    with Copies() as copies:
        load(model, folder, allow_missing=["lm_head.*"])
    assert copies.numbers < min(one.numel() for one in model.parameters())


@pytest.mark.parametrize(
    ("lost", "patterns"),
    [
        (r"layers\.1\.", ["model.layers.1.*"]),
        (r"layers\.", ["model.layers.*"]),
        (r"down_proj", ["model.layers.*.mlp.down_proj.weight"]),
        (r"layers\.0\.mlp\.down_proj|lm_head", ["lm_head.weight", "model.layers.0.mlp.down_proj.weight"]),
    ],
)
def test_the_patterns_that_a_refusal_offers_are_enough_and_no_more(
    lost: str, patterns: list[str], made: Make, tmp_path: Path
) -> None:
    folder = changed(made(UNTIED), tmp_path / "lost", lambda t: {n: v for n, v in t.items() if not re.search(lost, n)})
    offered = re.search(r"allow_missing: \[(.*?)\]", refusal(folder))
    assert offered is not None
    assert offered[1].split(", ") == patterns
    assert all(re.search(lost, name) for name in check(folder, allow_missing=patterns).missing)


def test_what_has_no_place_is_refused_or_left_out(made: Make, tmp_path: Path) -> None:
    more = {"visual.blocks.0.norm.weight": torch.ones(3), "visual.patch.weight": torch.ones(4)}
    odd = {name: torch.ones(2) for name in ("*x", "a: [b], #c.w", "!q.0.w", "&y")}
    offered = re.search(
        r"allow_unexpected: (\[.*\])", refusal(changed(made(UNTIED), tmp_path / "odd", lambda t: t | odd))
    )
    assert offered is not None
    patterns = yaml.safe_load(offered[1])
    assert set(check(tmp_path / "odd", allow_unexpected=patterns).left_out) == set(odd)
    folder = changed(made(UNTIED), tmp_path / "more", lambda t: t | more)
    message = refusal(folder)
    assert "2 tensors that the model has no place for: visual.blocks.0.norm.weight, visual.patch.weight" in message
    offered = re.search(r"allow_unexpected: \[(.*?)\]", message)
    assert offered is not None
    assert set(check(folder, allow_unexpected=offered[1].split(", ")).left_out) == set(more)
    assert set(check(folder, allow_unexpected=["visual.*"]).left_out) == set(more)
    assert "1 tensors" in refusal(folder, allow_unexpected=["visual.blocks.*"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: "_orig_mod." + name,
        lambda name: "module." + name,
        lambda name: "module._orig_mod." + name,
        lambda name: "_orig_mod.module.module." + name,
        lambda name: "base_model.model." + name,
        lambda name: "module.base_model.model." + name,
        lambda name: re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", name),
        lambda name: "_fsdp_wrapped_module." + re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", name),
        lambda name: "_forward_module." + name if "norm" in name else name,
    ],
)
@pytest.mark.parametrize("config", [UNTIED, neox_config()], ids=["llama", "neox"])
def test_prefixes_of_wrappers_are_understood(
    wrap: Callable[[str], str], config: PreTrainedConfig, made: Make, tmp_path: Path
) -> None:
    folder = changed(made(config), tmp_path / "wrapped", lambda t: {wrap(n): v for n, v in t.items()})
    assert check(folder) == WeightFacts(unwrapped=True)
    same(loaded(folder), AutoModelForCausalLM.from_pretrained(made(config), dtype=torch.float32))


def test_other_prefixes_are_not_guessed(made: Make, tmp_path: Path) -> None:
    folder = changed(made(UNTIED), tmp_path / "other", lambda t: {"policy." + n: v for n, v in t.items()})
    assert "and none of the model's 21 parameters" in refusal(folder)


def test_what_old_versions_saved_and_every_version_computes_means_nothing(made: Make, tmp_path: Path) -> None:
    """As gpt2, pythia-70m, the first Llama and others lie on the hub."""
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    gpt2 = GPT2Config(vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    extras: list[tuple[PreTrainedConfig, Callable[[Tensors], Tensors]]] = [
        (
            gpt2,  # without the prefix of the base model, masks beside
            lambda t: (
                {name.removeprefix("transformer."): value for name, value in t.items()}
                | {f"h.{block}.attn.bias": mask for block in (0, 1)}
                | {"h.0.attn.masked_bias": torch.tensor(-1e4)}
            ),
        ),
        (
            neox_config(),
            lambda t: (
                t
                | {"gpt_neox.layers.0.attention.bias": mask, "gpt_neox.layers.0.attention.masked_bias": torch.ones(())}
                | {f"gpt_neox.layers.{block}.attention.rotary_emb.inv_freq": torch.ones(16) for block in (0, 1)}
            ),
        ),
        (
            GPTBigCodeConfig(vocab_size=97, n_embd=16, n_layer=1, n_head=2, n_positions=8),
            lambda t: t | {"transformer.h.0.attn.bias": mask[0, 0]},
        ),
        (UNTIED, lambda t: t | {f"model.layers.{b}.self_attn.rotary_emb.inv_freq": torch.ones(8) for b in (0, 1)}),
        (UNTIED, lambda t: t | {"model.rotary_emb.inv_freq": torch.ones(8)}),
        (UNTIED, lambda t: t | {"model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 8, 16)}),
        (llama_config(), lambda t: t | {HEAD: t[EMBEDDING].clone()}),  # the head beside the embedding that it is
        (llama_config(), lambda t: {HEAD if name == EMBEDDING else name: value for name, value in t.items()}),
        (UNTIED, lambda t: {name: value.bfloat16() if "proj" in name else value for name, value in t.items()}),
        (UNTIED, lambda t: {name.removeprefix("model."): value for name, value in t.items()}),
    ]
    for number, (config, change) in enumerate(extras):
        folder = changed(made(config), tmp_path / str(number), change)
        assert check(folder) == WeightFacts(), number
        same(loaded(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_a_parameter_that_looks_like_a_buffer_is_one_where_the_model_has_it(made: Make, tmp_path: Path) -> None:
    folder = changed(
        made(neox_config()),
        tmp_path / "lost",
        without("gpt_neox.layers.0.attention.dense.bias"),
    )
    assert "gpt_neox.layers.0.attention.dense.bias" in refusal(folder)
    bias = "model.layers.0.self_attn.q_proj.bias"
    folder = changed(made(UNTIED), tmp_path / "bias", lambda t: t | {bias: t[HEAD][0]})
    assert f"no place for: {bias}" in refusal(folder)


def test_a_head_that_is_not_its_embedding_is_kept_as_transformers_keeps_it(made: Make, tmp_path: Path) -> None:
    folder = changed(made(llama_config()), tmp_path / "differs", lambda t: t | {HEAD: t[EMBEDDING] + 0.5})
    assert check(folder) == WeightFacts(untied=True)
    files = find_model(str(folder))
    config = read_model_config(files)
    check_weights(files, config)
    assert config.tie_word_embeddings is False
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    same(loaded(folder), theirs)
    last_row_alone = changed(
        made(llama_config()),
        tmp_path / "hardly",
        lambda t: t | {HEAD: torch.cat([t[EMBEDDING][:-1], t[EMBEDDING][-1:] + 1])},
    )
    assert check(last_row_alone).untied


PROJECTION = "model.layers.0.mlp.down_proj"
SCALE = torch.ones(1)
PACKED = torch.zeros(96, 25, dtype=torch.int32)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensors], dict[str, Any]]] = {
    "fp8, scales of blocks": (
        lambda w: {"weight": w.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 2)},
        {"quant_method": "fp8"},
    ),
    "fp8, a scale": (
        lambda w: {"weight": w.to(torch.float8_e4m3fn), "weight_scale": SCALE, "input_scale": SCALE},
        {"quant_method": "fbgemm_fp8"},
    ),
    "gptq": (
        lambda w: {
            "qweight": PACKED,
            "qzeros": PACKED,
            "scales": SCALE,
            "g_idx": torch.zeros(4, dtype=torch.int32),
        },
        {"quant_method": "gptq", "bits": 4},
    ),
    "awq": (lambda w: {"qweight": PACKED, "qzeros": PACKED, "scales": SCALE}, {"quant_method": "awq"}),
    "bitsandbytes nf4": (
        lambda w: {
            "weight": torch.zeros(100, 1, dtype=torch.uint8),
            "weight.absmax": SCALE,
            "weight.quant_map": SCALE,
            "weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "bitsandbytes int8": (
        lambda w: {"weight": w.to(torch.int8), "SCB": SCALE, "weight_format": torch.zeros((), dtype=torch.uint8)},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "mxfp4": (
        lambda w: {
            "weight_blocks": torch.zeros(96, 6, 16, dtype=torch.uint8),
            "weight_scales": torch.zeros(96, 6, dtype=torch.uint8),
        },
        {"quant_method": "mxfp4"},
    ),
    "compressed-tensors": (
        lambda w: {"weight_packed": PACKED, "weight_scale": SCALE, "weight_shape": torch.tensor(w.shape)},
        {"quant_method": "compressed-tensors"},
    ),
    "hqq": (lambda w: {"W_q": PACKED, "scale": SCALE, "zero": SCALE, "nbits": SCALE}, {"quant_method": "hqq"}),
    "quanto": (
        lambda w: {"weight._data": w.to(torch.int8), "weight._scale": SCALE},
        {"quant_method": "quanto"},
    ),
    "integers alone": (lambda w: {"weight": w.to(torch.int8)}, {"quant_method": "of somebody"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("told", [True, False], ids=["config tells", "config is silent"])
def test_quantised_weights_are_refused_by_name(layout: str, told: bool, made: Make, tmp_path: Path) -> None:
    pack, entry = LAYOUTS[layout]

    def quantise(tensors: Tensors) -> Tensors:
        weight = tensors.pop(f"{PROJECTION}.weight")
        return tensors | {f"{PROJECTION}.{name}": value for name, value in pack(weight).items()}

    folder = changed(made(UNTIED), tmp_path / "q", quantise, **({"quantization_config": entry} if told else {}))
    message = refusal(folder)
    assert message.count("\n  needed:") == 1, message
    assert "a quantised checkpoint (" in message
    assert not told or entry["quant_method"] in message
    assert PROJECTION in message
    assert refusal(folder, allow_missing=["*"], allow_unexpected=["*"]) == message


def test_weights_that_are_not_quantised_although_the_config_says_so_are_read(made: Make, tmp_path: Path) -> None:
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = changed(made(UNTIED), tmp_path / "kept", lambda t: t, quantization_config=entry)
    assert check(folder) == WeightFacts(once_quantised="bitsandbytes, 4-bit")
    eight = changed(made(UNTIED), tmp_path / "eight", lambda t: {n: v.to(torch.float8_e4m3fn) for n, v in t.items()})
    assert check(eight) == WeightFacts()  # numbers as they stand, without scales
    for name, value in loaded(eight).named_parameters():
        assert torch.equal(value, load_file(eight / "model.safetensors")[name].float())


def test_scales_of_what_nobody_reads_quantise_nothing(made: Make, tmp_path: Path) -> None:
    more = {"visual.block.scale": SCALE, "visual.block.qweight": PACKED, "visual_scales": SCALE}
    folder = changed(made(UNTIED), tmp_path / "tower", lambda t: t | more)
    assert set(check(folder, allow_unexpected=["visual*"]).left_out) == set(more)


def test_adapters_and_other_models_are_refused_in_a_sentence(made: Make, tmp_path: Path) -> None:
    name = f"base_model.model.{PROJECTION}"
    adapter = {f"{name}.lora_A.default.weight": torch.ones(4, 200), f"{name}.lora_B.default.weight": torch.ones(96, 4)}
    folder = changed(made(UNTIED), tmp_path / "adapter", lambda t: t | adapter)
    assert "2 tensors of an adapter that is not merged" in refusal(folder)
    folder = changed(made(UNTIED), tmp_path / "other", lambda t: {"bert.embeddings.weight": torch.ones(3)})
    message = refusal(folder, allow_missing=["*"], allow_unexpected=["*"])
    assert "such as bert.embeddings.weight, and none of the model's 21 parameters" in message
    assert "init: random" in message
    folder = changed(made(UNTIED), tmp_path / "empty", lambda t: {})
    assert "no tensor of the model's 21 parameters" in refusal(folder)


def test_a_matrix_with_too_few_rows_is_no_vocabulary_that_grows(made: Make, tmp_path: Path) -> None:
    """With fewer heads of keys than config.json says, only the keys' and values' rows are too few."""
    folder = changed(made(UNTIED), tmp_path / "heads", lambda t: t, num_key_value_heads=3)
    message = refusal(folder)
    assert "k_proj.weight: shape (32, 96)\n  needed: (48, 96)" in message
    model = build_on_meta(llama_config(tie_word_embeddings=False, num_key_value_heads=3), torch.float32, 300)
    with pytest.raises(UserError, match="k_proj"):
        load(model, folder, grows=True)
    short = changed(made(UNTIED), tmp_path / "short", lambda t: t, vocab_size=300)
    assert "lm_head.weight: shape (258, 96)" in refusal(short)


def test_a_stage_reads_its_part_of_names_without_their_prefix(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    write_model(tmp_path / "whole", config)
    folder = changed(
        tmp_path / "whole", tmp_path / "bare", lambda t: {n.removeprefix("transformer."): v for n, v in t.items()}
    )
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    seen: set[str] = set()
    for number in (0, 1):
        model = build_on_meta(read_model_config(find_model(str(folder))), torch.float32)
        found = match(model, read_headers(find_model(str(folder)).weights), str(folder))
        keep_stage(model, dissect(model), number, (1, 1))
        allocate(model, torch.device("cpu"))
        load_weights(model, found, seed=0)
        held = dict(model.named_parameters())
        assert all(torch.equal(value, expected[name]) for name, value in held.items())
        seen |= held.keys()
    assert seen == expected.keys()


def test_trained_values_beside_the_parameters_are_loaded(tmp_path: Path) -> None:
    """Gemma 4 multiplies by a scalar that is no parameter, but trained; Apertus keeps constants in that way."""
    shape: dict[str, Any] = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Gemma4TextConfig(
        **shape, num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size_per_layer_input=0
    )
    write_model(tmp_path / "whole", config)
    name = next(key for key in load_file(tmp_path / "whole" / "model.safetensors") if key.endswith("layer_scalar"))
    folder = changed(tmp_path / "whole", tmp_path / "trained", lambda t: t | {name: t[name] * 0.5})
    (carried,) = check(folder).carried
    assert carried == Carried("layer_scalar", 2, 8)
    assert check(folder).carried_digest != check(tmp_path / "whole").carried_digest
    assert loaded(folder).get_buffer(name) == 0.5
    same(loaded(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    another = changed(tmp_path / "whole", tmp_path / "another", lambda t: t | {name: torch.ones(2)})
    assert f"{name}: shape (2,)" in refusal(another)


def test_two_tensors_for_one_parameter_are_refused(made: Make, tmp_path: Path) -> None:
    folder = changed(made(UNTIED), tmp_path / "twice", lambda t: t | {"module." + HEAD: t[HEAD] + 1})
    assert "2 tensors for lm_head.weight: lm_head.weight, module.lm_head.weight" in refusal(folder)
