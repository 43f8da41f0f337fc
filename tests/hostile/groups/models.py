"""Model directories: weights that are lost, false or no numbers; indexes, headers, descriptions, tokenizers, templates,
code, quantised layouts and links."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hostile import mutations
from hostile.case import Case
from hostile.stock import CHATML, Stock
from hostile.strings import CANARY

WEIGHTS = "model.safetensors"
MORE = "there is a tensor more"
LEFT_OUT = "has no place for are left out"
CODE = f"""
import pathlib
pathlib.Path("{CANARY}").touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokens
class TheConfig(Config):
    model_type = "stranger"
"""
TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
    "{% for a in range(99999999999) %}x{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    f"{{{{ cycler.__init__.__globals__.os.system('touch {CANARY}') }}}}",
    f"{{{{ self.__init__.__globals__.__builtins__.open('{CANARY}', 'w') }}}}",
    f"{{% set x = namespace.__init__.__globals__['os'].popen('touch {CANARY}') %}}{{{{ x }}}}",
    "{{ raise_exception('no\x1b[31m') }}",
    "{{ messages[99].content }}",
    "{{ undefined.x }}",
    "{% include '/etc/passwd' %}",
    "{% import 'x' as y %}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ lipsum(n=10**7) }}",
    "{{ messages | map('string') | join('a' * 10**8) }}",
    "{% for m in messages %}{{ m.content | center(10**9) }}{% endfor %}",
    "",
    " ",
    "constant",
    "{{ messages[0].content }}",
    "{% for m in messages %}{{ m.role }}",
    "{{ strftime_now('%Y' * 10**7) }}",
)
LAYOUTS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"quant_method": "gptq", "bits": 4}, ("qweight", "qzeros", "scales", "g_idx")),
    ({"quant_method": "awq", "bits": 4}, ("qweight", "qzeros", "scales")),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("weight", "weight_scale_inv")),
    ({"quant_method": "mxfp4"}, ("weight_blocks", "weight_scales")),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("weight", "weight.absmax", "weight.quant_map")),
    ({"quant_method": "compressed-tensors"}, ("weight_packed", "weight_scale", "weight_shape")),
    ({"quant_method": "hqq"}, ("W_q", "meta")),
)


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """A model with something wrong, planned, trained, asked or evaluated."""
    work = folder / "work"
    kind = chance.choice(("llama", "neox", "chat"))
    model = stock.copy_model(kind, work / "model")
    spoil = chance.choice(WAYS)
    spoiled = spoil(chance, model)
    broken, reads_all = (spoiled, False) if isinstance(spoiled, str) else spoiled
    template = "auto" if kind == "chat" or spoil is _template else "plain"
    config = stock.config(model="model", data={"template": template}, output="run")
    if chance.randrange(4) == 0 and spoil is not _code:
        config["trust_remote_code"] = True
    if chance.randrange(8) == 0:
        config["init"] = "random"
        broken = ""
    (work / "config.yaml").write_text(json.dumps(config))
    short = ["--template", template, "--max-new-tokens", "3"]
    asks: list[list[str]] = [["generate", "model", "--prompt", "abc", *short]]
    asks.append(["chat", "model", *short])
    asks.append(
        [
            "eval",
            "model",
            "--data",
            str(stock.rows),
            "--exact-match",
            "0",
            "--template",
            template,
            "--max-length",
            "256",
        ]
    )
    plans = [
        ["plan", "config.yaml"],
        ["train", "config.yaml", "--dry-run"],
        ["inspect", "config.yaml"],
        ["plan", "model"],
    ]
    trains = ["train", "config.yaml", "--prepare"], ["work", "run"]
    kind_of_use = chance.randrange(8)
    if kind_of_use < 4 and not reads_all:
        words = chance.choice(plans)
        if words[0] == "inspect" or words[1] == "model":
            broken = ""  # which read no weights
        return Case([words], broken=broken)
    if kind_of_use < 7:
        words = chance.choice(asks)
        if broken == MORE and words[0] == "generate":  # an answer needs the others alone
            broken = ""
        return Case([words], broken="" if words[0] == "chat" else broken, named=[LEFT_OUT])
    return Case(list(trains), broken=broken)


Spoiled = str | tuple[str, bool]
"""What is wrong, or nothing where that is not sure; and whether it shows only where weights are read."""


def _tensors(chance: random.Random, model: Path) -> Spoiled:
    """Tensors lost, renamed, of other shapes and kinds, or no numbers."""
    tensors = load_file(model / WEIGHTS)
    name = chance.choice(sorted(tensors))
    value = tensors[name]
    way = chance.randrange(9)
    broken: Spoiled = ""
    if way == 0:
        del tensors[name]
        broken = f"{name} is lost"
    elif way == 1:
        tensors[mutations.misspelt(chance, name)] = tensors.pop(name)
        broken = f"{name} has another name"
    elif way == 2:
        tensors[name] = torch.cat([value, value])
        broken = f"{name} has another shape"
    elif way == 3:
        flat = value.clone().flatten()
        flat[chance.randrange(len(flat))] = chance.choice((float("nan"), float("inf")))
        tensors[name] = flat.reshape(value.shape)
        broken = f"{name} is no number", True
    elif way == 4:
        dtype = chance.choice((torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool))
        tensors[name] = value.to(dtype)
        broken = f"{name} is of another kind" if not dtype.is_floating_point else ""
    elif way == 5:
        tensors = {f"w{number}": found for number, found in enumerate(tensors.values())}
        broken = "no tensor is one of the model"
    elif way == 6:
        tensors = {
            f"{chance.choice(('_orig_mod.', 'module.', 'model.'))}{key}": found for key, found in tensors.items()
        }
    elif way == 7:
        tensors[
            chance.choice(
                ("visual.a.weight", "lm_head.bias", "model.layers.7.mlp.up_proj.weight", mutations.text(chance)[:50])
            )
        ] = torch.ones(3)
        broken = MORE
    else:
        tensors = {}
        broken = "there are no tensors"
    try:
        save_file({key: found.clone() for key, found in tensors.items()}, model / WEIGHTS)
    except Exception:  # a name that no file can hold
        broken = ""
    return broken


def _header(chance: random.Random, model: Path) -> Spoiled:
    """A false header before the same bytes."""
    raw = (model / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, rest = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    way = chance.randrange(6)
    if way == 0:
        number = chance.choice((0, 1, length - 1, length + 1, len(raw), 2**31, 2**40, 2**63, 2**64 - 1))
        (model / WEIGHTS).write_bytes(struct.pack("<Q", number) + raw[8:])
        return "the length of the header is false"
    if way == 1:
        text = mutations.deep(chance).encode()
        (model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + rest)
        return "the header is deep"
    if way == 2:
        (model / WEIGHTS).write_bytes(raw[: -chance.randrange(1, len(rest))])
        return "the file is cut"
    if way == 3:
        name = chance.choice([key for key in header if key != "__metadata__"])
        header[name]["data_offsets"] = [chance.choice((-1, 0, 5, len(rest), 2**63, 2**70)) for _ in range(2)]
        broken = "a tensor lies elsewhere"
    elif way == 4:
        name = chance.choice([key for key in header if key != "__metadata__"])
        header[name]["shape"] = chance.choice(([-1, 2], [2**62, 4], [0], [], "x", [1.5], [10**30], None))
        broken = "a tensor has another shape"
    else:
        header = mutations.changed(chance, header)
        broken = ""
    text = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return broken


def _bytes(chance: random.Random, model: Path) -> Spoiled:
    """Any file of the directory, with something done to its bytes."""
    path = chance.choice(sorted(path for path in model.iterdir()))
    path.write_bytes(mutations.content(chance, path.read_bytes()))
    return ""


def _index(chance: random.Random, model: Path) -> Spoiled:
    """An index beside, or instead of, the one file."""
    tensors = load_file(model / WEIGHTS)
    index = model / "model.safetensors.index.json"
    (model / WEIGHTS).rename(model / "part.safetensors")
    secret = model.parent.parent / "outside" / "secret.txt"
    right: Any = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "part.safetensors")}
    way = chance.randrange(7)
    if way == 0:
        name = chance.choice(
            (
                "../../outside/secret.txt",
                str(secret),
                "/etc/passwd",
                "../model/part.safetensors",
                "a\0b",
                "",
                ".",
                "/dev/zero",
            )
        )
        right["weight_map"] = dict.fromkeys(tensors, name)
        broken = "the index leads out of the directory"
    elif way == 1:
        right["weight_map"] = {}
        broken = "the index is empty"
    elif way == 2:
        index.write_text(mutations.deep(chance))
        return "the index is deep"
    elif way == 3:
        index.write_bytes(mutations.content(chance, json.dumps(right).encode()))
        return ""
    elif way == 4:
        right = mutations.changed(chance, right, 2)
        broken = ""
    elif way == 5:
        right["weight_map"][chance.choice(sorted(tensors))] = "lost.safetensors"
        broken = "a file of the index is lost"
    else:
        right = mutations.value(chance)
        broken = "the index is none"
    index.write_text(json.dumps(right), errors="surrogatepass")
    return broken


def _description(chance: random.Random, model: Path) -> Spoiled:
    """Entries of config.json, generation_config.json, tokenizer_config.json or tokenizer.json."""
    name = chance.choice(
        (
            "config.json",
            "config.json",
            "config.json",
            "generation_config.json",
            "tokenizer_config.json",
            "tokenizer.json",
        )
    )
    path = model / name
    path.write_text(
        json.dumps(mutations.changed(chance, json.loads(path.read_text()), chance.choice((1, 1, 2, 5)))),
        errors="surrogatepass",
    )
    return ""


def _shape(chance: random.Random, model: Path) -> Spoiled:
    """Sizes in config.json that are not those of the weights."""
    path = model / "config.json"
    described = json.loads(path.read_text())
    name = chance.choice(("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"))
    before = described[name]
    described[name] = chance.choice((before * 2, before + 4, 0, -1, 2**40, 10**12))
    path.write_text(json.dumps(described))
    return f"{name} is {described[name]}, of the weights {before}"


def _template(chance: random.Random, model: Path) -> Spoiled:
    """A chat template that loops, grows, escapes or is none."""
    text = chance.choice(TEMPLATES)
    if chance.randrange(3) == 0:
        text = mutations.content(chance, CHATML.encode()).decode("utf-8", "replace")
    elif chance.randrange(2):
        text = CHATML + text
    if chance.randrange(3) == 0:
        (model / "chat_template.jinja").unlink(missing_ok=True)
        described = json.loads((model / "tokenizer_config.json").read_text())
        described["chat_template"] = chance.choice(
            (text, [{"name": "default", "template": text}], {"default": text}, mutations.value(chance))
        )
        (model / "tokenizer_config.json").write_text(json.dumps(described), errors="surrogatepass")
    else:
        (model / "chat_template.jinja").write_text(text)
    return ""


def _code(chance: random.Random, model: Path) -> Spoiled:
    """The model's own code, which nobody allowed to run."""
    (model / "code.py").write_text(CODE)
    described = json.loads((model / "config.json").read_text())
    described["auto_map"] = {"AutoConfig": "code.TheConfig", "AutoModelForCausalLM": "code.Model"}
    broken = ""
    if chance.randrange(2):
        described["model_type"] = chance.choice(("stranger", "", None, "llama2", 3))
        broken = "the model is a stranger whose code may not run"
    if chance.randrange(2):
        tokens = json.loads((model / "tokenizer_config.json").read_text())
        tokens["auto_map"] = {
            "AutoTokenizer": chance.choice(
                (["code.Tokens", None], ["code.Tokens", "code.Tokens"], "code.Tokens", [None])
            )
        }
        if chance.randrange(2):
            tokens["tokenizer_class"] = "Tokens"
        (model / "tokenizer_config.json").write_text(json.dumps(tokens))
    (model / "config.json").write_text(json.dumps(described))
    return broken


