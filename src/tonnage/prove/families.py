"""Tiny models of several families, 20 steps: losses beside the reference's, and packed beside alone.

The reference of a GPU is the CPU; of a CPU it is itself without our kernels (``kernels: plain``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import tonnage
from tonnage.prove.material import FAMILIES, rows, tiny_model
from tonnage.prove.proof import Proof, apart
from tonnage.prove.runs import Elsewhere, Ran, Spec, take

STEPS, FEW = 20, 4
IN_BOTH = ("llama", "gemma2")
"""Families that also run in bf16: experts are chosen by comparing, which rounding turns over."""


def prove(proof: Proof) -> None:
    """Every family in fp32, some in bf16; then documents in rows of their own."""
    given, steps = rows(proof.folder), FEW if proof.brief else STEPS
    families = list(FAMILIES)[: 1 if proof.brief else None]
    specs = []
    for family in families:
        model = tiny_model(proof.folder / family, family)
        for precision in ("fp32", "bf16") if family in IN_BOTH else ("fp32",):
            config = {"precision": precision, "optimizer": {"lr": 1e-3}}
            specs.append(Spec(f"{family}, {precision}", model, given, steps, config))
    ran = beside_reference(proof, specs)
    alone = replace(specs[0], name="alone", data={"pack": False})
    packed = replace(alone, name="together", data={})
    _packed_beside_alone(proof, packed, alone)
    proof.more["runs"] = {name: one.told for name, one in ran.items()}


def beside_reference(proof: Proof, specs: Sequence[Spec]) -> dict[str, Ran]:
    """Take runs here and as the reference does, and hold their losses together; what came of those here."""
    elsewhere = Elsewhere(specs, proof.folder / "reference") if proof.on_gpu else None
    here = {spec.name: take(spec, proof.folder / "here") for spec in specs}
    if elsewhere is not None:
        reference: Mapping[str, Ran] = elsewhere.ran()
    else:
        plain = [replace(spec, config={**spec.config, "kernels": "plain"}) for spec in specs]
        reference = {spec.name: take(spec, proof.folder / "reference") for spec in plain}
    for spec in specs:
        precision = str(spec.config.get("precision", "bf16"))
        hold(proof, f"losses, {precision}", spec.name, here[spec.name], reference[spec.name])
    return here


def hold(proof: Proof, check: str, case: str, one: Ran, other: Ran) -> None:
    """Hold the losses of two runs together; a refusal is told as the failure that it is."""
    if refused := one.refused or other.refused:
        proof.found(check, case, float("inf"), f"refused: {refused}")
    else:
        proof.found(check, case, apart(one.losses, other.losses))


def _packed_beside_alone(proof: Proof, packed: Spec, alone: Spec) -> None:
    """Losses of steps over all rows at once, laid out in two ways."""
    few = rows(proof.folder, 24, seed=1)
    ran = []
    for spec in (packed, alone):
        data = {"train": few, "max_length": 128, "template": "plain", **spec.data}
        packs = tonnage.plan(spec.model, data, steps=1, launch={"workers": 1}, **spec.config).data.num_packs
        config = {**spec.config, "batch": {"sequences": packs}}
        ran.append(take(replace(spec, rows=few, steps=2, config=config), proof.folder / "packing"))
    hold(proof, "packed", "llama, fp32", *ran)
