"""``tonnage.Session``: steps of one's own, in this process, over the engine of every run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.api.said import config_of, conversations_of
from tonnage.api.starting import closed_to_others
from tonnage.api.steps import Step
from tonnage.config import check_output, check_trackers
from tonnage.errors import refusals, user_error
from tonnage.host.variables import variables_of_torch
from tonnage.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from tonnage.api.run import Run
    from tonnage.config import Config
    from tonnage.decide.decision import Decision
    from tonnage.planning.plan import Plan
    from tonnage.training.by_hand import Batch, ByHand
    from tonnage.training.own_loss import Loss, OwnLoss


@dataclass(frozen=True)
class Sample:
    """What the model of a session wrote."""

    text: str
    """Without the token that ends it."""
    tokens: tuple[int, ...]
    """As they were drawn, with the one that ends it."""
    prompt_tokens: tuple[int, ...]
    """What stood before."""
    stopped: bool
    """Whether it came to an end, and was not cut off."""

    def row(self, **columns: float) -> dict[str, Any]:
        """The row that trains these very tokens and none of the prompt's; ``columns`` are what ``data.carry`` names."""
        return {
            "input_ids": [*self.prompt_tokens, *self.tokens],
            "loss_mask": [0] * len(self.prompt_tokens) + [1] * len(self.tokens),
            **columns,
        }


