"""LoRA over whole bases, and over bases in 4 and 8 bits, beside the reference."""

from __future__ import annotations

from tonnage.prove.families import FEW, STEPS, beside_reference
from tonnage.prove.material import rows, tiny_model
from tonnage.prove.proof import Proof
from tonnage.prove.runs import Spec

BASES = ("none", "nf4", "nf4-double", "int8")


def prove(proof: Proof) -> None:
    """Every form of the base in fp32; the plain and the 4-bit one in bf16 too."""
    model, given = tiny_model(proof.folder / "llama", "llama"), rows(proof.folder)
    steps = FEW if proof.brief else STEPS
    specs = []
    for base in BASES[: 2 if proof.brief else None]:
        for precision in ("fp32", "bf16") if base in ("none", "nf4") and not proof.brief else ("fp32",):
            config = {
                "precision": precision,
                "adapter": {"rank": 8, "alpha": 16.0, "quantize": base},
                "optimizer": {"lr": 2e-3},
            }
            name = f"LoRA over {'a base as it is' if base == 'none' else base}, {precision}"
            specs.append(Spec(name, model, given, steps, config))
    ran = beside_reference(proof, specs)
    proof.more["runs"] = {name: one.told for name, one in ran.items()}
