"""Workers of this machine exchange numbers."""

from __future__ import annotations

import pytest

from tonnage.doctor.link import link_rate


@pytest.mark.slow
def test_two_workers_exchange_numbers() -> None:
    assert 1e7 < link_rate(2, 1) < 1e12
