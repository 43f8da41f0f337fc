"""Tiny models of several families, 20 steps: losses beside the reference's; in bf16, and packed beside alone
(``packing``).

The reference is a CPU without our kernels (``kernels: plain``), which need not be compiled for it.
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
    """Every family in fp32."""
    specs = [_spec(proof, family, "fp32") for family in list(FAMILIES)[: 1 if proof.brief else None]]
    ran = beside_reference(proof, specs)
    proof.more["runs"] = {name: one.told for name, one in ran.items()}


def packing(proof: Proof) -> None:
    """Some families in bf16; then documents in rows of their own."""
    specs = [_spec(proof, family, "bf16") for family in IN_BOTH[: 1 if proof.brief else None]]
    ran = beside_reference(proof, specs)
    alone = replace(_spec(proof, IN_BOTH[0], "fp32"), name="alone", data={"pack": False})
    packed = replace(alone, name="together", data={})
    _packed_beside_alone(proof, packed, alone)
    proof.more["runs"] = {name: one.told for name, one in ran.items()}


def _spec(proof: Proof, family: str, precision: str) -> Spec:
    given, steps = rows(proof.folder), FEW if proof.brief else STEPS
    config = {"precision": precision, "optimizer": {"lr": 1e-3}}
    return Spec(f"{family}, {precision}", tiny_model(proof.folder / family, family), given, steps, config)


def beside_reference(proof: Proof, specs: Sequence[Spec]) -> dict[str, Ran]:
    """Take runs here and as the reference does, and hold their losses together; what came of those here."""
    plain = [replace(spec, config={**spec.config, "kernels": "plain"}) for spec in specs]
    elsewhere = Elsewhere(plain, proof.folder / "reference") if proof.on_gpu else None
    here = {spec.name: take(spec, proof.folder / "here") for spec in specs}
    if elsewhere is not None:
        reference: Mapping[str, Ran] = elsewhere.ran()
    else:
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
