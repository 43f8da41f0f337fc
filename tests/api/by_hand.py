"""Sessions beside runs of the same rows, in a process of their own. Prints a JSON object for ``test_session``."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tonnage
from tonnage.decide.models import use_model
from tonnage.kernels.switches import is_on

SETTINGS: dict[str, dict[str, Any]] = {
    "packed": {"precision": "fp32"},
    "bf16": {"memory": {"micro_batch": 2}},
    "adapter": {"adapter": {"rank": 4, "dropout": 0.1}, "memory": {"micro_batch": 1, "recompute": "full"}},
    "disk": {"memory": {"micro_batch": 2, "optimizer_tier": "disk", "parameter_tier": "disk", "gradient_tier": "disk"}},
    "padded": {"precision": "fp32"},
    "aware": {"quantize_aware": {"scheme": "int8", "after_steps": 2}},
}
COMMON: dict[str, Any] = {"batch": {"sequences": 4}, "steps": 5, "launch": {"threads": 1}, "compile": "off"}


def main(told: list[str]) -> None:
    os.chdir(told[0])
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    data = {"train": rows, "validation": 0.2, "max_length": 128, "template": "plain"}
    told_of = {name: beside_a_run(name, data, SETTINGS[name] | COMMON) for name in told[1:]}
    print(json.dumps({"runs": told_of, **by_itself(rows, data)}))


def beside_a_run(name: str, data: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of a run and of a session, and whether they came to the same weights."""
    model = "padded" if name == "padded" else "model"
    run = tonnage.train(model, data, output=f"{name}-run", **keys)
    with tonnage.Session(model, data, output=f"{name}-session", **keys) as session:
        for batch in session.batches():
            session.forward_backward(batch)
            session.update()
        evaluated = session.evaluate()
        weights = load(session.save())
        steps = session.run.steps
        (greedy,) = session.sample([QUESTION], max_new_tokens=8, temperature=0)
    expected = load(run.export)
    return {
        "run": [[step.loss, step.grad_norm, step.lr] for step in run.steps],
        "session": [[step.loss, step.grad_norm, step.lr] for step in steps],
        "evaluations": [run.evaluations[-1]["eval_loss"], evaluated],
        "same": all(torch.equal(weights[key], value) for key, value in expected.items()),
        "arrangement": session.plan.layout.arrangement,
        "greedy": [list(greedy.tokens), answered(Path(f"{name}-session/export"), greedy.prompt_tokens)],
    }


QUESTION = "Say in capitals."


def load(export: Path) -> dict[str, Tensor]:
    return {name: one for file in export.glob("*.safetensors") for name, one in load_file(file).items()}


