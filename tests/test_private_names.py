"""Private names of libraries that we use: all are listed, and all are there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "private-names.md").read_text()
LIBRARIES = ("torch", "transformers", "numba", "datasets", "tokenizers", "safetensors", "rich", "typer", "pydantic")
NOT_THEIRS = {"os._exit", "axes._asdict", "open_setting._replace", "segment._replace", "Setting._fields"}
"""Python's own, documented in spite of its name, and of our own classes."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def used() -> set[str]:
    """Private names in the code: modules, what is imported of them, and attributes of anything but ``self``."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
                inside = any(is_private(part) for part in (node.module or "").split("."))
                found |= {f"{node.module}.{alias.name}" for alias in node.names if inside or is_private(alias.name)}
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                whole = ast.unparse(node)
                if not re.match(r"(self|cls)\b", whole) and whole not in NOT_THEIRS:
                    found.add(node.attr)
    return found


def listed() -> set[str]:
    names = set()
    for cell in re.findall(r"^\| (`.*?|.*?`.*?) \|", PAGE, re.MULTILINE):
        for name in re.findall(r"`([\w.*]+)`", cell):
            names.add(name)
    return names


@pytest.mark.slow
def test_every_private_name_is_listed_and_no_other() -> None:
    ends = {name.rpartition(".")[2] for name in listed()}
    names = {name.rpartition(".")[2] for name in used()}
    operations = {name for name in names if hasattr(torch.ops.aten, name)}
    assert names - ends - operations == set(), "not in docs/private-names.md"
    assert ends - names - {"*", "_*"} == set(), "in docs/private-names.md, and no longer used"


@pytest.mark.parametrize("name", sorted(name for name in used() if "." in name))
def test_what_is_imported_is_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute), f"{name} is gone: see docs/private-names.md"


def test_attributes_are_what_they_were() -> None:
    from numba import njit
    from numba.np.ufunc import parallel
    from transformers import LlamaConfig, LlamaForCausalLM

    assert hasattr(parallel, "_backend_init_process_lock")
    module = nn.Linear(2, 2)
    assert module._parameters.keys() == {"weight", "bias"}
    assert (module._buffers, module._modules) == ({}, {})
    assert isinstance(torch.cpu._is_amx_tile_supported(), bool)
    assert isinstance(torch.empty(1).untyped_storage()._cdata, int)
    assert torch.ops.aten.add.Tensor._overloadpacket is torch.ops.aten.add
    assert torch.ops.aten.add.Tensor._schema.name == "aten::add"
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
        assert hasattr(torch.ops._c10d_functional, name)
    assert LlamaForCausalLM._no_split_modules == ["LlamaDecoderLayer"]
    assert callable(LlamaForCausalLM._init_weights)
    config = LlamaConfig()
    assert hasattr(config, "_attn_implementation")
    assert hasattr(config, "_experts_implementation")
    assert isinstance(config._get_generation_parameters(), dict)
    for name in ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"):
        assert hasattr(LlamaForCausalLM, name)
    assert hasattr(njit(lambda: None), "_cache")


def test_what_may_become_public_is_not_yet() -> None:
    """Use the public name where this fails."""
    for module in ("torch.utils.pytree", "torch.subclasses"):
        with pytest.raises(ImportError):
            importlib.import_module(module)
