"""A model's own code runs where the user allowed it, and nowhere else.

A model directory can name Python classes of its own (``auto_map`` in config.json and tokenizer_config.json), which
transformers imports where ``trust_remote_code`` is true, and asks for on standard input where it is not said. It is
always said here. Where transformers has classes of its own for a model, these are used and ``auto_map`` means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.errors import UserError, user_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL_CLASS = "AutoModelForCausalLM"


def named_code(described: Mapping[str, Any], what: str) -> str | None:
    """The class of its own code that a model's JSON file names for ``what`` (``AutoConfig``); None if it names none."""
    auto_map = described.get("auto_map")
    named = auto_map.get(what) if isinstance(auto_map, Mapping) else auto_map if what == "AutoTokenizer" else None
    if isinstance(named, list | tuple):
        named = next((name for name in named if name is not None), None)
    return named[:200] if isinstance(named, str) else None


def check_config_code(described: Mapping[str, Any], where: Path) -> None:
    """Refuse a config.json that only code of its own can read. Raises ``UserError``."""
    from transformers import CONFIG_MAPPING

    named = named_code(described, "AutoConfig")
    if named is not None and described.get("model_type") not in CONFIG_MAPPING:
        raise refused(named, where)


def without_code(config: PreTrainedConfig, where: Path) -> PreTrainedConfig:
    """A configuration that transformers read with its own classes, and builds a model of with them.

    Raises:
        UserError: only code that came with the model can.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    named = named_code(vars(config), MODEL_CLASS)
    if named is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused(named, where)
    if hasattr(config, "auto_map"):
        del config.auto_map
    return config


def refused(named: str, where: Path) -> UserError:
    """Somebody's code would run."""
    return user_error(
        where=str(where),
        found=f"the model comes with code of its own ({named}), which does not run unless it is allowed to",
        needed="a model that the installed transformers knows, or your word that the code may run on this machine",
        change="read the code; then write trust_remote_code: true into the config, or give --trust-remote-code to "
        "a command that takes a model",
    )
