"""``compile``: how many graphs 16 blocks make, and that they compute what eager blocks do."""

from __future__ import annotations

import importlib.util
import shutil

from torch._dynamo.utils import counters

from tonnage.prove.material import tiny_llama
from tonnage.prove.proof import Proof
from tonnage.prove.runs import Ran, Spec, hold, take

BLOCKS, STEPS = 16, 6


def prove(proof: Proof) -> None:
    """In both precisions, compiled beside eager."""
    if why := _why_not(proof):
        for check in ("graphs", "compiled, fp32", "compiled, bf16"):
            proof.skip(check, f"{BLOCKS} blocks", why)
        return
    blocks, steps = (4, 3) if proof.brief else (BLOCKS, STEPS)
    model, data = tiny_llama(proof.folder, num_hidden_layers=blocks)
    for precision in ("bf16",) if proof.brief else ("fp32", "bf16"):
        ran: dict[str, Ran] = {}
        for how in ("off", "on"):
            config = {"precision": precision, "compile": how, "optimizer": {"lr": 1e-3}}
            spec, graphs = Spec(f"{precision}-{how}", model, data, steps, config), _Graphs()
            ran[how] = take(spec, proof.folder / "runs", graphs.look)
            if how == "on":
                proof.found("graphs", f"{blocks} blocks, {precision}", graphs.most or float("nan"), graphs.broken)
        hold(proof, f"compiled, {precision}", f"{blocks} blocks", ran["on"], ran["off"])
        proof.more[precision] = {how: one.told for how, one in ran.items()}


def _why_not(proof: Proof) -> str:
    if proof.on_gpu:
        return "" if importlib.util.find_spec("triton") else "Triton is not there"
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return "" if compiler else "no C++ compiler is there"


class _Graphs:
    """Counts them before every step: torch forgets them when its caches are emptied."""

    def __init__(self) -> None:
        counters.clear()
        self.most, self.broken = 0, ""

    def look(self, taken: int) -> None:
        """Before a step, and after the last."""
        self.most = max(self.most, int(counters["stats"]["unique_graphs"]))
        reasons = sorted(counters["graph_break"].items(), key=lambda entry: -entry[1])
        lines = [f"{count} x {str(reason).splitlines()[0][:120]}" for reason, count in reasons[:2]]
        self.broken = "; ".join(lines) or self.broken
