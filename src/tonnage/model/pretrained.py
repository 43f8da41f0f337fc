"""A whole model on one device, for writing answers: transformers loads it, after the checks that training makes.

Transformers can do here what training cannot yet: unpack quantised weights of every kind. Those that training can read
are read as there, unless transformers needs nothing for them that may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from tonnage.errors import UserError, user_error
from tonnage.model.build import allocate, load_buffers, load_weights, num_not_finite, on_meta
from tonnage.model.dtypes import DTYPES
from tonnage.model.files import GENERATION, ModelFiles, read_model_config, read_whole_config
from tonnage.model.matching import check_weights, find_places, matches, missing_from_files, unexpected
from tonnage.model.quantised import QUANTISATION, method_of
from tonnage.model.quietly import quietly
from tonnage.model.stored import FLOATS, read_headers

READ_BY_TRANSFORMERS = ("fp8", "mxfp4")
"""Methods whose weights transformers reads by itself."""
FLOAT_DTYPES = frozenset(DTYPES[name] for name in FLOATS)


def load_pretrained(files: ModelFiles, *, trust_remote_code: bool = False, allow_unexpected: Sequence[str] = ()) -> Any:
    """The model of a directory in the type of its weights, on the CPU; ``allow_unexpected`` are patterns of tensors
    that may be left out, for which it has no place.

    Raises:
        UserError: weights are missing, damaged or not finite, there are others than config.json describes, or
            transformers cannot load them.
    """
    config = read_model_config(files, trust_remote_code=trust_remote_code)
    weights = check_weights(files, config, allow_unexpected=allow_unexpected, unpacks=True)
    unwanted = ["transformers_weights"]  # another name for the files than the one under which they were checked
    if weights.once_quantised is not None:
        unwanted += QUANTISATION
    for name in unwanted:
        if hasattr(config, name):
            delattr(config, name)
    is_packed = method_of(config) is not None and not (weights.once_quantised or weights.unpacked)
    whole = read_whole_config(files, trust_remote_code=trust_remote_code)
    alone = weights.unpacked is not None and method_of(config) not in READ_BY_TRANSFORMERS
    is_foreign = weights.unwrapped or type(whole) is not type(config) or alone
    if is_foreign:
        model = _by_ourselves(files, config, allow_unexpected)
    else:
        model, names = _plainly(files, config, trust_remote_code)
        if is_packed:  # of those weights, transformers alone knows which belongs where
            _check_names(model, names, allow_unexpected, str(files.directory))
            _check_unpacked(model, str(files.directory))
    named = model.named_parameters()
    plain = ((name, value) for name, value in named if not is_traceable_wrapper_subclass_type(type(value)))
    numbers = {name: value.detach() for name, value in plain if value.dtype in FLOAT_DTYPES}
    broken = [name for name, value in numbers.items() if value.numel() and num_not_finite(value)]
    if broken:
        raise user_error(
            where=str(files.directory),
            found=f"weights that are not finite: {', '.join(broken[:5])}",
            needed="weights without NaN and infinity",
            change="use a whole copy of the model, or an earlier checkpoint of it",
        )
    return model


def _check_names(model: Any, names: Any, allow_unexpected: Sequence[str], where: str) -> None:
    """Refuse a quantised model of which transformers missed parameters, or found tensors of modules that it has not."""
    modules = dict(model.named_modules())
    strange = [key for key in sorted(names["unexpected_keys"]) if key.rpartition(".")[0] not in modules]
    problems = [
        *missing_from_files(sorted(names["missing_keys"]), sum(1 for _ in model.parameters()), where),
        *unexpected([key for key in strange if not matches(key, allow_unexpected)], where),
    ]
    if problems:
        raise UserError(*problems)


def _check_unpacked(model: Any, where: str) -> None:
    """Refuse a quantised model some of whose weights transformers left as they are stored, as it does where their
    scales are missing, in layers that cannot compute with them."""
    packed = [
        f"{name}.weight ({module.weight.dtype})"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module.weight.dtype not in FLOAT_DTYPES
    ]
    if packed:
        raise user_error(
            where=where,
            found=f"{len(packed):,} quantised weights that transformers cannot unpack, such as {packed[0]}",
            needed="the scales of every quantised weight",
            change="use a whole copy of the model, or the original that this one was quantised from",
        )


def _plainly(files: ModelFiles, config: PreTrainedConfig, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model, and which names transformers missed or did not expect."""
    try:
        with quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.directory,
                config=config,
                dtype="auto",
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
            model, names = loaded
            return model, names
    except Exception as error:  # libraries that quantised weights need, kernels that a machine lacks, ...
        lines = str(error).strip().split("\n")
        raise user_error(
            where=str(files.directory),
            found=f"transformers cannot load it ({type(error).__name__}: {lines[0][:300]})",
            needed="a model that the installed transformers can load",
            change="save the model again, or install what it asks for",
        ) from error


def _by_ourselves(files: ModelFiles, config: PreTrainedConfig, allow_unexpected: Sequence[str]) -> Any:
    """A model whose names transformers would not find, or that is a part of the one in the files."""
    dtype = next(stored.dtype for stored in read_headers(files.weights) if stored.is_float)
    model = on_meta(config, DTYPES[dtype])
    match = find_places(model, files, allow_unexpected=allow_unexpected)
    allocate(model, torch.device("cpu"))
    load_buffers(model, match)
    load_weights(model, match, seed=0)
    if (files.directory / GENERATION).is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(files.directory)
        except Exception as error:  # whatever a stranger wrote into it
            raise user_error(
                where=str(files.directory / GENERATION),
                found=f"settings that transformers cannot read ({type(error).__name__}: {str(error).strip()[:300]})",
                needed="those of a way to write answers",
                change="mend that file, or remove it",
            ) from error
    return model