def _quantised(chance: random.Random, model: Path) -> Spoiled:
    """A layer as another program packed it."""
    entry, names = chance.choice(LAYOUTS)
    tensors = load_file(model / WEIGHTS)
    name = chance.choice(
        sorted(key for key in tensors if ".layers." in key and key.endswith("weight") and tensors[key].ndim == 2)
    )
    value = tensors.pop(name)
    packed = [value.to(torch.float8_e4m3fn) if word == "weight" else torch.ones(4, dtype=torch.int32) for word in names]
    if chance.randrange(3) == 0:  # scales left out
        names = names[:1]
    tensors |= {f"{name.removesuffix('weight')}{word}": found for word, found in zip(names, packed, strict=False)}
    save_file({key: found.clone() for key, found in tensors.items()}, model / WEIGHTS)
    told = chance.randrange(3) > 0
    if told:
        described = json.loads((model / "config.json").read_text())
        described["quantization_config"] = mutations.changed(chance, entry) if chance.randrange(4) == 0 else entry
        (model / "config.json").write_text(json.dumps(described), errors="surrogatepass")
    as_it_stands = names[0] == "weight" and len(names) == 1 and not told  # 8-bit floats that nothing multiplies
    return "" if as_it_stands else "a layer is quantised"


def _files(chance: random.Random, model: Path) -> Spoiled:
    """Files of other kinds under the usual names."""
    outside = model.parent.parent / "outside" / "secret.txt"
    name = chance.choice((WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json"))
    path = model / name
    way = chance.randrange(7)
    if way == 0:
        (model / WEIGHTS).write_bytes(pickle.dumps({"a": [1.0] * 100}))
        return "the weights are a pickle"
    if way == 1:
        torch.save({"a": torch.ones(3)}, model / "pytorch_model.bin")
        (model / WEIGHTS).unlink()
        return "the weights are a pickle"
    content = path.read_bytes()
    path.unlink()
    needed = name != "tokenizer_config.json"
    if way == 2:
        path.symlink_to(outside)
    elif way == 3:
        path.symlink_to(path.name)
    elif way == 4:
        os.mkfifo(path)
    elif way == 5:
        path.mkdir()
    elif chance.randrange(2):
        path.symlink_to("/dev/zero")
    else:
        inside = model / "blob"
        inside.write_bytes(content)
        path.symlink_to(inside.name)
        return ""
    return f"{name} is no file" if needed else ""


def _gone(chance: random.Random, model: Path) -> Spoiled:
    """A file less, or no directory at all."""
    path = chance.choice(sorted(model.iterdir()))
    path.unlink()
    if chance.randrange(5) == 0:
        shutil.rmtree(model)
        return "there is no model"
    return f"{path.name} is gone" if path.name in (WEIGHTS, "config.json", "tokenizer.json") else ""


WAYS: tuple[Callable[[random.Random, Path], Spoiled], ...] = (
    *(_tensors, _tensors, _header, _bytes, _index, _description, _description, _shape, _template, _code, _quantised),
    *(_files, _gone),
)
