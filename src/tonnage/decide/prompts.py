"""What the model is asked at every evaluation: rows of a file, or the first validation rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from tonnage.config import Config, Source
from tonnage.data import Prepared, encode_prompt
from tonnage.data.building.mates import LABEL
from tonnage.data.pictures import counted, image_token_of
from tonnage.errors import Problem, UserError, user_error
from tonnage.rundir.samples import Prompt, Prompts

MOST_PROMPTS = 200


def prompts_of(config: Config, prepared: Prepared) -> Prompts | None:
    """The prompts of a run; None where it has none.

    Raises:
        UserError: rows that cannot be asked, too many of them, or longer than a pack.
    """
    wishes = config.evaluate.prompts
    if not wishes:
        return None
    prompts = list(
        _of_file(wishes, config, prepared) if isinstance(wishes, str) else _of_rows(wishes, config, prepared)
    )
    if not prompts:
        raise user_error(
            "no validation row has anything before its answer",
            "rows with questions, or a file of them",
            "evaluate.prompts=FILE",
            "evaluate.prompts",
        )
    return Prompts(list(prepared.stop_tokens), prompts)


def questions_of(config: Config, prepared: Prepared) -> Prompts | None:
    """The validation rows that are answered and scored at every evaluation; None where none are.

    Raises:
        UserError: a scorer that cannot be imported, rows that hold nothing to score by, or none that can be asked.
    """
    from tonnage.training.scorers import check_expected, scorer_of

    evaluate = config.evaluate
    if evaluate.scorer == "none":
        return None
    scorer_of(evaluate.scorer, evaluate.pattern)
    prompts = list(_of_rows(evaluate.answers, config, prepared))
    if not prompts:
        change = "evaluate.scorer=none"
        raise user_error("no validation row has anything before its answer", "rows with questions", change)
    rows = [(f"question {number}", prompt.expected or "") for number, prompt in enumerate(prompts, start=1)]
    check_expected(evaluate.scorer, evaluate.pattern, rows)
    return Prompts(list(prepared.stop_tokens), prompts)


def _of_file(path: str, config: Config, prepared: Prepared) -> Iterator[Prompt]:
    from tonnage.inference.questions import read_questions

    questions = read_questions([Source(path=path)], MOST_PROMPTS + 1, images=prepared.recipe.images is not None)
    if len(questions) > MOST_PROMPTS:
        raise user_error(
            f"more than {MOST_PROMPTS} rows",
            f"at most {MOST_PROMPTS}: all are asked at every evaluation",
            where=path,
        )
    most, tokenizer, problems = config.data.max_length, prepared.tokenizer, []
    for number, question in enumerate(questions, start=1):
        if question.conversation.images:
            needed = "rows of text: the tower looks at the images of the data's rows alone"
            change = "ask validation rows: evaluate.prompts=4"
            problems.append(Problem(f"row {number} has images", needed, change, path))
            continue
        ids = encode_prompt(question.conversation, tokenizer)
        if len(ids) >= most:
            problems.append(
                Problem(
                    f"row {number} has {len(ids):,} tokens before its answer",
                    f"fewer than {most:,}, which is data.max_length",
                    "shorten it, or raise data.max_length",
                    path,
                )
            )
            continue
        room = min(config.evaluate.max_new_tokens, most - len(ids))
        yield Prompt(str(tokenizer.decode(ids, skip_special_tokens=False)), ids, room, question.answer)
    if problems:
        raise UserError(*problems[:10])


def _of_rows(number: int, config: Config, prepared: Prepared) -> Iterator[Prompt]:
    """The first validation rows: what stands before the last supervised part, and that part. An undesirable answer is
    nothing to expect, so its row is passed over."""
    dataset, tokenizer, image = prepared.validation, prepared.tokenizer, image_token_of(prepared)
    assert dataset is not None, "config.check sees to it"
    for index in range(dataset.num_packs):
        pack, at = dataset.pack(index), 0
        seconds = repeat(0) if pack.forks is None else pack.forks[:, 1].tolist()
        labels = pack.carried[LABEL].tolist() if LABEL in pack.carried else repeat(1.0)
        rows = zip(pack.documents.tolist(), pack.starts.tolist(), pack.lengths.tolist(), seconds, labels, strict=False)
        for document, start, whole, second, label in rows:
            length = second or whole  # of a pair the preferred answer
            ids, weights = pack.input_ids[at : at + length].tolist(), pack.weights[at : at + length].tolist()
            at += whole
            end = next((place for place in range(length, 0, -1) if weights[place - 1] > 0), 0)
            begin = next((place for place in range(end, 0, -1) if weights[place - 1] <= 0), 0)
            if not label or start or begin <= 1 or begin == end:  # the first token of a row never counts
                continue
            text = str(tokenizer.decode(ids[:begin], skip_special_tokens=False))
            yield Prompt(
                text=text if image is None else counted(text, tokenizer, image),
                ids=ids[:begin],
                room=min(config.evaluate.max_new_tokens, config.data.max_length - begin),
                expected=str(tokenizer.decode(ids[begin:end], skip_special_tokens=True)),
                document=document if image in ids[:begin] else None,
            )
            number -= 1
            if not number:
                return
