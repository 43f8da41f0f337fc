"""Accelerators that a plan can be made for without having them: peaks from datasheets, and what is expected of them.

Rates are the vendors' dense peaks for one device: sums in fp32 for products of 16 bits (what training uses; on GeForce
cards it is half of what sums in fp16 reach), no structured sparsity, and for fp32 plain fp32, not TF32, which torch
leaves off unless asked. Links and host links are one direction, half of the "bidirectional" figure of datasheets.

Memory is what the driver reports as the device's total in MiB (``nvidia-smi``, ``rocm-smi``), not the number in the
name, which is neither GB nor GiB in a consistent way: an A100-80GB shows 81920 MiB, an H100-80GB 81559. Of that total a
driver keeps 0.3 to 0.9 GiB for itself, and what is measured on a machine (``Machine.source`` "measured") is without it.

Nobody reaches a peak. ``EFFICIENCY`` says which part of each kind of rate is expected; these factors are assumptions,
the same for every device, and ``tonnage doctor`` replaces them by measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EFFICIENCY: Mapping[str, float] = {"products": 0.7, "memory": 0.8, "links": 0.8, "host links": 0.7}
"""Expected part of a peak: of matrix products of a training's size, of memory bandwidth, of links and networks, and of
a link to the host's memory that is in use both ways (an H200's reached 0.69, and 0.85 one way)."""

HOST_BYTES_PER_DEVICE_BYTE = 2
"""Host memory of a server, by its devices' memory: an assumption that most 8-GPU servers exceed (DGX A100 3.2,
DGX H100 3.2, cloud machines with A10 or L4 4)."""
HOST_CORES_PER_DEVICE = 8
"""Physical cores of a server by device; an assumption (a DGX A100 has 16, small cloud machines 4)."""

DISK_BYTES = 2 * 10**12
DISK_READ, DISK_WRITE, DISK_MIXED = 3.0e9, 1.5e9, 2.0e9
"""One NVMe drive of a node that nobody described: an assumption."""

FAST, SLOW = 400e9, 25e9
"""Network of a node in bit/s, which its devices share: with server devices from A100 on, and with any others. These are
assumptions (a DGX A100 has 1600 Gb/s, a DGX H100 3200, cheap clouds 100 or less)."""

BETWEEN_PROCESSES = 1e9
"""Bytes a second from one process to another on the CPU, through torch's gloo; between nodes without accelerators as
well: an assumption."""

UPDATE_BYTES: Mapping[str, Mapping[str, float]] = {
    "cpu": {"fp32": 26.0, "bf16": 18.0, "int8": 14.1},
    "cuda": {"fp32": 28.0, "bf16": 20.0, "int8": 17.5},
    "operations": {"fp32": 250.0, "bf16": 420.0, "int8": 450.0},
}
"""Memory traffic of AdamW's update of a bf16 parameter, by how its moments rest. On a CPU it is one pass: state and
weight read and written, gradient read. So it is on a GPU with Triton, where an H200 updated 155, 210 and 232 thousand
million parameters a second; 8-bit moments move 16.1 bytes, and their arithmetic takes a little longer than that.
``operations`` is the sum over those of ``kernels.adamw.update_torch``, each of which reads and writes memory."""

COMPILE_SECONDS = 60.0
"""That compiling blocks takes at the start of a run, at most: ``compile: auto`` does it where it saves more."""

COMPILED = 0.56
"""Part of the time of everything but products that is left where blocks are compiled: with it three shapes on an H200
(docs/hardware.md) take as long as they did. What they take without was not measured."""

ROUNDED, ROUNDED_COMPILED = 38.0, 5.5
"""Bytes that are read and written for each number that is rounded to fp8 and multiplied: by torchao's operations, one
after another, as counted (tests/planning/test_fp8.py); and where they are compiled, as a count of what must be: 2 are
read, once more for scales along columns, and 1 is written, and results of products are scaled. Not measured."""

ATTENTION_SHARE, ATTENTION_MOST = 0.8, 240e12
"""Rate of FlashAttention 2 on a GPU: a part of that of its products (190 of 312 TFLOP/s on an A100: Dao 2023), and at
most so many FLOP/s. An H200, whose own instructions it does not use, reached 246 forward and 233 backward with heads of
128."""

UPDATE_CORE_SECONDS: Mapping[str, float] = {"fp32": 0.74e-9, "bf16": 1.08e-9, "int8": 1.55e-9}
"""Arithmetic of the same update on one core with AVX2, a parameter, as measured (docs/log.md)."""


@dataclass(frozen=True)
class Device:
    """One kind of accelerator: its peaks, and where they are written."""

    family: str
    gigabytes: int
    """The number in its name."""
    memory_mib: int
    """Total memory as the driver reports it."""
    flops: Mapping[str, float]
    """Dense peak of matrix products by data type, FLOP/s."""
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """To another device of its node, one direction."""
    host_bytes_per_second: float
    """To the host's memory, one direction."""
    network_bits_per_second: float
    """Of a node with such devices (an assumption, see above)."""
    source: str
    """The vendor's datasheet, or white paper on the architecture."""

    @property
    def name(self) -> str:
        """As ``A100-80GB``."""
        return f"{self.family}-{self.gigabytes}GB"

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20


