"""How good a model, or that of a run, is on the rows of files: loss, perplexity, exact match."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedConfig

from tonnage.data import DataOptions, PackedDataset, Progress, Source, prepare, silent
from tonnage.decide.models import code_allowed, use_kernels_of
from tonnage.host.cachedir import default_directory
from tonnage.host.threads import usable_cores
from tonnage.inference.generate import exact_match, resolve_model
from tonnage.kernels.threads import use_threads
from tonnage.model.files import ModelFiles, check_fit, find_model, positions_of, read_model_config, read_tokenizer
from tonnage.model.matching import ANY, check_weights
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.world import join_world
from tonnage.training.batch import Deal, round_to
from tonnage.training.building import assemble_model, trains_of_files
from tonnage.training.evaluate import evaluate
from tonnage.training.isolation import isolation_of, outgrows
from tonnage.training.pipeline import Pipeline


@dataclass(frozen=True)
class Evaluation:
    """What was found."""

    loss: float
    """Mean negative log-likelihood of a supervised token, in nats."""
    supervised_tokens: int
    answers: int | None = None
    """Rows to which an answer was generated; None if none was asked for."""
    exact: int = 0
    """Answers that are the row's own."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(min(self.loss, 700.0))

    def figures(self) -> dict[str, float | int]:
        """By name, as they are shown and written."""
        found: dict[str, float | int] = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "supervised_tokens": self.supervised_tokens,
        }
        if self.answers is not None:
            found |= {"exact_match": self.exact / self.answers if self.answers else math.nan, "answers": self.answers}
        return found


def evaluate_model(
    model: str,
    data: Sequence[str],
    progress: Progress = silent,
    *,
    format: str = "auto",
    template: str = "auto",
    max_length: int = 2048,
    answers: int = 0,
    max_new_tokens: int = 128,
    precision: Literal["auto", "bf16", "fp32"] = "auto",
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda told: None,
) -> Evaluation:
    """Evaluate a run, a model directory or a hub id on files of rows, in this process; a run with the kernels that it
    was trained with.

    ``answers`` is the most rows that answers are generated to; ``tell`` hears what is remarkable about the weights.

    Raises:
        UserError: no such model, rows that cannot be read, or the two do not belong together.
    """
    trusted = code_allowed(model, trust_remote_code)
    directory = str(resolve_model(model, trust_remote_code=trusted))
    use_kernels_of(model)
    files = find_model(directory)
    config = read_model_config(files, trust_remote_code=trusted)
    tokenizer = read_tokenizer(files, trust_remote_code=trusted)
    weights = check_weights(files, config, allow_unexpected=ANY)
    if weights.left_out:
        tell(f"{len(weights.left_out):,} tensors that the model has no place for are left out.")
    max_length = min(max_length, positions_of(config) or max_length)
    check_fit(config, tokenizer, max_length)
    options = DataOptions(
        train=tuple(Source(path, format=format) for path in data),
        max_length=max_length,
        template=template,
    )
    rows = prepare(options, tokenizer, progress=progress).train
    loss = _loss_of(files, config, rows, precision, max_length, progress)  # whose model is gone before the answers'
    exact, asked = 0, None
    if answers:
        exact, asked = exact_match(
            directory,
            data,
            limit=answers,
            max_new_tokens=max_new_tokens,
            format=format,
            template=template,
            trust_remote_code=trusted,
            progress=lambda done, total: progress("generate", done, total),
        )
    return Evaluation(loss, rows.supervised_tokens, asked, exact)


@contextmanager
def _all_threads() -> Iterator[None]:
    """Within it torch computes on all cores; the program's own number of threads comes back."""
    threads = torch.get_num_threads()
    use_threads(usable_cores())
    try:
        yield
    finally:
        use_threads(threads)


def _loss_of(
    files: ModelFiles,
    config: PreTrainedConfig,
    rows: PackedDataset,
    precision: Literal["auto", "bf16", "fp32"],
    max_length: int,
    progress: Progress,
) -> float:
    """The loss of a model on rows."""
    with _all_threads(), join_world() as world:
        isolation = isolation_of(
            config,
            device=world.device,
            long_documents=outgrows(config, max_length),
            cache=default_directory(),
        )
        compute = precision if precision != "auto" else ("fp32" if config.dtype == torch.float32 else "bf16")
        dtypes = Precision.of(compute, world.data_size)
        assembled = assemble_model(
            files,
            config,
            world,
            dtypes,
            allow_unexpected=ANY,
            arrangement=isolation.arrangement,
            attention=isolation.attention,
            trains=trains_of_files(files, config),
        )
        return evaluate(
            Pipeline({0: assembled.loss_model}, world, dtypes.compute),
            rows,
            Deal(
                1,
                1,
                rank=0,
                world_size=1,
                round_to=round_to(max_length, world.device, dtypes.compute),
                padded_tokens=max_length if isolation.arrangement == "padded" else 0,
            ),
            world,
            progress=lambda done, total: progress("evaluate", done, total),
        )
