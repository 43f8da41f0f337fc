"""``tonnage.plan``, ``train`` and ``start``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tonnage.api.said import config_of, first_word, words_of

if TYPE_CHECKING:
    from tonnage.api.run import Run, Running
    from tonnage.planning.plan import Plan
    from tonnage.training.own_loss import Loss


def plan(
    model_or_config: str | os.PathLike[str], data: Any = None, *, hardware: str | None = None, **config: Any
) -> Plan:
    """What a run would do, before it does it: layout, steps, and where every byte and second goes. Nothing is written
    but the cache of prepared data.

    Args:
        model_or_config: a model (a hub id or a directory), or the path of a config that ends in ``.yaml``.
        data: as for ``train``. A model without data is planned for full packs, half of them supervised; no weights are
            needed.
        hardware: other hardware than this machine, as ``"2x8xA100-80GB"``, ``"8xH100"`` or ``"RTX4090:128GB"``.
        config: keys of the config, as for ``train``.

    Returns:
        The plan. ``plan.num_steps`` and ``plan.tokens_per_step`` are of the whole run, ``plan.choice.peak_bytes`` is of
        one worker, ``plan.choice.seconds.total`` of one step.

    Raises:
        UserError: what is wrong with the config, the model or the rows, all of it at once; or that nothing fits, and
            what would.

    Example:
        >>> data = {"train": "rows.jsonl", "max_length": 128, "template": "plain"}
        >>> plan = tonnage.plan("tiny", data, steps=4, batch={"sequences": 8})
        >>> plan.num_steps, plan.workers, plan.packs_per_step
        (4, 1, 8)
        >>> plan.choice.peak_bytes < plan.budget.usable
        True
    """
    from tonnage.decide.decision import asked
    from tonnage.decide.plans import suppose
    from tonnage.planning.machine import parse_hardware

    path, words = words_of(model_or_config, data, config)
    machine = None if hardware is None else parse_hardware(hardware)
    if path is None and data is None:
        return suppose(first_word(model_or_config), words, machine)
    return asked(path, words, machine).plan()


def start(
    model_or_config: str | os.PathLike[str],
    data: Any = None,
    *,
    force: bool = False,
    loss: Loss | None = None,
    **config: Any,
) -> Running:
    """Begin a run, and iterate over its steps while workers take them: processes of their own, on this machine or
    wherever ``launch`` says.

    Leaving the ``with`` block early, by ``break`` or an exception, saves and ends the run, as ``running.stop()`` does;
    a plain loop to its end works too.

    Args:
        model_or_config: as for ``train``.
        data: as for ``train``.
        force: start although the plan does not fit into memory.
        loss: as for ``train``.
        config: keys of the config, as for ``train``.

    Returns:
        The run at work: an iterator of ``Step``, each with ``step`` (from 1), ``loss`` (nats a supervised token),
        ``grad_norm``, ``lr``, ``tokens_per_second``, ``step_seconds``, ``memory`` (bytes), and ``record``, all that
        ``metrics.jsonl`` says of it; ``running.run`` is the ``Run``.

    Raises:
        UserError: as for ``train``; while it is iterated, what a worker found that you can mend.
        WorkerFailed: while it is iterated, a worker died; its error, whole.

    Example:
        >>> losses = []
        >>> with tonnage.start("tiny", data, steps=500, output="runs/stopped", **settings) as running:
        ...     for step in running:
        ...         losses.append(step.loss)
        ...         if step.step == 2:
        ...             break
        >>> run = running.run
        >>> len(losses), 2 <= run.steps[-1].step < 500, run.export.exists()
        (2, True, True)
    """
    from tonnage.api.run import Running
    from tonnage.api.starting import begin

    return Running(begin(config_of(model_or_config, data, config), force=force, loss=loss))


def train(
    model_or_config: str | os.PathLike[str],
    data: Any = None,
    *,
    force: bool = False,
    loss: Loss | None = None,
    **config: Any,
) -> Run:
    """Fine-tune a model to the end of the run, and export it. On a terminal and in a notebook it shows how far it is.

    Args:
        model_or_config: a model (a hub id or a directory), or the path of a config that ends in ``.yaml``.
        data: what a config takes as ``data.train`` (a file, directory, glob or hub id, or a list of sources), or rows
            in memory: a list or any iterable of dictionaries, a ``datasets.Dataset``, a frame of pandas or polars; or
            the whole section, as ``{"train": rows, "validation": 0.1, "max_length": 1024}``.
        force: start although the plan does not fit into memory.
        loss: what is trained, and evaluated, instead of cross-entropy: a function at the top of a module,
            ``loss(logprobs, weights, **columns)``, all fp32 (targets,): log-probabilities of supervised tokens, their
            weights, and for each the numbers of its row in the columns that ``data.carry`` names. It gives a sum, an
            fp32 scalar, which is divided once, by the sum of the weights of the whole step.
        config: keys of the config (docs/config.md), sections as dictionaries: ``optimizer={"lr": 1e-4}``. Of a config
            file they change what they name, and nothing else.

    Returns:
        The run: ``run.export`` is the model's directory, ``run.steps`` and ``run.evaluations`` what was measured.
        One that ``tonnage stop`` has ended from elsewhere is saved; ``run.resume()`` goes on.

    Raises:
        UserError: what is wrong with the config, the model or the rows, all of it at once, before a weight is loaded;
            or a loss that is no such sum, with the row on which it was found out.
        WorkerFailed: a worker died; its error, whole.
        KeyboardInterrupt: Ctrl-C was pressed, and the run is saved.

    Example:
        >>> rows = [{"instruction": f"Say {word}.", "output": word} for word in ["one", "two", "three"] * 40]
        >>> settings = {"batch": {"sequences": 8}, "optimizer": {"lr": 3e-3}, "launch": {"threads": 1}}
        >>> data = {"train": rows, "max_length": 128, "template": "plain"}
        >>> run = tonnage.train("tiny", data, steps=4, output="runs/first", **settings)
        >>> run.steps[-1].step, run.export.name
        (4, 'export')
    """
    from tonnage.api.run import Running, show
    from tonnage.api.starting import begin
    from tonnage.display.bar import progress_bar
    from tonnage.display.terminal import terminal

    resolved = config_of(model_or_config, data, config)
    with progress_bar(terminal()) as progress:
        running = Running(begin(resolved, progress, force=force, loss=loss))
    show(running)
    return running.run