CORE_FLOPS = 80e9
"""Peak of fp32 products of a core that nobody described: AVX2 with two fused multiply-adds of 8 numbers a cycle, at 2.5
GHz. 16-bit products are taken to be as fast: without instructions for them they are computed in fp32
(``kernels.products``), and whether a processor has them is not in its number of cores."""
CORE_BANDWIDTH, CPU_BANDWIDTH = 10e9, 100e9
"""Bytes a second between such a core and memory, and all cores together: an assumption, of a server with four channels
of DDR4 at 3200 MT/s (102.4 GB/s)."""


def _flops(fp32: float, bf16: float, fp16: float | None = None) -> dict[str, float]:
    """From TFLOP/s."""
    return {"fp32": fp32 * 1e12, "bf16": bf16 * 1e12, "fp16": (bf16 if fp16 is None else fp16) * 1e12}


PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9
"""Sixteen lanes, one direction, as datasheets give them (half of 32, 64, 128 GB/s)."""

# fmt: off
DEVICES: tuple[Device, ...] = (
    # No bf16 in the matrix units of V100 and T4: such products run in fp32.
    Device("V100",    16, 16384,  _flops(15.7, 15.7, 125), 900e9, 150e9, PCIE3, SLOW, "NVIDIA V100 datasheet, SXM2"),
    Device("V100",    32, 32768,  _flops(15.7, 15.7, 125), 900e9, 150e9, PCIE3, SLOW, "NVIDIA V100 datasheet, SXM2"),
    Device("T4",      16, 15360,  _flops(8.1, 8.1, 65),    300e9, PCIE3, PCIE3, SLOW, "NVIDIA T4 datasheet"),
    Device("A10",     24, 23028,  _flops(31.2, 125),       600e9, PCIE4, PCIE4, SLOW, "NVIDIA A10 datasheet"),
    Device("A10G",    24, 23028,  _flops(31.52, 70),       600e9, PCIE4, PCIE4, SLOW, "NVIDIA A10G datasheet"),
    Device("A100",    40, 40960,  _flops(19.5, 312),      1555e9, 300e9, PCIE4, FAST, "NVIDIA A100 datasheet, SXM"),
    Device("A100",    80, 81920,  _flops(19.5, 312),      2039e9, 300e9, PCIE4, FAST, "NVIDIA A100 datasheet, SXM"),
    Device("A100-PCIe", 40, 40960, _flops(19.5, 312),    1555e9, PCIE4, PCIE4, FAST, "NVIDIA A100 datasheet, PCIe"),
    Device("A100-PCIe", 80, 81920, _flops(19.5, 312),    1935e9, PCIE4, PCIE4, FAST, "NVIDIA A100 datasheet, PCIe"),
    Device("A40",     48, 46068,  _flops(37.4, 149.7),     696e9, PCIE4, PCIE4, SLOW, "NVIDIA A40 datasheet"),
    Device("L4",      24, 23034,  _flops(30.3, 121),       300e9, PCIE4, PCIE4, SLOW, "NVIDIA L4 datasheet"),
    Device("L40",     48, 46068,  _flops(90.5, 181.05),    864e9, PCIE4, PCIE4, SLOW, "NVIDIA L40 datasheet"),
    Device("L40S",    48, 46068,  _flops(91.6, 362.05),    864e9, PCIE4, PCIE4, SLOW, "NVIDIA L40S datasheet"),
    Device("H100",    80, 81559,  _flops(67, 989.4),      3350e9, 450e9, PCIE5, FAST, "NVIDIA H100 datasheet, SXM"),
    Device("H100-PCIe", 80, 81559, _flops(51, 756),      2000e9, PCIE5, PCIE5, FAST, "NVIDIA H100 datasheet, PCIe"),
    Device("H100-NVL", 94, 95830, _flops(60, 835.5),     3900e9, 300e9, PCIE5, FAST, "NVIDIA H100 NVL datasheet"),
    Device("H800",    80, 81559,  _flops(67, 989.4),      3350e9, 200e9, PCIE5, FAST, "NVIDIA H800 datasheet, SXM"),
    Device("H20",     96, 97871,  _flops(44, 148),        4000e9, 450e9, PCIE5, FAST, "NVIDIA H20 datasheet"),
    Device("GH200",   96, 97871,  _flops(67, 989.4),      4000e9, 450e9, 450e9, FAST, "NVIDIA GH200 datasheet"),
    Device("H200-NVL", 141, 143771, _flops(60, 835.5),   4800e9, 450e9, PCIE5, FAST, "NVIDIA H200 NVL datasheet"),
    Device("H200",   141, 143771, _flops(67, 989.4),      4800e9, 450e9, PCIE5, FAST, "NVIDIA H200 datasheet, SXM"),
    Device("B200",   180, 183359, _flops(75, 2250),       7700e9, 900e9, PCIE5, FAST, "NVIDIA HGX B200 datasheet"),
    Device("GB200",  186, 189471, _flops(80, 2500),       8000e9, 900e9, 225e9, FAST, "NVIDIA GB200 NVL72 datasheet"),
    Device("B300",   288, 275040, _flops(75, 2250),       8000e9, 900e9, PCIE5, FAST, "NVIDIA HGX B300 datasheet"),
    Device("MI300X", 192, 196592, _flops(163.4, 1307.4),  5300e9, 448e9, PCIE5, FAST, "AMD Instinct MI300X data sheet"),
    Device("RTX3090", 24, 24576,  _flops(35.6, 71),        936e9, PCIE4, PCIE4, SLOW, "NVIDIA Ampere GA102 paper"),
    Device("RTXA6000", 48, 49140, _flops(38.7, 154.8),    768e9, PCIE4, PCIE4, SLOW, "NVIDIA RTX A6000 datasheet"),
    Device("RTX6000-Ada", 48, 49140, _flops(91.1, 364.2), 960e9, PCIE4, PCIE4, SLOW, "NVIDIA RTX 6000 Ada datasheet"),
    Device("RTX4080", 16, 16376,  _flops(48.7, 97.5),    716.8e9, PCIE4, PCIE4, SLOW, "NVIDIA Ada paper"),
    Device("RTX4090", 24, 24564,  _flops(82.6, 165.2),    1008e9, PCIE4, PCIE4, SLOW, "NVIDIA Ada paper"),
    Device("RTX5090", 32, 32607,  _flops(104.8, 209.5),   1792e9, PCIE5, PCIE5, SLOW, "NVIDIA RTX Blackwell paper"),
)
# fmt: on

FP8_TFLOPS: Mapping[str, float] = {
    "L4": 242.5,
    "L40": 362,
    "L40S": 733,
    "H100": 1979,
    "H100-PCIe": 1513,
    "H100-NVL": 1671,
    "H800": 1979,
    "H20": 296,
    "GH200": 1979,
    "H200-NVL": 1671,
    "H200": 1979,
    "B200": 4500,
    "GB200": 5000,
    "B300": 4500,
    "RTX6000-Ada": 728.5,
    "RTX4080": 195,
    "RTX4090": 330.3,
    "RTX5090": 419,
}
"""Dense peaks of products in fp8 with sums in fp32, by family, from the same datasheets and papers, which print twice
as much for sparsity. Families that are not here have none, or another fp8 (AMD's), with which nothing was tried."""
