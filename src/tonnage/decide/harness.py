"""Tasks of lm-evaluation-harness, an extra: our model behind its interface, so that its tasks, its YAML and its metrics
are its own.

Texts become tokens as its ``hf`` back end has it, and the figures are the same. What differs is how they are computed:

    loglikelihood    requests of one context side by side, which is computed once where attention can share it
                     row   context | choice a | choice b | choice c | context | ...
    rolling          windows of long texts, packed in the same way
    generate_until   the engine of training (``training.answers``): greedy, keys and values kept, places taken again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from tonnage.data import Progress, silent
from tonnage.decide.evaluation import AS_IT_IS, MOST_TOGETHER, Loading, assembled, checked_model, kept_tokens, ranks
from tonnage.errors import user_error
from tonnage.inference.generate import place_of
from tonnage.model.attention import Shared
from tonnage.model.files import positions_of, read_tokenizer
from tonnage.parallel.world import World
from tonnage.rundir.samples import Prompt
from tonnage.training.answers import Asking, answer
from tonnage.training.batch import Deal, MicroBatch, round_to
from tonnage.training.isolation import Isolation
from tonnage.training.pipeline import Pipeline

ROW_TOKENS = 4096
"""Of a forward pass, unless a request alone has more."""
MOST_ANSWER = 256
"""Tokens of an answer where a task sets no limit, as in its ``hf`` back end."""
DEFAULT_LENGTH = 2048
"""Tokens of a text where the model does not say."""
TAIL = 48
"""The last tokens of an answer, in which a stop word is looked for."""
INSTALL = "pip install 'tonnage[eval]'"


@dataclass(frozen=True)
class Likelihood:
    """A request: what is the log-probability of a continuation?"""

    number: int
    context: tuple[int, ...]
    """At least one token."""
    continuation: tuple[int, ...]
    """At least one token."""

    @property
    def inner(self) -> tuple[int, ...]:
        """Tokens of the continuation that are computed: the last is only a target."""
        return self.continuation[:-1]


def evaluate_tasks(
    model: str,
    tasks: Sequence[str],
    progress: Progress = silent,
    *,
    task_folder: str | None = None,
    few_shot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    loading: Loading = AS_IT_IS,
) -> dict[str, Any]:
    """What lm-evaluation-harness says of a run, a model directory or a hub id: its ``simple_evaluate``'s dictionary,
    which it leaves empty on all but a machine's first rank.

    Args:
        tasks: their names.
        task_folder: where YAML of tasks of one's own is found.
        few_shot: examples before each question; None is what the task says.
        limit: rows of each task, at most.
        chat: whether questions are rendered with the chat template.

    Raises:
        UserError: the package is not installed, no such model or task, or a task that draws answers.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise user_error(f"lm_eval cannot be imported ({error})", "lm-eval", INSTALL, "--tasks") from error
    manager = TaskManager(include_path=task_folder)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        change = "lm_eval ls tasks lists them; --tasks-from names a folder with YAML of your own"
        raise user_error(f"no task {', '.join(unknown)}", "tasks of lm-evaluation-harness", change, "--tasks")
    checked = checked_model(model, loading)
    config, length = checked.config, positions_of(checked.config) or DEFAULT_LENGTH
    with ranks() as world:
        pipeline, dtypes, isolation = assembled(checked, world, length)
        engine = HarnessModel(
            pipeline,
            world,
            isolation,
            round_to=round_to(ROW_TOKENS, world.device, dtypes.compute),
            kept=lambda lengths: kept_tokens(config, dtypes.compute, lengths),
            progress=progress,
        )
        tokenizer = read_tokenizer(checked.files, trust_remote_code=checked.loading.trust_remote_code)
        results = simple_evaluate(
            model=behind_its_interface(engine, tokenizer, length, _ends_of(place_of(checked.files), tokenizer)),
            tasks=list(tasks),
            task_manager=manager,
            num_fewshot=few_shot,
            limit=limit,
            apply_chat_template=chat,
            log_samples=False,
        )
    return dict(results or {})


def as_table(results: dict[str, Any]) -> str:
    """Results as its own command prints them."""
    from lm_eval.utils import make_table

    tables = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
    return "\n".join(tables)


