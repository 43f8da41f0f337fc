"""Mistakes and lacks are told in a sentence, before a weight is loaded where that can be known."""

from __future__ import annotations

from typing import Any

import torch

import tonnage
from tonnage.errors import UserError, WorkerFailed
from tonnage.prove.material import bare_shape, data_of, resting, rows, tiny_model
from tonnage.prove.proof import NEEDS_GPU, Proof


def prove(proof: Proof) -> None:
    """Mistakes that a plan can know, and memory that is not there."""
    model, data = tiny_model(proof.folder / "llama", "llama"), data_of(rows(proof.folder, 40))
    devices = torch.cuda.device_count() if proof.on_gpu else 0
    mistakes: dict[str, dict[str, Any]] = {
        "a key that is none": {"optimizer": {"learning_rate": 1e-3}},
        "a memory of 10 MB": {"memory": {"budget": {"device": "10MB"}}},
        "tensor 3 of 4 heads": {"parallel": {"tensor": 3}, "launch": {"workers": 3}},
        "an adapter of no layer": {"adapter": {"targets": ["no_such_layer"]}},
    }
    if devices:
        mistakes["a worker more than GPUs"] = {"launch": {"workers": devices + 1}}
        if torch.cuda.get_device_capability(0) < (8, 0):
            mistakes["bf16 on a card without"] = {"precision": "bf16"}
    for name, config in mistakes.items():
        if name == "bf16 on a card without" or "precision" not in config:
            config = {"precision": "fp32", "launch": {"workers": 1}, **config}
        proof.found("refusals", name, *_refused(lambda config=config: tonnage.plan(model, data, steps=1, **config)))
    if proof.on_gpu and not proof.brief:
        _out_of_memory(proof, data)
    else:
        proof.skip("out of memory", "a model twice as large as the device", NEEDS_GPU)


def _refused(doing: Any) -> tuple[float, str]:
    """1 where nothing was refused, or by a traceback; with what was said."""
    try:
        doing()
    except UserError as error:
        return 0.0, str(error).splitlines()[0]
    except WorkerFailed as error:
        return float("Traceback" in str(error)), str(error)[-300:]
    except Exception as error:
        return 1.0, f"{type(error).__name__}: {error}"
    return 1.0, "it was taken"


def _out_of_memory(proof: Proof, data: dict[str, Any]) -> None:
    """A plan that does not fit, carried out by force."""
    total = torch.cuda.get_device_properties(proof.device).total_memory
    hidden, blocks = 4096, 8
    wide = int(2 * total / 2 / (3 * hidden * blocks) // 256 * 256)
    shape = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": blocks, "vocab_size": 512}
    model = bare_shape(proof.folder / "huge", **shape, num_attention_heads=32, num_key_value_heads=8)
    config: dict[str, Any] = {"launch": {"workers": 1}, "steps": 1, "init": "random"}
    config |= {"memory": resting("device", "optimizer", "gradient", "parameter"), "output": str(proof.folder / "out")}
    how = _refused(lambda: tonnage.train(model, data, force=True, **config))
    proof.found("out of memory", "a model twice as large as the device", *how)
