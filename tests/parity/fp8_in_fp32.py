"""``train_runs`` of runs in bf16 or fp8 that compute in fp32 what would be in bf16, so that layouts can be held against
a plain loop to more digits than bf16 has."""

from unittest.mock import patch

import train_runs

from tonnage.parallel.parallelize import Precision

of = Precision.of


def main(paths: list[str]) -> None:
    with patch.object(Precision, "of", staticmethod(lambda _, data_size: of("fp32", data_size))):
        train_runs.main(paths)
