"""What rows whose tokens workers divide (the key ``parallel.context``) do not go with, as far as a config says it."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.config.contradiction import Contradiction
from tonnage.config.schema import Config


def divides_rows(config: Config) -> bool:
    """Whether workers may divide the tokens of rows, as far as a config says it."""
    return not any(_reasons(config))


def check_context(config: Config) -> Iterator[Contradiction]:
    """What needs all tokens of a document on one worker."""
    if config.parallel.context in ("auto", 1):
        return
    for key, value, why in _reasons(config):
        yield Contradiction(
            ("parallel.context", key),
            f"parallel.context is {config.parallel.context}, and {key} is {value}: {why}",
            f"one of parallel.context and {key}",
            f"set parallel.context=1, or leave {key} out",
        )


def _reasons(config: Config) -> Iterator[tuple[str, str, str]]:
    """Keys, their values, and what they need."""
    objective, router_loss = config.objective, config.router_loss
    if objective.is_preference:
        yield "objective.kind", objective.kind, "an answer is worth what all of its tokens are together"
    if not isinstance(router_loss, str) and router_loss:
        yield "router_loss", f"{router_loss:g}", "it is taken over all tokens of a document"
