"""What a config may not say although every single value is fine.

Each check is a function from a config to the contradictions it found, so that ``read.py`` can report them
together with everything else and add the lines. Only what can be seen without torch or transformers is
checked here; what needs the tokenizer, the model's shape or the rows is checked by those who load them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.config.check_adapter import check_adapter
from tonnage.config.check_evaluate import check_evaluate
from tonnage.config.check_launch import check_job_script, check_ray, check_slurm
from tonnage.config.check_objective import check_objective
from tonnage.config.check_optimizer import check_optimizer
from tonnage.config.check_rope import check_rope
from tonnage.config.contradiction import Contradiction, of_other_kinds
from tonnage.config.rules import RULES, Setting, broken
from tonnage.config.schema import Config, Data, QuantizeAware, RayLaunch, SlurmLaunch

MOST_COPIES = 10_000
"""Of a row in an epoch."""


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Values that do not go together."""
    yield from _length(config)
    yield from _shortest(config.data)
    yield from _batch(config)
    yield from broken(RULES, Setting.of(config))
    yield from _context(config)
    yield from check_adapter(config)
    yield from _rounding(config)
    yield from check_objective(config)
    if isinstance(config.launch, SlurmLaunch):
        yield from check_slurm(config.launch)
        yield from check_job_script(config.launch, config.output)
    if isinstance(config.launch, RayLaunch):
        yield from check_ray(config.launch, config.parallel)
    yield from check_optimizer(config)
    if config.rope is not None:
        yield from check_rope(config.rope)
    if config.data.mixture == "rows":
        yield from _weights(config.data)
    yield from _pixels(config.data)
    yield from _pieces(config.data)
    prompts = config.evaluate.prompts
    if config.track_samples and not (prompts and config.track):
        key = "evaluate.prompts" if config.track else "track"
        yield Contradiction(
            ("track_samples", key),
            f"track_samples is true, but {'no prompts are asked' if config.track else 'no tracker is named'}",
            "samples, and a tracker that they are sent to",
            "set evaluate.prompts, to 8 for instance" if config.track else "name one: track=tensorboard",
        )
    yield from check_evaluate(config)


def _context(config: Config) -> Iterator[Contradiction]:
    if config.parallel.context in ("auto", 1):
        return
    for key, value, why in _needs_whole_documents(config):
        yield Contradiction(
            ("parallel.context", key),
            f"parallel.context is {config.parallel.context}, and {key} is {value}: {why}",
            f"one of parallel.context and {key}",
            f"set parallel.context=1, or leave {key} out",
        )


def divides_rows(config: Config) -> bool:
    """Whether workers may divide the tokens of rows (``parallel.context``), as far as a config says it."""
    return not any(_needs_whole_documents(config))


def _needs_whole_documents(config: Config) -> Iterator[tuple[str, str, str]]:
    """Keys for which one worker must have all tokens of a document, their values, and why."""
    objective, router_loss = config.objective, config.router_loss
    if objective.is_preference:
        yield "objective.kind", objective.kind, "an answer is worth what all of its tokens are together"
    if not isinstance(router_loss, str) and router_loss:
        yield "router_loss", f"{router_loss:g}", "it is taken over all tokens of a document"


def _weights(data: Data) -> Iterator[Contradiction]:
    """Weights so large that they cannot be meant as how often a row is seen: an epoch has every copy of it."""
    for index, source in enumerate(data.train):
        if source.weight > MOST_COPIES:
            key = f"data.train.{index}.weight"
            yield Contradiction(
                (key,),
                f"{key} is {source.weight:g}: an epoch would see each row of {source.path} so often",
                f"at most {MOST_COPIES:,}",
                "use epochs to see rows more often, or data.mixture: tokens where weights are shares",
            )


def _pixels(data: Data) -> Iterator[Contradiction]:
    least, most = data.image_min_pixels, data.image_max_pixels
    if least is not None and most is not None and least > most:
        yield Contradiction(
            ("data.image_min_pixels", "data.image_max_pixels"),
            f"data.image_min_pixels is {least:,}, and data.image_max_pixels {most:,}",
            "a minimum that is no larger than the maximum",
            "exchange them, or leave data.image_min_pixels out",
        )


