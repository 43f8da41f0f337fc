"""The small files of an export, so that transformers 4.57 and 5 read the same model, tokenizer and decoding from them.

    config.json              rope settings under their names before and since 5, dtype as well as torch_dtype
    generation_config.json   the model's own; its stop tokens and ours
    tokenizer files          as the run kept them, under a class that both know, with all chat templates

Transformers 5 reads what 4 wrote, so nothing is written twice that can be said in a way that both understand. What is
written twice is the same: 5 prefers ``rope_scaling`` to ``rope_parameters``.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from tonnage.errors import UserError
from tonnage.model.files import CONFIG, GENERATION, TOKENIZER_CONFIG, find_model, read_whole_config
from tonnage.model.quantised import QUANTISATION
from tonnage.model.scorer import is_scorer
from tonnage.model.stored import read_json_object
from tonnage.model.towers import TOKENS

ANY_FAST = "PreTrainedTokenizerFast"
"""The class of transformers 4 that takes tokenizer.json as it is; 5 knows it by this name too."""
OWN_TO_5 = ("backend", "is_local", "local_files_only")
"""Keys of tokenizer_config.json that say how somebody loaded the tokenizer."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files about images and other things that are no text."""


@dataclass(frozen=True)
class ExportForm:
    """What is written beside the weights, and their type."""

    config: PreTrainedConfig
    tokenizer: Path
    """A directory whose files are copied."""
    stop_tokens: Sequence[int]
    """End a turn; added to those of the generation configuration that the model has from which a run was started."""
    dtype: torch.dtype


def describe(
    directory: Path, model: PreTrainedModel, form: ExportForm, origin: Path, *, is_part: bool = False
) -> list[str]:
    """Write all but the weights of ``model`` to ``directory``.

    ``origin`` is the directory of the model that was trained, for its generation configuration; where it has none, one
    is made from the configuration in ``form``, which is changed. ``is_part``: that is of the text model in ``model``,
    whose own configuration and processors ``origin`` has.

    Returns what had to be changed, a sentence for each.
    """
    config = form.config
    generation, notes = _own_generation(config, origin)
    notes += add_stop_tokens(generation, config, form.stop_tokens)
    notes += repair(generation)
    padding = None
    if is_scorer(config):  # which generates nothing
        padding, notes = _padding(form)
    else:
        _write(directory / GENERATION, generation)
    config.dtype = form.dtype
    config.use_cache = True
    config.architectures = [type(model).__name__]
    outer = config
    if is_part:
        outer = _around(config, origin)
        for name in PROCESSORS:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, directory / name)
    for written in (config, outer):
        for name in QUANTISATION:  # what is written is not quantised
            if hasattr(written, name):
                delattr(written, name)
    if hasattr(config, "auto_map"):
        custom_object_save(model, directory, config=config)  # type: ignore[arg-type]
    outer.save_pretrained(directory)
    described = json.loads((directory / CONFIG).read_text())
    inner = described["text_config"] if is_part else described
    older = older_names(config, inner)
    if not _means_the_same(type(config), inner, inner | older):
        older = {name: value for name, value in older.items() if name == "torch_dtype"}
        notes.append(f"rope settings of {CONFIG}: transformers 4 has no words for them")
    inner.update(older)
    if is_part and "dtype" in described:
        described["torch_dtype"] = described["dtype"]
    _write(directory / CONFIG, described)
    shutil.copytree(form.tokenizer, directory, dirs_exist_ok=True)
    _write_tokenizer_config(directory, padding)
    return notes


