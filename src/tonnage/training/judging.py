"""What an evaluation between steps computes, and what follows from it: which step is the best, and whether to go on.

Every number comes out of sums over all ranks, so all ranks decide alike; scores of answers are computed by rank 0,
whose function of the user's nobody else has to trust, and told to the others. What a later evaluation is compared with
is part of the cursor that checkpoints hold: a run that goes on decides as one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from tonnage.checkpoint.save import Cursor
from tonnage.config.bounds import is_better
from tonnage.rundir.figures import Evaluated, Figure, mean_of
from tonnage.training.answers import Asking, answer
from tonnage.training.evaluate import evaluate, evaluate_pairs, judge
from tonnage.training.job import Job
from tonnage.training.memory import Phases
from tonnage.training.scorers import Scorer


@dataclass(frozen=True)
class Scoring:
    """Rows that are answered and scored at every evaluation."""

    asking: Asking
    """Each prompt has the answer that it should be given."""
    scorers: Mapping[str, Scorer]
    """By the name of the figure."""


@dataclass(frozen=True)
class Judging:
    before: bool = True
    """Before the first step as well."""
    figure: str = "eval_loss"
    """By which steps are compared."""
    saves_best: bool = False
    """Whether the best step is saved and kept."""
    patience: int = 0
    """Evaluations in a row without a better figure that end the run; 0 is none."""
    scoring: Scoring | None = None


def compared(record: Mapping[str, Any], judging: Judging, cursor: Cursor) -> Cursor:
    """The cursor with what the next evaluation is compared with, after one that gave ``record``, and how long there has
    been no better one."""
    value = record.get(judging.figure)
    if value is None:
        return cursor
    has_best = cursor.best_step >= 0 and cursor.best_figure == judging.figure
    if is_better(judging.figure, value, cursor.best_value if has_best else None):
        return replace(cursor, best_figure=judging.figure, best_step=cursor.step, best_value=float(value), stale=0)
    return replace(cursor, stale=cursor.stale + 1)


def judged(job: Job, judging: Judging, phases: Phases) -> dict[str, Any]:
    """Evaluate all that there is to evaluate; what of it goes into ``metrics.jsonl``, empty if nothing was evaluated.
    Every rank finds the same."""
    record: dict[str, Any] = {}
    evaluated, progress = Evaluated(), phases.advance
    if job.validation_data is not None or job.general_data is not None:
        phases.enter("evaluate", micro_batch=0, num_micro_batches=0)
    if (data := job.validation_data) is not None:
        if job.pair_loss is not None:
            pairs, figures = evaluate_pairs(job.pipeline, data, job.deal, job.world, job.pair_loss, progress=progress)
            evaluated = replace(evaluated, pairs=pairs, pair_figures=figures)
            record |= {name: figure.value for name, figure in figures.items()}
        elif any(stage.own is not None for stage in job.pipeline.stages):
            record["eval_loss"] = evaluate(job.pipeline, data, job.deal, job.world, progress=progress)
        else:
            rows, sources = judge(job.pipeline, data, job.deal, job.world, job.source_names, progress=progress)
            evaluated = replace(evaluated, rows=rows, sources=sources)
            record |= {"eval_loss": rows.loss.value, "token_accuracy": rows.token_accuracy.value}
            if rows.divergence is not None:
                record["eval_kl"] = rows.divergence.value
            if any(stage.quantizers is not None for stage in job.pipeline.stages):
                with job.quantized(False):
                    exact, _ = judge(job.pipeline, data, job.deal, job.world, job.source_names, progress=progress)
                evaluated = replace(evaluated, unquantized=exact)
                record["unquantized_loss"] = exact.loss.value
    if job.general_data is not None:
        data = job.general_data
        general, _ = judge(job.pipeline, data, job.deal, job.world, job.general_names, progress=progress)
        evaluated = replace(evaluated, general=general)
        record["general_loss"] = general.loss.value
    if judging.scoring is not None:
        phases.enter("answer", micro_batch=0, num_micro_batches=0)
        scores = _scored(job, judging.scoring, progress)
        evaluated = replace(evaluated, scores=scores, answers=len(judging.scoring.asking.prompts))
        record |= {name: figure.value for name, figure in scores.items()}
    return record | ({"evaluation": plain} if (plain := evaluated.to_json()) else {})


def _scored(job: Job, scoring: Scoring, progress: Callable[[int, int], None]) -> dict[str, Figure]:
    """The mean of what each scorer, asked by rank 0, gives the answers of all ranks."""
    asking, world = scoring.asking, job.world
    answers = list(map(asking.decode, answer(job.pipeline, asking, job.deal, world, progress=progress)))
    pairs = [(text, prompt.expected or "") for text, prompt in zip(answers, asking.prompts, strict=True)]
    figures = {}
    for name, scorer in scoring.scorers.items():
        scores = list(starmap(scorer, pairs)) if world.rank == 0 else [0.0] * len(pairs)
        figures[name] = mean_of(world.sum(*scores))
    return figures