class Session:
    """A model in this process, for those who write their own step: one worker, with the plan, the packs, the exact
    loss, the tiers and the adapters of every run. It has a run's directory (``session.run``), metrics included.

    Args:
        model_or_config: as for ``tonnage.train``.
        data: as for ``tonnage.train``: how rows are read, and what ``session.batches()`` yields.
        force: go on although the plan does not fit into memory.
        config: keys of the config, as for ``tonnage.train``. A session is one worker, whatever GPUs there are:
            ``launch.workers`` is 1, or left out.

    Raises:
        UserError: as ``tonnage.train``; or this process has joined others already (another session, torchrun).

    The session ends with its ``with`` block, or by ``close()``. It evaluates, samples and saves when it is told to: the
    config's ``evaluate`` and ``checkpoint.every`` are for runs.

    Example:
        >>> rows = [{"instruction": f"Say {word}.", "output": word} for word in ["one", "two", "three"] * 40]
        >>> settings = {"batch": {"sequences": 8}, "optimizer": {"lr": 3e-3}, "launch": {"threads": 1}}
        >>> data = {"train": rows, "max_length": 128, "template": "plain"}
        >>> def own(logprobs, weights):
        ...     return -logprobs.sum()
        >>> with tonnage.Session("tiny", data, steps=4, output="runs/by-hand", **settings) as session:
        ...     for batch in session.batches():
        ...         loss = session.forward_backward(batch)
        ...         step = session.update()
        ...     before = session.evaluate(rows[:3])
        ...     for _ in range(3):
        ...         loss = session.forward_backward(session.batch(rows[:3]), loss=own)
        ...         step = session.update(lr=1e-3)
        ...     after = session.evaluate(rows[:3])
        ...     (sample,) = session.sample(["Say one."], max_new_tokens=4)
        ...     export = session.save()
        >>> step.step, step.loss == loss, after < before, len(sample.tokens) <= 4, (export / "config.json").exists()
        (7, True, True, True, True)
    """

    def __init__(
        self, model_or_config: str | os.PathLike[str], data: Any = None, *, force: bool = False, **config: Any
    ) -> None:
        self._samplings, self._saved = 0, -1
        with closed_to_others(), ExitStack() as closing:
            self._begin(_config_of_a_worker(model_or_config, data, config), closing, force=force)
            self._closing = closing.pop_all()

    def _begin(self, config: Config, closing: ExitStack, *, force: bool) -> None:
        import torch.distributed as dist

        from tonnage.data import Packer
        from tonnage.decide.decision import decide_on
        from tonnage.decide.written import nothing_if_not_started, write_run
        from tonnage.training.ready import ready_job

        if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            observed = "a process that has joined others" if dist.is_initialized() else "one of several processes"
            change = "close() the session before, if that is one" if dist.is_initialized() else "start it alone"
            raise user_error(observed, "a process of its own: a session is one worker", change, "Session")
        check_trackers(config)
        check_output(config)
        self._directory = run = RunDirectory(config.output)
        self._decision: Decision = decide_on(config, fresh_output=True, force=force)
        with refusals("the run's directory could not be written", run.path):
            closing.enter_context(run.locked())
            check_output(self._decision.config)  # nobody was here in the meantime
            with nothing_if_not_started(run):
                write_run(run, self._decision)
                run.by_hand.touch()
                run.clear_traces()
                with variables_of_torch():
                    job = ready_job(run, self._decision.config, self._decision.plan)
                    self._hand: ByHand = closing.enter_context(job)
        prepared = self._decision.prepared
        self._packer = Packer(prepared.recipe, prepared.forms, self._decision.config.data.max_length)

    def __repr__(self) -> str:
        return f"Session({str(self._directory.path)!r}, {self._hand.cursor.step} updates)"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model's memory back, and leave the run's directory as it is. Nothing is saved. Once is enough."""
        self._closing.close()

    @property
    def run(self) -> Run:
        """The run's directory as an object: ``metrics``, ``steps``, ``config``, ``plan``, ``export``."""
        from tonnage.api.run import Run

        return Run(self._directory.path)

    @property
    def plan(self) -> Plan:
        """What was decided: layout, bytes, steps of the run's own packs."""
        return self._decision.plan

    def batches(self) -> Iterator[Batch]:
        """The run's packs in its order, a step's each, from after those that an update was made with: what
        ``tonnage.train`` would see, to the end of the config's ``epochs`` or ``steps``."""
        return self._hand.batches()

    def batch(self, rows: Any) -> Batch:
        """Rows in memory as one batch: tokenised and packed as the run's are, in forwards as large as the plan's.

        Args:
            rows: a list or any iterable of dictionaries, or a frame; of any form of rows that files have, with the
                columns that ``data.carry`` names. Nothing is written.

        Raises:
            UserError: a row cannot be trained on, or is longer than ``data.max_length``; named by its number, from 0.
        """
        return self._hand.batch(self._packer.pack(rows))

    def forward_backward(self, batch: Batch, loss: Loss | None = None) -> float:
        """Compute the gradients of a batch, and add them to those there are since the last update.

        Args:
            batch: from ``batches()`` or ``batch(rows)``.
            loss: any function ``loss(logprobs, weights, **columns)``, as for ``tonnage.train``; None is cross-entropy.

        Returns:
            The loss: its sum over the sum of the weights of the batch; of cross-entropy, nats a supervised token.
            Several batches of an update count as one: each token the same.

        Raises:
            UserError: the loss is no sum (the row on which that was found out is named), or there are more
                micro-batches than the plan's gradients take up.
        """
        with self._hand.as_planned():
            return self._hand.forward_backward(batch, self._own(loss))

    def update(self, lr: float | None = None) -> Step:
        """Update the weights by the gradients there are: clipped (``optimizer.clip``), by AdamW.

        Args:
            lr: the learning rate; None is that of the run's schedule at this step.

        Returns:
            The step, as in ``run.steps``. One whose loss or gradient is not finite changes nothing (``skipped``).

        Raises:
            UserError: there are no gradients, or more steps in a row were skipped than ``optimizer.skips``.
        """
        with self._hand.as_planned():
            step = Step.of(self._hand.update(lr))
        assert step is not None
        return step

    def evaluate(self, rows: Any = None, loss: Loss | None = None) -> float:
        """The loss on rows in memory, or on the run's validation rows (``data.validation``); nothing is learnt.

        Returns:
            The sum of ``loss`` over that of the weights; by default nats a supervised token.

        Raises:
            UserError: as of ``batch`` and ``forward_backward``; or there are no validation rows.
        """
        packs = self._hand.job.validation_data if rows is None else self._packer.pack(rows)
        if packs is None:
            raise user_error("no rows", "rows, or data.validation", 'data={"validation": 0.1, ...}', "evaluate")
        with self._hand.as_planned():
            return self._hand.evaluate(packs, self._own(loss))

    def sample(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        batch_size: int = 32,
    ) -> list[Sample]:
        """What the model answers, with its weights as they are now: one answer to each prompt, in their order.

        Args:
            prompts: what a user says, or the messages of a conversation. For several answers, repeat it.
            max_new_tokens: tokens of an answer at most.
            temperature: 0 takes the likeliest token, 1 draws from the model's own distribution.
            top_p: draw only from the likeliest tokens that together have this probability.
            batch_size: answers that are written side by side. Their memory is in no plan.

        Returns:
            The answers, as text and as the tokens that were drawn: ``sample.row()`` trains exactly these. Draws depend
            on ``seed`` and on how often this session was asked; the program's own random numbers stay as they are.

        Raises:
            UserError: a prompt leaves no room for an answer, the session computes in fp16, or its model writes none.
        """
        from tonnage.inference.generate import Decoding, Loaded, write

        decision = self._decision
        if decision.config.objective.scores:
            observed = "objective: reward, whose model scores texts and writes none"
            raise user_error(
                observed, "an objective whose model writes texts", "objective: supervised or dpo", "sample"
            )
        if decision.config.precision == "fp16":
            observed = "precision: fp16, whose weights are cast around a whole forward pass"
            raise user_error(observed, "precision: bf16 or fp32", 'precision="bf16"', "sample")
        conversations = conversations_of(prompts, "sample")
        self._samplings += 1
        (stage,) = self._hand.job.pipeline.stages
        self._hand.job.optimizer.finish()
        with self._hand.as_planned():
            written = write(
                Loaded(stage.model, decision.prepared.tokenizer, decision.prepared.stop_tokens),
                conversations,
                Decoding(max_new_tokens, temperature, top_p),
                seed=decision.config.seed * 1_000_003 + self._samplings,
                attention=decision.plan.layout.attention,
                batch_size=batch_size,
            )
        return [Sample(answer.text, answer.tokens, answer.prompt_tokens, answer.stopped) for answer in written]

    def save(self) -> Path:
        """Save weights and optimizer into the run's directory, and export the model, in the place of an older export.

        Returns:
            The export's directory: a Hugging Face model, or a PEFT adapter.

        Raises:
            UserError: it could not be written.
        """
        from tonnage.decide.exports import export_run

        if self._saved != self._hand.cursor.step:
            self._hand.save(self._directory.checkpoints, self._decision.config.checkpoint.keep)
            self._saved = self._hand.cursor.step
        export_run(self._directory)
        return self._directory.export

    def _own(self, loss: Loss | None) -> OwnLoss | None:
        from tonnage.training.own_loss import OwnLoss

        return None if loss is None else OwnLoss.of(loss, self._decision.config.data.carry)


def _config_of_a_worker(model_or_config: str | os.PathLike[str], data: Any, keys: dict[str, Any]) -> Config:
    """The config of a session, which is one worker. Raises ``UserError``."""
    config = config_of(model_or_config, data, keys)
    if config.launch.launcher != "local":
        observed = f"launch.with is {config.launch.launcher}"
        raise user_error(observed, "local: a session is a worker in this process", "leave it out", "launch.with")
    if config.launch.workers == "auto":
        from tonnage.planning.workers import with_workers

        return with_workers(config, 1)
    if config.launch.workers != 1:
        observed = f"launch.workers is {config.launch.workers}"
        raise user_error(observed, "1: a session is one worker", 'launch={"workers": 1}', "launch.workers")
    return config