def answered(export: Path, prompt: tuple[int, ...]) -> list[int]:
    """What transformers says of an exported model, likeliest token by token, without a cache."""
    if (export / "adapter_config.json").exists():
        from peft import PeftModel

        base = json.loads((export / "adapter_config.json").read_text())["base_model_name_or_path"]
        model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), export)
    else:
        model = AutoModelForCausalLM.from_pretrained(export)
    ends = {AutoTokenizer.from_pretrained(export).eos_token_id}
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + 8 and tokens[-1] not in ends:
            tokens.append(int(model.eval()(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def by_itself(rows: list[dict[str, Any]], data: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, str] = {}
    found: dict[str, Any] = {"said": said}

    def refused(name: str, call: Any, *given: Any, **named: Any) -> None:
        try:
            call(*given, **named)
        except tonnage.UserError as error:
            said[name] = str(error)

    before, variables = torch.get_num_threads(), dict(os.environ)
    keys: dict[str, Any] = {**COMMON, "precision": "fp32"}
    scored = [{**row, "score": number - 3.0} for number, row in enumerate(rows)]

    def whole(session: Any) -> list[float]:
        losses = [session.forward_backward(session.batch(rows[:30])), session.update(1e-2).grad_norm]
        return [*losses, session.evaluate(rows[:10])]

    def in_parts(session: Any) -> list[float]:
        parts = [session.batch(rows[start:stop]) for start, stop in ((0, 3), (3, 20), (20, 30))]
        losses = [session.forward_backward(part) * part.weight for part in parts]
        step = session.update(1e-2)
        found["step"] = [step.step, step.supervised_tokens, sum(part.supervised_tokens for part in parts)]
        assert math.isclose(step.loss, sum(losses) / sum(part.weight for part in parts), rel_tol=1e-6)
        return [step.loss, step.grad_norm, session.evaluate(rows[:10])]

    def weighted(logprobs: Tensor, weights: Tensor) -> Tensor:
        return -(logprobs * weights).sum()

    def of_ones_own(session: Any) -> list[float]:
        losses = [session.forward_backward(session.batch(rows[:30]), loss=weighted), session.update(1e-2).grad_norm]
        return [*losses, session.evaluate(rows[:10], loss=weighted)]

    for name, steps in (("whole", whole), ("parts", in_parts), ("own", of_ones_own)):
        with tonnage.Session("model", data, output=name, **keys) as session:
            found[name] = steps(session)
    calls: list[bool] = []

    def breaking(logprobs: Tensor, weights: Tensor) -> Tensor:
        """In the second micro-batch, once ``calls`` begin with True."""
        calls.append(False)
        if calls[0] and len(calls) > 2:
            raise ZeroDivisionError
        return weighted(logprobs, weights)

    with tonnage.Session("model", data, output="broken", **{**keys, "memory": {"micro_batch": 1}}) as session:
        session.evaluate(rows[:3], loss=breaking)
        calls[:] = [True]
        with suppress(ZeroDivisionError):
            session.forward_backward(session.batch(rows[:30]), loss=breaking)
        found["broken"] = [len(calls), *whole(session)]
    seen: list[bool] = []

    def asking(logprobs: Tensor, weights: Tensor) -> Tensor:
        """Is called where all else is computed."""
        seen.append(is_on("norms"))
        return weighted(logprobs, weights)

    with tonnage.Session("model", data, output="without-norms", **keys, kernels={"norms": "off"}) as session:
        use_model("model")
        found["on_between"] = is_on("norms")
        session.forward_backward(session.batch(rows[:3]), loss=asking)
        session.evaluate(rows[:3], loss=asking)
        found["seen_on"] = any(seen)
    found["as_before"] = [torch.get_num_threads() == before, dict(os.environ) == variables]

    section = {**data, "train": scored, "carry": "score"}
    with tonnage.Session("model", section, output="alone", **{**keys, "optimizer": {"skips": 1}}) as session:
        refused("second", tonnage.Session, "model", data, output="second", **keys)
        refused("nothing", session.update)
        refused("long", session.batch, [scored[0], {**scored[1], "output": "x" * 200}])
        refused("row", session.batch, [scored[0], {"instruction": "a", "output": "b"}])
        refused("form", session.batch, [{"a": 1}])
        refused("text", session.sample, QUESTION)
        batch = session.batch(scored[:8])
        found["batch"] = [batch.tokens > batch.supervised_tokens > 0, repr(batch).startswith("Batch(tokens=")]
        refused("mean", session.forward_backward, batch, loss=lambda logprobs, weights: -logprobs.mean())
        refused("nan", session.forward_backward, batch, loss=lambda p, w, score: (p * torch.log(score)).sum())
        refused("column", session.forward_backward, batch, loss=lambda p, w, reward: p.sum())
        factors = [1.0]

        def turning(logprobs: Tensor, weights: Tensor, score: Tensor) -> Tensor:
            return (logprobs * score * factors[-1]).sum()

        session.forward_backward(batch, loss=turning)
        found["turned"] = session.update(0.0).skipped
        factors.append(math.inf)
        session.forward_backward(batch, loss=turning)
        skipped = session.update()
        found["skipped"] = [skipped.skipped, skipped.record["not_finite"]]
        session.forward_backward(batch, loss=lambda p, w, score: -(p * score).sum())
        found["good"] = not session.update(1e-3).skipped
        torch.manual_seed(7)
        drawn = session.sample([QUESTION, "Say.", QUESTION, QUESTION], max_new_tokens=6)
        state = torch.rand(1).item()
        torch.manual_seed(7)
        found["drawn"] = [torch.rand(1).item() == state, len({one.tokens for one in drawn}) > 1]
        row = drawn[1].row(score=2.0)
        found["trains"] = session.batch([row]).supervised_tokens == len(drawn[1].tokens)
        session.save()
        session.save()
    refused("resume", tonnage.open_run("alone").resume)
    refused("stop", tonnage.open_run("alone").stop)
    refused("workers", tonnage.Session, "model", data, output="second", **{**keys, "launch": {"workers": 2}})
    narrow = {**keys, "precision": "bf16", "memory": {"micro_batch": 4}}
    with tonnage.Session("model", data, output="narrow", **narrow) as session:
        refused("more", session.forward_backward, session.batch(rows))
    with tonnage.Session("model", section, output="drawn", **keys) as session:
        first = [one.tokens for one in session.sample([QUESTION] * 3, max_new_tokens=6)]
    with tonnage.Session("model", section, output="drawn-again", **keys) as session:
        found["repeats"] = first == [one.tokens for one in session.sample([QUESTION] * 3, max_new_tokens=6)]
    return found
