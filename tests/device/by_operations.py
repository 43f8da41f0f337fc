"""``train_runs`` on the CPU, with attention computed by operations of their own, as the device ``apart`` does."""

import train_runs
from torch.nn.attention import SDPBackend, sdpa_kernel


def main(paths: list[str]) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        train_runs.main(paths)
