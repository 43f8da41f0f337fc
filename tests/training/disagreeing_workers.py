"""Workers of which the last alone finds 16-bit products slow; the first prints what both take them for then."""

from tonnage.kernels import widening


def main(told: list[str]) -> None:
    import torch

    from tonnage.parallel.world import join_world
    from tonnage.training.building import products_widen

    with join_world(1, 60.0) as world:
        for dtype, slow in ((torch.bfloat16, world.rank == world.size - 1), (torch.float16, False)):
            widening.settle(dtype, slow)
            taken = [products_widen(world, dtype), widening.processor_is_slow(dtype)]
            everybody = world.gather(str(taken))
            if world.rank == 0:
                print(dtype, everybody)
