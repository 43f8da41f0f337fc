"""What the workers of a run must agree on before a model is built."""

from forked import work


def test_products_widen_on_all_workers_or_on_none() -> None:
    """Or ranks that divide a layer would lay out rows in two ways."""
    assert work("training.disagreeing_workers", (2, [])).splitlines() == [
        "torch.bfloat16 ['[True, True]', '[True, True]']",
        "torch.float16 ['[False, False]', '[False, False]']",
    ]