def _padding(form: ExportForm) -> tuple[str | None, list[str]]:
    """The token with which texts that a scorer reads together are padded, set in the configuration, and what there is
    to say of it. transformers scores the last token that is not padding: what ends a text cannot be it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(form.tokenizer)
    ends = {*form.stop_tokens, tokenizer.eos_token_id}
    candidates = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    chosen = next((one for one in candidates if one is not None and one not in ends), None)
    form.config.pad_token_id = chosen
    if chosen is None:
        return None, ["no token to pad with but those that end an answer: texts are scored one at a time"]
    text = str(tokenizer.convert_ids_to_tokens(chosen))
    return text, [] if chosen == tokenizer.pad_token_id else [f"texts are padded with {text}, which ends no answer"]


def _around(config: PreTrainedConfig, origin: Path) -> PreTrainedConfig:
    """The configuration of the whole model in ``origin`` with that of the text model as it is now."""
    files = find_model(str(origin), random_weights=True, tokenizer=False)
    outer = read_whole_config(files)
    config.architectures = outer.text_config.architectures
    outer.tie_word_embeddings = config.tie_word_embeddings
    outer.dtype = config.dtype
    for name in TOKENS:
        if getattr(outer, name, None) is not None:
            setattr(outer, name, getattr(config, name))
    outer.text_config = config
    return outer


def older_names(config: PreTrainedConfig, described: Mapping[str, Any]) -> dict[str, Any]:
    """What ``described``, the JSON form of ``config``, says in the words of transformers 4.57 and before."""
    older = {"torch_dtype": described["dtype"]} if "dtype" in described else {}
    rope = described.get("rope_parameters")
    if not rope:
        return older
    whole = rope.get("full_attention") if isinstance(rope.get("full_attention"), dict) else rope
    local = rope.get("sliding_attention")
    if isinstance(local, dict):  # Gemma 3, OLMo 3, ModernBERT
        theta = local.get("rope_theta")
        older |= {
            "rope_local_base_freq": theta,
            "local_rope_theta": theta,
            "global_rope_theta": whole.get("rope_theta"),
        }
    theta, part = whole.get("rope_theta"), whole.get("partial_rotary_factor")
    older |= {"rope_theta": theta}
    if part is not None:
        older |= {"partial_rotary_factor": part}
    if config.model_type.startswith("gpt_neox"):
        older |= {"rotary_emb_base": theta, "rotary_pct": 1.0 if part is None else part}
    if whole.get("rope_type", "default") != "default":
        older["rope_scaling"] = _scaling(config.model_type, whole)
        if config.model_type == "phi3":
            older["original_max_position_embeddings"] = whole["original_max_position_embeddings"]
    return {name: value for name, value in older.items() if value is not None}


def _means_the_same(kind: type[PreTrainedConfig], described: dict[str, Any], twice: dict[str, Any]) -> bool:
    """Whether transformers 5 reads the same rope settings from both."""
    try:
        both = [kind.from_dict(copy.deepcopy(one)) for one in (described, twice)]
    except Exception:  # a family that refuses a second word for what it has one for
        return False
    ropes = (getattr(read, "rope_parameters", None) or {} for read in both)
    one, other = ({name: value for name, value in rope.items() if name != "type"} for rope in ropes)
    return one == other


def _scaling(family: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    if family == "phi3":  # refuses any other key
        return {"type": rope["rope_type"], "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    return {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}


def _own_generation(config: PreTrainedConfig, origin: Path) -> tuple[dict[str, Any], list[str]]:
    """The generation configuration of a model, and what is to be said of it.

    Where config.json holds parameters of generation, as was usual once, they go into it.
    """
    notes = []
    in_config = config._get_generation_parameters()
    for name in in_config:
        delattr(config, name)
    if in_config:
        notes.append(f"{', '.join(in_config)} of config.json: now in {GENERATION}")
    if (origin / GENERATION).exists():
        try:
            return in_config | read_json_object(origin / GENERATION), notes
        except UserError as error:
            notes.append(f"{GENERATION} of the model cannot be read ({error.problems[0].found}): made from config.json")
    return GenerationConfig.from_model_config(config).to_diff_dict() | in_config, notes


def add_stop_tokens(generation: dict[str, Any], config: PreTrainedConfig, stop_tokens: Sequence[int]) -> list[str]:
    """Let what ends a turn end an answer, beside what ended one before; in ``generation`` and ``config``."""
    stated, most = generation.get("eos_token_id"), getattr(config, "vocab_size", None) or 2**31
    before = [token for token in _tokens(stated) if 0 <= token < most]
    odd = [one for one in (stated if isinstance(stated, list | tuple) else [stated]) if one not in before]
    broken = stated is not None and (odd or not before)
    stops = [*(before or _tokens(config.eos_token_id)), *stop_tokens]
    if broken:
        del generation["eos_token_id"]
    if stops:
        generation["eos_token_id"] = list(dict.fromkeys(stops)) if len(set(stops)) > 1 else stops[0]
    in_config = list(dict.fromkeys([*_tokens(config.eos_token_id), *stop_tokens]))
    if in_config:
        config.eos_token_id = in_config if len(in_config) > 1 else in_config[0]
    if broken:
        written = generation.get("eos_token_id", "nothing")
        return [
            f"eos_token_id of the model's {GENERATION} is {str(stated)[:100]}, which is not token ids below "
            f"{most:,}: {written} stands there now"
        ]
    added = [str(token) for token in stop_tokens if before and token not in before]
    return [f"eos_token_id of {GENERATION}: {', '.join(added)} added, which ends a turn"] if added else []


def _tokens(value: Any) -> list[int]:
    listed = value if isinstance(value, list | tuple) else [value]
    return [token for token in listed if isinstance(token, int) and not isinstance(token, bool)]


def repair(generation: dict[str, Any]) -> list[str]:
    """Change as little of a generation configuration as lets transformers save it; says what.

    Parameters of sampling without ``do_sample`` mean sampling; where it is false or the temperature is zero, they mean
    nothing and go, as does what else transformers refuses.
    """
    notes: list[str] = []
    while (refusal := _refusal(generation)) is not None:
        named = re.findall(r"^- `([a-z_]+)`:", refusal, re.MULTILINE) or re.findall(r"`([a-z_]+)`", refusal)
        faulty = [name for name in named if name in generation] or [
            name for name, value in generation.items() if _refusal({name: value}) is not None
        ]
        if not faulty:
            tokens_alone = {name: tokens[0] for name in TOKENS if (tokens := _tokens(generation.get(name)))}
            generation.clear()
            generation.update(tokens_alone)
            return [f"{GENERATION} of the model cannot be used ({refusal[:100]}): only its tokens are kept"]
        samples = generation.get("do_sample") is None and generation.get("temperature", 1)
        if "`do_sample` is not set" in refusal and samples:
            generation["do_sample"] = True
            notes.append(f"{GENERATION}: do_sample is true now, for the sake of {', '.join(faulty)}")
            continue
        gone = [f"{name} ({str(generation.pop(name))[:40]})" for name in faulty]
        notes.append(f"{GENERATION}: without {', '.join(gone)}, which transformers refuses")
    return notes


def _refusal(generation: Mapping[str, Any]) -> str | None:
    """Why transformers would not save a generation configuration; None if it would."""
    try:
        GenerationConfig(**generation).validate(strict=True)
    except Exception as error:  # ValueError where it looks; values of odd types stumble in many ways
        return str(error) or type(error).__name__
    return None


def _write_tokenizer_config(directory: Path, padding: str | None = None) -> None:
    """Say of the tokenizer in ``directory`` what transformers 4.57 needs to read it as 5 does, and with which token it
    pads, if that is another one than before."""
    path = directory / TOKENIZER_CONFIG
    if not path.is_file():
        return
    described = read_json_object(path)
    for name in OWN_TO_5:
        described.pop(name, None)
    if (directory / "tokenizer.json").is_file() and "auto_map" not in described:
        described["tokenizer_class"] = ANY_FAST
        described.setdefault("model_input_names", ["input_ids", "attention_mask"])
        described.setdefault("clean_up_tokenization_spaces", False)
    if padding is not None:
        described["pad_token"] = padding
    if isinstance(described.get("extra_special_tokens"), list):
        described["additional_special_tokens"] = described.pop("extra_special_tokens")
    _write(path, described)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
