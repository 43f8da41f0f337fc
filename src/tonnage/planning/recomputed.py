"""How many blocks are recomputed whole, where it need not be all: as few as have to be.

With every block that keeps its activations a step is faster and holds more. So the fewest that fit are also the
fastest, and are found by bisection, from a guess: as many may be kept as the room that all of them recomputed leaves
has space for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tonnage.config.schema import Memory
from tonnage.errors import Problem, UserError
from tonnage.planning.largest import last_that_fits
from tonnage.planning.layout import Layout
from tonnage.planning.plan import Budget, Choice
from tonnage.planning.profile import ModelProfile


def check_recomputed(memory: Memory, model: ModelProfile) -> None:
    """Refuse more blocks than there are. Raises ``UserError``."""
    asked = memory.recompute_blocks
    if asked != "auto" and asked > model.num_blocks:
        raise UserError(
            Problem(
                where="memory.recompute_blocks",
                found=f"{asked} blocks to recompute, {model.num_blocks} blocks in the model",
                needed=f"{model.num_blocks} blocks at most",
                change="memory.recompute_blocks=auto memory.recompute=full for all of them",
            )
        )


def said_blocks(memory: Memory, before: Layout | None, blocks: int) -> tuple[int, int] | None:
    """How many of so many blocks are recomputed, if the config says it or it was chosen before; None is all of them."""
    if memory.recompute_blocks != "auto":
        return (memory.recompute_blocks, blocks) if memory.recompute_blocks < blocks else None
    return before.recomputed if before is not None and memory.recompute == "auto" else None


def with_fewest_blocks(
    choice: Choice, model: ModelProfile, budget: Budget, weighed: Callable[[Layout], Choice]
) -> Layout:
    """The layout of a choice that fits and recomputes all blocks, with as few of them recomputed as fit.

    ``weighed`` tells what a layout holds.
    """
    layout, blocks = choice.layout, model.num_blocks

    def keeps(number: int) -> Layout:
        return replace(layout, recomputed=(blocks - number, blocks) if number else None)

    def fits(number: int) -> bool:
        return budget.holds(weighed(keeps(number)))

    kept, given_up = (model.blocks[kind].saved(layout.row_tokens) for kind in ("none", "full"))
    times = 1 if choice.heap_bytes == 0 else 2  # the heap keeps as much again
    room = budget.usable - choice.peak_bytes
    guess = int(room / (times * max(1.0, kept - given_up)))
    return keeps(last_that_fits(blocks - 1, fits, guess=max(1, min(guess, blocks - 1))))