@dataclass(frozen=True)
class HarnessModel:
    """A model that is asked, with how its documents are laid out."""

    pipeline: Pipeline
    world: World
    isolation: Isolation
    round_to: int
    kept: Callable[[Sequence[int]], int]
    """How many tokens the cache of keys and values has room for, given the lengths of documents."""
    progress: Progress = silent

    @property
    def is_padded(self) -> bool:
        """Whether each document has a row of its own."""
        return self.isolation.arrangement == "padded"

    @torch.no_grad()
    def likelihoods(self, requests: Sequence[Likelihood]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, in nats, and whether each of its tokens is the likeliest."""
        sums, misses = [0.0] * len(requests), [0.0] * len(requests)
        rows = list(self._rows(sorted(requests, key=lambda request: (-len(request.context), request.context))))
        num_ranks, done = self.world.data_size, 0
        for start in range(0, len(rows), num_ranks):  # every rank has a pass, for they gather each other's weights
            at = start + self.world.data_rank
            done += sum(len(group) for row in rows[start : start + num_ranks] for group in row)
            if at < len(rows):
                self._ask(rows[at], sums, misses)
            else:
                self._run(replace(MicroBatch.blank(is_padded=self.is_padded), judges=True))
            self.progress("log-probabilities", done, len(requests))
        totals = self.world.sum(*self.world.once(*sums, *misses))
        return [(value, not missed) for value, missed in zip(totals, totals[len(sums) :], strict=False)]

    def _ask(self, row: Sequence[Sequence[Likelihood]], sums: list[float], misses: list[float]) -> None:
        """Put the log-probability of each request of a row into ``sums``, and into ``misses`` how many of its tokens
        are not the likeliest."""
        losses, right = self._run(self._padded(row) if self.is_padded else _packed(row).rounded(self.round_to))
        at = 0
        for one in (one for group in row for one in group):
            part = slice(at, at := at + len(one.continuation))
            sums[one.number] = -float(losses[part].sum())
            misses[one.number] = float((right[part] == 0).sum())

    def _run(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of a batch's targets, and whether each is the likeliest token."""
        passes = self.pipeline.passes([batch], 1.0, backward=False)
        ((losses, right),) = [tensor.cpu() for one in passes for tensor in one.run()]
        return losses, right

    def answers(
        self, prompts: Sequence[Prompt], stops: frozenset[int], ends: Callable[[Sequence[int]], bool]
    ) -> list[list[int]]:
        """Tokens of the answer to each prompt, without the one that ends it."""
        row_tokens = self.kept([len(one.ids) + one.room for one in prompts])
        asking = Asking(tuple(prompts), stops, row_tokens, decode=str, most_together=MOST_TOGETHER, ends=ends)
        ranks, rank = self.world.data_size, self.world.data_rank
        deal = Deal(ranks, 1, rank, ranks, round_to=self.round_to, padded_tokens=row_tokens if self.is_padded else 0)
        return answer(self.pipeline, asking, deal, self.world, progress=partial(self.progress, "generate"))

    def _rows(self, ordered: Sequence[Likelihood]) -> Iterator[list[list[Likelihood]]]:
        """Rows of groups, each of the requests that share a context."""
        shares = self.isolation.shares_prefixes and not self.is_padded
        groups = [list(some) for _, some in groupby(ordered, key=lambda one: one.context if shares else one.number)]
        row: list[list[Likelihood]] = []
        for group in groups:
            size = _tokens(group)
            whole = max(size, *map(_tokens, row)) * (len(row) + 1) if row and self.is_padded else size
            total = whole if self.is_padded else sum(map(_tokens, row)) + size
            if row and total > ROW_TOKENS:
                yield row
                row = []
            row.append(group)
        if row:
            yield row

    def _padded(self, rows: Sequence[Sequence[Likelihood]]) -> MicroBatch:
        """Each request in a row of its own, padded at the right."""
        requests = [request for (request,) in rows]
        longest = max(len(request.context) + len(request.inner) for request in requests)
        width = -(-longest // self.round_to) * self.round_to
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        positions: list[int] = []
        for row, request in enumerate(requests):
            tokens = (*request.context, *request.inner)
            ids[row, : len(tokens)] = torch.tensor(tokens)
            positions += range(row * width + len(request.context) - 1, row * width + len(tokens))
        lengths = tuple(len(request.context) + len(request.inner) for request in requests)
        return _asked(ids, lengths, positions, requests, is_padded=True)


def _tokens(group: Sequence[Likelihood]) -> int:
    return len(group[0].context) + sum(len(one.inner) for one in group)


def _packed(rows: Sequence[Sequence[Likelihood]]) -> MicroBatch:
    """Groups side by side in one row, each as its context followed by all continuations."""
    tokens: list[int] = []
    lengths: list[int] = []
    positions: list[int] = []
    shared: list[Shared] = []
    for group in rows:
        inner = [request.inner for request in group if request.inner]
        last = len(tokens) + len(group[0].context) - 1
        if len(inner) == 1 and len(group) == 1:  # one document
            lengths.append(_tokens(group))
        else:
            if inner:
                shared.append(Shared(len(lengths), len(inner)))
            lengths += [len(group[0].context), *map(len, inner)]
        tokens += group[0].context
        for request in group:
            positions += [last, *range(len(tokens), len(tokens) + len(request.inner))]
            tokens += request.inner
    requests = [request for group in rows for request in group]
    return _asked(torch.tensor([tokens]), tuple(lengths), positions, requests, shared=tuple(shared))


def _asked(
    ids: torch.Tensor, lengths: tuple[int, ...], positions: list[int], requests: Sequence[Likelihood], **more: Any
) -> MicroBatch:
    targets = torch.tensor([token for one in requests for token in one.continuation])
    return MicroBatch(ids, lengths, torch.tensor(positions), targets, torch.ones(len(targets)), judges=True, **more)


def _ends_of(directory: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens at which transformers' ``generate`` would stop, as the model's files say."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(directory).eos_token_id
    except OSError:
        ids = None
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if isinstance(token, int))


class Interface:
    """What lm-evaluation-harness calls; names and arguments are its own."""

    cache_hook: Any

    def __init__(self, engine: HarnessModel, tokenizer: Any, length: int, ends: frozenset[int]) -> None:
        super().__init__()
        self.engine, self.tokenizer, self.length, self.ends = engine, tokenizer, length, ends

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if first is None else first)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            how = {"add_special_tokens": False}
        return list(self.tokenizer.encode(string, **how))

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        likelihoods = []
        for number, (_, context, continuation) in enumerate(requests):
            # What is computed has at most max_length tokens: all but the last of these.
            whole = [*context, *continuation][-(self.length + 1) :]
            first = max(1, len(whole) - len(continuation))
            likelihoods.append(Likelihood(number, tuple(whole[:first]), tuple(whole[first:])))
        results = self.engine.likelihoods(likelihoods)
        for (texts, _, _), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[Any] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            ranges = get_rolling_token_windows(tokens, self.prefix_token_id, self.length, 1)
            for window in map(make_disjoint_window, ranges):
                windows.append((None, *window))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += value
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        ends = [(number, *_until(request.args[1])) for number, request in enumerate(requests)]
        for (words, room), some in groupby(sorted(ends, key=lambda row: row[1:]), key=lambda row: row[1:]):
            numbers = [number for number, *_ in some]
            stops = [*words, self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)]
            most = self.length - room
            if most < 1:
                lengths = f"answers of {room:,} tokens of a model of {self.length:,}"
                raise user_error(lengths, "room for a question", where="max_gen_toks")
            prompts = [Prompt("", self.tok_encode(requests[row].args[0])[-most:], room) for row in numbers]

            def is_over(tokens: Sequence[int], stops: Sequence[str] = stops) -> bool:
                text = self.tokenizer.decode(list(tokens[-TAIL:]), skip_special_tokens=False)
                return any(stop and stop in text for stop in stops)

            for number, tokens in zip(numbers, self.engine.answers(prompts, self.ends, is_over), strict=True):
                text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
                for stop in stops:
                    text = text.split(stop)[0] if stop else text
                texts[number] = text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def behind_its_interface(engine: HarnessModel, tokenizer: Any, length: int, ends: frozenset[int]) -> Any:
    """An engine as a model of lm-evaluation-harness (``lm_eval.api.model.TemplateLM``), with texts of ``length`` tokens
    at most."""
    from lm_eval.api.model import TemplateLM

    class Model(Interface, TemplateLM):  # type: ignore[misc]
        """Ours, as one of its own."""

    return Model(engine, tokenizer, length, ends)


def _until(options: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """Stop words and the most tokens of an answer, as a task has them. Raises ``UserError`` if answers are drawn."""
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    more = {name: value for name, value in options.items() if name not in (*names, "until")}
    is_greedy = not more.pop("do_sample", False) and float(more.pop("temperature", 0.0) or 0.0) == 0.0
    more = {name: value for name, value in more.items() if is_greedy and name not in ("top_p", "top_k")}
    if more or not is_greedy:
        listed = ", ".join(f"{name}: {value}" for name, value in options.items())
        raise user_error(f"a task whose answers are drawn ({listed})"[:200], "greedy answers", where="--tasks")
    room = next((int(options[name]) for name in names if options.get(name) is not None), MOST_ANSWER)
    until = options.get("until") or []
    return tuple([until] if isinstance(until, str) else until), room
