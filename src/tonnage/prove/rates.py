"""What the device does: rates, measured as ``tonnage doctor`` measures them."""

from __future__ import annotations

from tonnage.doctor import compute
from tonnage.prove.proof import NEEDS_GPU, Proof

MEGABYTE = 1 << 20


def prove(proof: Proof) -> None:
    device, haste = proof.device, proof.brief
    budget = 0.1 if haste else 1.0
    rates = compute.product_flops(device, budget, 1.0 if haste else 4.0, in_haste=haste)
    for name, flops in rates.items():
        proof.found("products", name, flops / 1e12)
    proof.found("products, bf16", "bf16", rates["bf16"] / 1e12)
    size = 1280 * MEGABYTE if proof.on_gpu else 64 * MEGABYTE
    terabytes = compute.memory_rate(device, size, budget) / 1e12
    proof.found("memory", "copy or addition", terabytes)
    if proof.on_gpu:
        proof.found("memory, H100", "copy or addition", terabytes)
        proof.found("memory, H200", "copy or addition", terabytes)
    number = 100_000_000 if proof.on_gpu else 2_000_000
    for codec, rate in compute.update_rates(device, number, budget).items():
        proof.found("update rate", f"{codec} moments", rate / 1e6)
    if proof.on_gpu:
        _copies(proof, budget)
    else:
        proof.skip("host copies", "pinned memory", NEEDS_GPU)
    proof.more["rates"] = {"products": rates, "memory_bytes_per_second": terabytes * 1e12}


def _copies(proof: Proof, budget: float) -> None:
    from tonnage.host.locked import host_memory, lock

    pinned = compute.host_copy_rate(proof.device, budget)
    proof.found("host copies", "pinned memory, while as much comes back", pinned / 1e9)
    host = host_memory(2 * compute.PINNED_BYTES)
    if status := lock(host):
        proof.skip("locked copies", "while as much comes back", f"memory cannot be locked: CUDA error {status}")
        return
    rate = compute.host_copy_rate(proof.device, budget, host)
    proof.found("locked copies", "while as much comes back", rate / pinned)
