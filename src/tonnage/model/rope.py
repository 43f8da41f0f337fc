"""Positions beyond those that a model was trained with: the scaling of its rotary embeddings, written into its
configuration before it is built.

Whoever builds the model then computes its frequencies with transformers' own functions, and the configuration of an
export says the same to everybody who reads it. Nothing here computes a frequency.

Models with a set of frequencies for each kind of layer (Gemma 3, OLMo 3) are scaled in layers of full attention: the
others never look further than their window.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tonnage.errors import UserError, user_error
from tonnage.model.quietly import quietly

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WHOLE = "full_attention"
"""The kind of layer whose positions go as far as documents do."""
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
KEYS = ("rope_parameters", LONGEST)
"""Of a configuration that a scaling changes."""
SCALINGS = ("default", "linear", "yarn", "llama3")
"""Types of frequencies that others can take the place of: of the rest, some have sizes of the model in them."""
OF_A_TYPE = ("factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
OF_LLAMA = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""With the values that Llama 3.1 has."""


def scale(config: PreTrainedConfig, rope: Mapping[str, Any]) -> None:
    """Write a scaling into the configuration of a text model; ``rope`` has keys of the config's ``rope`` section.

    Raises:
        UserError: the family has no rotary embeddings that can be scaled, or it is not known how far they went.
    """
    own, whole = getattr(config, "rope_parameters", None), getattr(config, LONGEST, None)
    kinds = [key for key, value in own.items() if isinstance(value, Mapping)] if isinstance(own, Mapping) else []
    if not isinstance(own, Mapping) or not isinstance(whole, int) or (kinds and WHOLE not in kinds):
        raise _refused(config, f"no rotary embeddings of {WHOLE} layers" if kinds else "no rotary embeddings")
    before = dict(own[WHOLE] if kinds else own)
    if (before.get("rope_type") or "default") not in SCALINGS:
        raise _refused(config, f"rotary embeddings of type {before.get('rope_type')}, which cannot be scaled")
    scaled, positions = _scaled(config, before, dict(rope), whole)
    parameters = {**copy.deepcopy(dict(own)), WHOLE: scaled} if kinds else scaled
    trial = copy.deepcopy(config)
    for described in (trial, config):
        described.rope_parameters = copy.deepcopy(parameters)
        described.max_position_embeddings = positions
        if hasattr(described, ORIGINAL):  # which transformers would prefer to that of the parameters
            setattr(described, ORIGINAL, scaled.get(ORIGINAL, getattr(described, ORIGINAL)))
        if described is trial:
            _check_heard(trial, scaled["rope_type"])


def has_rope(config: PreTrainedConfig) -> bool:
    """Whether a model has rotary embeddings that nothing scales yet."""
    own = getattr(config, "rope_parameters", None)
    own = own.get(WHOLE, own) if isinstance(own, Mapping) else None
    return isinstance(own, Mapping) and own.get("rope_type") == "default"


def positions_in(config: PreTrainedConfig) -> dict[str, Any]:
    """What ``set_positions`` takes, of a configuration that was scaled."""
    return {key: getattr(config, key) for key in KEYS}


def set_positions(config: PreTrainedConfig, positions: Mapping[str, Any], where: str) -> None:
    """Give a model the positions with which an adapter of it was trained. Raises ``UserError`` if it cannot have
    them."""
    rope, longest = (positions.get(key) for key in KEYS)
    if set(positions) != set(KEYS) or not isinstance(rope, Mapping) or type(longest) is not int:
        raise user_error(
            where=where,
            found=f"{', '.join(sorted(map(str, positions)))[:200] or 'nothing'}",
            needed=f"{' and '.join(KEYS)} of the model that the adapter was trained with",
            change="use a whole copy of the adapter",
        )
    nested = rope.get(WHOLE) if isinstance(rope.get(WHOLE), Mapping) else rope
    for key, value in zip(KEYS, (copy.deepcopy(dict(rope)), longest), strict=True):
        setattr(config, key, value)
    assert isinstance(nested, Mapping)
    _check_heard(config, str(nested.get("rope_type")))


def _scaled(
    config: PreTrainedConfig, before: dict[str, Any], rope: dict[str, Any], whole: int
) -> tuple[dict[str, Any], int]:
    """Parameters of the rotary embeddings of a model that has some, and how many positions it has then."""
    kind, factor = rope["type"], float(rope["factor"])
    own_kind, own_factor = before.get("rope_type") or "default", before.get("factor") or 1.0
    is_same = kind == own_kind
    original = rope.get(ORIGINAL) or before.get(ORIGINAL)
    if original is None and own_kind == "linear" and not is_same:
        raise user_error(
            where="rope.type",
            found=f"{kind}, and a {config.model_type} whose positions are scaled as linear with factor {own_factor:g}",
            needed="how many positions it was trained with before that, which its config.json does not say",
            change="rope.type=linear, or write rope.original_max_position_embeddings with yarn or llama3",
        )
    original = original or (whole if own_kind == "default" else round(whole / own_factor))
    remaining = {key: value for key, value in before.items() if is_same or key not in (*OF_A_TYPE, *OF_LLAMA, "type")}
    scaled: dict[str, Any] = {**remaining, "rope_type": kind}
    if "type" in scaled:  # the name before transformers 5
        scaled["type"] = kind
    if rope.get("theta") is not None:
        scaled["rope_theta"] = float(rope["theta"])
    if kind != "default":
        scaled["factor"] = factor
    if kind == "llama3":
        scaled |= {key: remaining.get(key, value) for key, value in OF_LLAMA.items()}
    if kind in ("yarn", "llama3"):
        scaled[ORIGINAL] = original
    scaled |= {key: rope[key] for key in (*OF_A_TYPE, *OF_LLAMA) if key in rope and key not in ("factor", ORIGINAL)}
    if kind == "llama3" and scaled["low_freq_factor"] >= scaled["high_freq_factor"]:
        raise user_error(
            where="rope",
            found=f"a low_freq_factor of {scaled['low_freq_factor']:g} and a high_freq_factor of "
            f"{scaled['high_freq_factor']:g}, of which the config says one and the model the other",
            needed="the first below the second",
            change="write both",
        )
    # Llama 3.1 has twice as many positions as its factor times the original ones: so it has with another factor.
    grows = is_same and own_kind != "default" and before.get(ORIGINAL, original) == original
    return scaled, int(whole / own_factor * factor if grows else original * factor)


def _refused(config: PreTrainedConfig, observed: str) -> UserError:
    return user_error(
        where="rope",
        found=f"a {config.model_type} with {observed}",
        needed=f"rotary embeddings of one of the types {', '.join(SCALINGS)}",
        change="leave rope out: this model has the positions that it was made with",
    )


def _check_heard(config: PreTrainedConfig, kind: str) -> None:
    """Refuse a family whose code does not ask for the type. Raises ``UserError``."""
    import torch

    from tonnage.model.build import on_meta
    from tonnage.model.tiny import shorten

    try:
        with quietly():
            model = on_meta(shorten(config), torch.float32)
    except Exception as error:  # whatever a family's class says to positions that it was not made for
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _refused(
            config, f"positions that transformers cannot scale as {kind} ({lines[-1].strip()[:200]})"
        ) from error
    for module in model.modules():
        heard = getattr(module, "rope_type", None)
        if (heard.get(WHOLE) if isinstance(heard, Mapping) else heard) == kind:
            return
    raise _refused(config, "positions that its code computes without regard to their scaling")
