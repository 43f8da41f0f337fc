"""Everything that is decided before a run: the config, the model's files, the prepared data, the plan.

``train``, ``plan`` and ``inspect`` all start here, so what is shown is what will happen. Every mistake that can be
found is found here, before a weight is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.config import Config, SlurmLaunch, read_config
from tonnage.config import Source as ConfigSource
from tonnage.errors import Problem, UserError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from tonnage.data import DataOptions, Prepared, Progress, Source
    from tonnage.model.files import ModelFiles
    from tonnage.plan.plan import Plan


@dataclass(frozen=True)
class ModelFound:
    """A model whose weights nobody has read yet."""

    files: ModelFiles
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Decision:
    """A config and all that follows from it."""

    config: Config
    model: ModelFound
    prepared: Prepared
    plan: Plan


def decide(path: str, overrides: Sequence[str], console: Console, *, fresh_output: bool = False) -> Decision:
    """Read the config, find the model, prepare the data, make the plan.

    ``fresh_output`` also requires that the output directory holds no run yet.

    Raises:
        UserError: the user can mend it; lists every problem found.
    """
    return decide_on(read_config(path, overrides), console, fresh_output=fresh_output)


def decide_on(config: Config, console: Console, *, fresh_output: bool = False) -> Decision:
    """As ``decide``, for a config that is read already."""
    model = find(config, fresh_output=fresh_output)
    prepared = prepare_data(config, model.tokenizer, console)
    return Decision(config, model, prepared, _plan(config, model, prepared))


def find(config: Config, *, fresh_output: bool = False) -> ModelFound:
    """Find the model of ``config`` and check that model, tokenizer and lengths belong together."""
    from tonnage.config import check_output
    from tonnage.model.files import check_fit, find_model, read_model_config, read_tokenizer

    problems: list[Problem] = []

    @contextmanager
    def collecting() -> Iterator[None]:
        try:
            yield
        except UserError as error:
            problems.extend(error.problems)

    found = None
    if fresh_output:
        with collecting():
            check_output(config)
    with collecting():
        files = find_model(config.model, random_weights=config.init == "random")
        model_config = read_model_config(files, trust_remote_code=config.trust_remote_code)
        tokenizer = read_tokenizer(files, trust_remote_code=config.trust_remote_code)
        found = ModelFound(files, model_config, tokenizer)
        check_fit(model_config, tokenizer, config.data.max_length)
    if problems or found is None:
        raise UserError(*problems)
    return found


def prepare_data(config: Config, tokenizer: PreTrainedTokenizerBase, console: Console) -> Prepared:
    """Rows to packs, or the packs of an earlier preparation of the same rows, with a progress bar."""
    from tonnage.data import prepare

    cache = Path(config.data.cache).expanduser() if config.data.cache else None
    with progress_bar(console) as progress:
        return prepare(data_options(config), tokenizer, cache=cache, progress=progress)


def data_options(config: Config) -> DataOptions:
    """The part of a config that the data room needs, as it wants it."""
    from tonnage.data import DataOptions

    data = config.data
    return DataOptions(
        train=_sources(data.train),
        validation=_sources(data.validation) if isinstance(data.validation, tuple) else data.validation,
        max_length=data.max_length,
        over_length=data.over_length,
        max_loss=data.max_loss,
        template=data.template,
        train_on=data.train_on,
        pack=data.pack,
        on_bad_row=data.on_bad_row,
        duplicates=data.duplicates,
        mixture=data.mixture,
        seed=config.seed,
    )


def _sources(sources: tuple[ConfigSource, ...]) -> tuple[Source, ...]:
    from tonnage.data import Source

    return tuple(Source(**source.model_dump()) for source in sources)


def _plan(config: Config, model: ModelFound, prepared: Prepared) -> Plan:
    from tonnage.model.weigh import weigh
    from tonnage.parallel.threads import threads_per_worker
    from tonnage.plan.plan import DataProfile, ModelProfile
    from tonnage.plan.planner import make_plan

    train, validation, launch = prepared.train, prepared.validation, config.launch
    weight = weigh(model.config, vocab_size=max(prepared.tokenizer.get_vocab().values()) + 1)
    return make_plan(
        config,
        ModelProfile(**asdict(weight)),
        DataProfile(
            train_path=str(train.path.resolve()),
            validation_path=None if validation is None else str(validation.path.resolve()),
            num_packs=train.num_packs,
            num_tokens=train.num_tokens,
            supervised_tokens=train.supervised_tokens,
            max_length=train.max_length,
        ),
        threads_per_worker=launch.cpus_per_worker
        if isinstance(launch, SlurmLaunch) and launch.threads == "auto"
        else threads_per_worker(launch.threads, launch.workers),
    )


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A progress bar that is told (what, done, total) and goes away at the end; nothing where there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
