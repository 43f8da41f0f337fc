"""Runs of tiny models, their losses beside the reference's: several families, in fp32 and bf16 (``packing``, which also
holds packed rows against rows of one document each), and LoRA over bases whole, in 4 and in 8 bits (``adapters``).

The reference is a CPU without our kernels (``kernels: plain``), which need not be compiled for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tonnage
from tonnage.prove.material import FAMILIES, data_of, rows, tiny_model
from tonnage.prove.proof import Proof
from tonnage.prove.runs import BackgroundRuns, Ran, Spec, hold, take

STEPS, FEW = 20, 4


def _plain(precision: str) -> dict[str, Any]:
    return {"precision": precision, "optimizer": {"lr": 1e-3}}


def _lora(base: str, precision: str) -> dict[str, Any]:
    adapter = {"rank": 8, "alpha": 16.0, "quantize": base}
    return {"precision": precision, "adapter": adapter, "optimizer": {"lr": 2e-3}}


RUNS: Mapping[str, Mapping[str, tuple[str, dict[str, Any]]]] = {
    "families": {f"{family}, fp32": (family, _plain("fp32")) for family in FAMILIES},
    # Experts are chosen by comparing, which rounding turns over: not these in bf16.
    "packing": {f"{family}, bf16": (family, _plain("bf16")) for family in ("llama", "gemma2")},
    "adapters": {
        "LoRA over a base as it is, fp32": ("llama", _lora("none", "fp32")),
        "LoRA over a base as it is, bf16": ("llama", _lora("none", "bf16")),
        "LoRA over nf4, fp32": ("llama", _lora("nf4", "fp32")),
        "LoRA over nf4, bf16": ("llama", _lora("nf4", "bf16")),
        "LoRA over nf4-double, fp32": ("llama", _lora("nf4-double", "fp32")),
        "LoRA over int8, fp32": ("llama", _lora("int8", "fp32")),
    },
}
"""By piece, then by case: a family and the config."""
IN_BRIEF = ("llama, fp32", "llama, bf16", "LoRA over a base as it is, fp32", "LoRA over nf4, fp32")


def prove(proof: Proof) -> None:
    """The runs of the piece; for ``packing`` then documents packed and in rows of their own."""
    specs = [
        _spec(proof, case, family, config)
        for case, (family, config) in RUNS[proof.piece].items()
        if case in IN_BRIEF or not proof.brief
    ]
    ran = beside_reference(proof, specs)
    if proof.piece == "packing":
        _packed_beside_alone(proof, _spec(proof, "packed", "llama", _plain("fp32")))
    proof.more["runs"] = {name: run.told for name, run in ran.items()}


def _spec(proof: Proof, name: str, family: str, config: Mapping[str, Any]) -> Spec:
    steps = FEW if proof.brief else STEPS
    return Spec(name, tiny_model(proof.folder / family, family), rows(proof.folder), steps, config)


def beside_reference(proof: Proof, specs: Sequence[Spec]) -> dict[str, Ran]:
    """Take runs here and as the reference does, and hold their losses together; what came of those here."""
    plain = [replace(spec, config={**spec.config, "kernels": "plain"}) for spec in specs]
    elsewhere = BackgroundRuns(plain, proof.folder / "reference") if proof.on_gpu else None
    ours = {spec.name: take(spec, proof.folder / "here") for spec in specs}
    if elsewhere is not None:
        reference = elsewhere.ran()
    else:
        reference = {spec.name: take(spec, proof.folder / "reference") for spec in plain}
    for spec in specs:
        hold(proof, f"losses, {spec.config['precision']}", spec.name, ours[spec.name], reference[spec.name])
    return ours


def _packed_beside_alone(proof: Proof, packed: Spec) -> None:
    """Losses of steps over all rows at once, laid out in two ways."""
    few, ran = rows(proof.folder, 24, seed=1), []
    for name, more in (("together", {}), ("alone", {"pack": False})):
        data = data_of(few) | more
        packs = tonnage.plan(packed.model, data, steps=1, launch={"workers": 1}, **packed.config).data.num_packs
        config = {**packed.config, "batch": {"sequences": packs}}
        spec = replace(packed, name=name, rows=few, steps=2, config=config, data=more)
        ran.append(take(spec, proof.folder / "packing"))
    hold(proof, "packed", "llama, fp32", *ran)