def _pieces(data: Data) -> Iterator[Contradiction]:
    """Pieces of documents that are not split, and such as would hold little more than context."""
    if data.over_length != "split":
        for key in ("split_at", "overlap"):
            if (value := getattr(data, key)) not in ("tokens", 0):
                yield Contradiction(
                    (f"data.{key}", "data.over_length"),
                    f"data.{key} is {value}, and data.over_length is {data.over_length}: no document is split",
                    "data.over_length of split where pieces are described",
                    f"data.over_length=split, or leave data.{key} out",
                )
    elif data.overlap > data.max_length // 2:
        yield Contradiction(
            ("data.overlap", "data.max_length"),
            f"data.overlap is {data.overlap}, of pieces of {data.max_length} tokens (data.max_length)",
            f"at most {data.max_length // 2}, half of a piece",
            f"data.overlap={data.max_length // 8}, or a larger data.max_length",
        )


def _length(config: Config) -> Iterator[Contradiction]:
    if config.steps is not None and config.epochs is not None:
        found = f"both epochs ({config.epochs:g}) and steps ({config.steps})"
        yield Contradiction(("epochs", "steps"), found, "one of them", "remove epochs or steps")
    if config.steps is None and config.epochs is None:
        yield Contradiction(("epochs", "steps"), "neither epochs nor steps", "one of them", "write epochs: 3")


def _shortest(data: Data) -> Iterator[Contradiction]:
    if data.min_length > data.max_length:
        yield Contradiction(
            ("data.min_length", "data.max_length"),
            f"data.min_length is {data.min_length}, and data.max_length is {data.max_length}",
            "at most data.max_length: no conversation would be left",
            f"data.min_length=1, or data.max_length={data.min_length}",
        )


def _batch(config: Config) -> Iterator[Contradiction]:
    batch, keys = config.batch, ("batch.tokens", "batch.sequences")
    if batch == "auto":
        return
    if batch.tokens is not None and batch.sequences is not None:
        both = f"both batch.tokens ({batch.tokens}) and batch.sequences ({batch.sequences})"
        yield Contradiction(keys, both, "one of them", "remove batch.tokens or batch.sequences")
        return
    if batch.tokens is None and batch.sequences is None:
        change = "write batch: auto, or batch: {tokens: 65536}"
        yield Contradiction(keys, "neither batch.tokens nor batch.sequences", "one of them", change)
        return
    if batch.tokens is not None and not config.data.pack:
        yield Contradiction(
            ("batch.tokens", "data.pack"),
            f"batch.tokens is {batch.tokens} without packing (data.pack is false)",
            "a batch counted in conversations, because their lengths differ",
            "write batch: {sequences: 32} instead, or data.pack: true",
        )
        return
    if batch.tokens is not None and batch.tokens < config.data.max_length:
        yield Contradiction(
            ("batch.tokens", "data.max_length"),
            f"batch.tokens is {batch.tokens}, less than a pack of {config.data.max_length} (data.max_length)",
            "room for at least one pack in a step",
            f"raise batch.tokens to a multiple of {config.data.max_length}, or lower data.max_length",
        )
        return
    if config.launch.workers == "auto":
        return
    packs, workers, together = config.packs_per_step, config.pack_groups, config.parallel.together
    if packs < workers and not config.parallel.is_open:
        yield Contradiction(
            ("launch.workers", "batch.tokens", "batch.sequences"),
            f"{workers} workers and only {packs} {'pack' if packs == 1 else 'packs'} in a step"
            if together == 1
            else f"{workers} groups of {together} workers and only {packs} pack(s) in a step",
            "at least one pack for every worker" if together == 1 else "at least one pack for every group",
            f"set launch.workers={packs * together}, or enlarge the batch",
        )


OF_SCHEMES = {
    "group_size": ("int4", "int8-int4"),
    "after_steps": ("int4", "int8", "int8-int4", "mxfp4", "nvfp4"),
}


def _rounding(config: Config) -> Iterator[Contradiction]:
    """Keys that a scheme does not know, and losses that compare with the model as it was, rounded or not."""
    aware, kind = config.quantize_aware, config.objective.kind
    yield from of_other_kinds("quantize_aware", aware, QuantizeAware(), OF_SCHEMES, "scheme")
    if aware.scheme != "none" and config.objective.has_reference:
        yield Contradiction(
            ("quantize_aware", "objective.kind"),
            f"quantize_aware is {aware.scheme}, and objective.kind is {kind}, which compares with the model as it was",
            "an objective without a reference, whose log-probabilities are those of weights that are not rounded",
            "set quantize_aware=none",
        )
