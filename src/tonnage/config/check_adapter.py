"""What ``adapter`` may not say: ways to begin and kinds of additions that do not go together, or over nothing."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.config.contradiction import Contradiction, of_idle_items, of_other_kinds
from tonnage.config.schema import Adapter, Config


def check_adapter(config: Config) -> Iterator[Contradiction]:
    """Two answers to what is trained, a part of what nobody has, or keys of ``adapter`` that do not go together."""
    yield from _trained(config)
    if isinstance(config.adapter, Adapter):
        yield from _keys(config.adapter, is_random=config.init == "random")


def _trained(config: Config) -> Iterator[Contradiction]:
    if config.train and config.init == "random":
        yield Contradiction(
            ("train", "init"),
            "init is random, and train names a part of the parameters: the others would stay random",
            "a model's own weights, for what is not trained",
            "leave train out, or write init: pretrained",
        )
    if config.adapter == "none" or not config.train:
        return
    contents = "auto" if config.adapter == "auto" else "additions to the model's layers"
    yield Contradiction(
        ("train", "adapter"),
        f"train names parameters ({', '.join(config.train)}), and adapter is {contents}",
        "one of them: adapter trains additions, and leaves the model's own weights as they are",
        "leave train out, and name what is trained whole beside the additions in adapter.also; or set adapter to none",
    )


def _start(adapter: Adapter, *, is_random: bool) -> Iterator[Contradiction]:
    yield from of_other_kinds("adapter", adapter, Adapter(), {"rounds": ("pissa", "loftq")}, "init")
    if adapter.init != "zero" and adapter.kind == "dora":
        yield Contradiction(
            ("adapter.init", "adapter.kind"),
            f"adapter.init is {adapter.init}, and adapter.kind is dora: no addition to the model's own weights would "
            "be the same",
            "one of them",
            "adapter.init=zero, or adapter.kind=lora",
        )
    if adapter.init == "loftq" and adapter.quantize in ("none", "widened"):
        yield Contradiction(
            ("adapter.init", "adapter.quantize"),
            f"adapter.init is loftq, and adapter.quantize is {adapter.quantize}",
            "weights that are quantised: additions begin as what that takes from them",
            "adapter.quantize=nf4, or adapter.init=pissa",
        )
    if adapter.init != "zero" and is_random:
        yield Contradiction(
            ("adapter.init", "init"),
            f"adapter.init is {adapter.init}, and init is random",
            "a model's own weights, of which additions begin as a part",
            "adapter.init=zero, or write init: pretrained",
        )


OF_ADDITIONS = ("rank", "alpha", "patterns", "scaling", "dropout", "init")
"""Keys that say something of low-rank additions alone."""


def _rotations(adapter: Adapter) -> Iterator[Contradiction]:
    """Keys of one of rotations and additions beside the other."""
    defaults = Adapter()
    yield from of_other_kinds("adapter", adapter, defaults, {"oft_block_size": ("oft",)})
    others = [key for key in OF_ADDITIONS if getattr(adapter, key) != getattr(defaults, key)]
    if adapter.kind == "oft" and others:
        names = [f"adapter.{key}" for key in others]
        yield Contradiction(
            (*names, "adapter.kind"),
            f"adapter.kind is oft, and {' and '.join(names)} {'is' if len(names) == 1 else 'are'} given",
            "rotations alone, which have adapter.oft_block_size, adapter.targets, adapter.quantize and adapter.also",
            f"leave {' and '.join(names)} out, or set adapter.kind to lora",
        )


def _keys(adapter: Adapter, *, is_random: bool) -> Iterator[Contradiction]:
    yield from _rotations(adapter)
    yield from _start(adapter, is_random=is_random)
    yield from of_idle_items("adapter.patterns", adapter.patterns, ("rank", "alpha"), "layers")
    if adapter.kind == "dora" and adapter.dropout:
        yield Contradiction(
            ("adapter.kind", "adapter.dropout"),
            f"adapter.kind is dora, and adapter.dropout is {adapter.dropout:g}: what is dropped would have to be "
            "multiplied by the frozen weights once more",
            "dropout of 0 with DoRA so far",
            "adapter.dropout=0, or adapter.kind=lora",
        )
    if adapter.kind == "dora" and is_random:
        yield Contradiction(
            ("adapter.kind", "init"),
            "adapter.kind is dora, and init is random",
            "a model's own weights, from which the lengths of their rows are taken",
            "adapter.kind=lora, or write init: pretrained",
        )
