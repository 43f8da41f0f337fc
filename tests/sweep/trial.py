"""One family trained for two steps, against plain transformers on one document at a time."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from sweep.families import NoText, NotMade, write_tiny
from tiny import write_rows
from tonnage.data import pack_at
from tonnage.decide.decision import Decision, decide
from tonnage.decide.exports import export_run
from tonnage.decide.written import write_run
from tonnage.errors import TonnageError
from tonnage.launch.local import reserved_port
from tonnage.model.anatomy import undecayed
from tonnage.model.stored import read_headers
from tonnage.parallel.world import join_world
from tonnage.rundir.directory import RunDirectory, complete_checkpoints
from tonnage.rundir.positions import PositionFile
from tonnage.training.assemble import assemble
from tonnage.training.loop import BetweenSteps, train
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.setting import WorkerSetting

STEPS, PACKS, FEWEST_DOCUMENTS = 2, 4, 5
LR, CLIP = 1e-3, 0.5
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
BAD = ("different", "traceback")
LEAK = 1e-4
"""By how much of itself the loss must differ where documents of a pack see each other, at least."""


@dataclass(frozen=True)
class Outcome:
    """What became of a family."""

    name: str
    kind: str
    """``packed``, ``padded``, ``refused``, ``no text model``, ``not tried``, ``too slow``, ``different`` or
    ``traceback``."""
    note: str = ""
    loss: float = 0.0
    """Largest difference of a step's loss from plain transformers', relative."""
    norm: float = 0.0
    leak: float = 0.0
    """Difference of the loss where documents of a pack are one, relative."""


def attempt(name: str, folder: Path, *, layouts: bool = False) -> Outcome:
    """Train a family in ``folder``, with ``layouts`` in several ways; whatever happens is the outcome."""
    try:
        return _attempt_layouts(name, folder) if layouts else _attempt(name, folder)
    except TonnageError as error:
        return Outcome(name, "refused", str(error).split("\n")[0].replace(f"{folder}/model/", ""))
    except NotMade as error:
        return Outcome(name, "not tried", f"no tiny model of the default configuration ({error})".replace("\n", " "))
    except NoText as error:
        return Outcome(name, "no text model", str(error))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {str(error).strip()[:300]} ({Path(where.filename).name}:{where.lineno})"
        return Outcome(name, "traceback", told)


LAYOUTS: dict[str, list[str]] = {
    "two workers": ["launch.workers=2", "memory.zero=3"],
    "recompute": ["memory.recompute=full"],
    "on disk": ["memory.optimizer_tier=disk", "memory.optimizer_resident=0"],
    "all on disk": ["memory.optimizer_tier=disk", "memory.gradient_tier=disk", "memory.parameter_tier=disk"],
}


def _attempt_layouts(name: str, folder: Path) -> Outcome:
    """Losses and norms under each of ``LAYOUTS``, of a run that stopped and went on, and the tensors of its export."""
    write_tiny(name, folder / "model")
    write_rows(folder / "rows.jsonl", _rows(200))
    path = folder / "config.yaml"
    path.write_text(json.dumps(_config(folder)))
    asking = multiprocessing.get_context("fork").Process(target=decide, args=(str(path), []))
    asking.start()  # it runs loops, and a process that did cannot be forked
    asking.join()
    loss = norm = 0.0
    plain: list[tuple[float, float]] = []
    for number, (layout, overrides) in enumerate(LAYOUTS.items()):
        run = RunDirectory(folder / f"run{number}")
        decision = decide(str(path), [f"output={run.path}", *overrides])
        write_run(run, decision)
        _train(decision, run, stops=True)
        _train(decision, run)
        plain = plain or _plain(decision)[0]
        ours = [record for record in map(json.loads, run.metrics.read_text().splitlines()) if "loss" in record]
        assert [one["step"] for one in ours] == list(range(1, STEPS + 1)), (
            f"{layout}: steps {[one['step'] for one in ours]}"
        )
        loss = max(loss, *(abs(one["loss"] - want[0]) / want[0] for one, want in zip(ours, plain, strict=True)))
        norm = max(norm, *(abs(one["grad_norm"] - want[1]) / want[1] for one, want in zip(ours, plain, strict=True)))
        if not (loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE):
            return Outcome(name, "different", layout, loss, norm)
    export_run(run)
    before, after = (_stored(where) for where in (folder / "model", run.export))
    if before != after:
        others = sorted(set(before.items()) ^ set(after.items()))
        return Outcome(name, "different", f"tensors of the export: {others[:4]}", loss, norm)
    AutoModelForCausalLM.from_pretrained(run.export)
    return Outcome(name, decision.plan.layout.arrangement, "", loss, norm)


def _stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor by its key."""
    return {one.key: (one.dtype, one.shape) for one in read_headers(sorted(directory.glob("*.safetensors")))}


def _attempt(name: str, folder: Path) -> Outcome:
    write_tiny(name, folder / "model")
    write_rows(folder / "rows.jsonl", _rows(200))
    path = folder / "config.yaml"
    path.write_text(json.dumps(_config(folder)))
    decision = decide(str(path), [])
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    _train(decision, run)
    ours = [record for record in map(json.loads, run.metrics.read_text().splitlines()) if "loss" in record]
    plain, leak = _plain(decision)
    assert len(ours) == STEPS
    loss = max(abs(one["loss"] - want[0]) / want[0] for one, want in zip(ours, plain, strict=True))
    norm = max(abs(one["grad_norm"] - want[1]) / want[1] for one, want in zip(ours, plain, strict=True))
    layout = decision.plan.layout
    kind: str = layout.arrangement
    note = decision.plan.reasons.get("rows", "")
    if not (loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE):
        kind = "different"
    elif not leak >= LEAK:
        kind, note = "different", "shows nothing: documents that see each other have the same loss"
    return Outcome(name, kind, note, loss, norm, leak)


def _rows(number: int) -> list[dict[str, str]]:
    """Short ones of varied length."""
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdefgh ", k=chance.randint(2, 14))) for _ in range(number)]
    return [{"prompt": text, "completion": text.upper()} for text in texts]


def _config(folder: Path) -> dict[str, object]:
    return {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 250,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": PACKS},
        "steps": STEPS,
        "optimizer": {"lr": LR, "weight_decay": 0.1, "clip": CLIP, "warmup": 0, "schedule": "constant"},
        "precision": "fp32",
        "memory": {"micro_batch": 2, "recompute": "none"},
        "launch": {"workers": 1, "threads": 1},
        "track": [],
        "output": str(folder / "run"),
        "seed": 1,
    }


def _train(decision: Decision, run: RunDirectory, *, stops: bool = False) -> None:
    """On as many processes as the plan has workers; ``stops`` after a step, to go on when it is called again."""
    size = decision.plan.workers
    if size == 1:
        _work(decision, run, stops)
        return
    with reserved_port() as port:
        os.environ.update(WORLD_SIZE=str(size), MASTER_PORT=str(port))
        context = multiprocessing.get_context("fork")
        others = [context.Process(target=_work_as, args=(rank, decision, run, stops)) for rank in range(size)]
        for one in others:
            one.start()
        for one in others:
            one.join()
        del os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]
        assert not any(one.exitcode for one in others), "a worker failed"


def _work_as(rank: int, decision: Decision, run: RunDirectory, stops: bool) -> None:
    os.environ["RANK"] = str(rank)
    _work(decision, run, stops)


def _work(decision: Decision, run: RunDirectory, stops: bool) -> None:
    asked = iter([False] * stops)
    with join_world() as world:
        checkpoint = next(reversed(complete_checkpoints(run.checkpoints)), None)
        recorder = Recorder(run, rank=world.rank)
        phases = Phases(PositionFile(run.worker_position(world.rank)))
        job = assemble(WorkerSetting(decision.config, decision.plan, world, recorder.log, phases), checkpoint)
        train(job, BetweenSteps(0, 0, run.checkpoints, 1, False), recorder, phases, lambda: stops and next(asked, True))
        recorder.close()


def _plain(decision: Decision) -> tuple[list[tuple[float, float]], float]:
    """Loss and gradient norm of every step, each document by itself; and the difference of the first loss where the
    documents of a pack are one."""
    data, config = decision.prepared.train, decision.config
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32, attn_implementation="eager").eval()
    kept = undecayed(model)
    decays = [parameter for name, parameter in model.named_parameters() if name not in kept]
    others = [parameter for name, parameter in model.named_parameters() if name in kept]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found, leak = [], 0.0
    for step in range(STEPS):
        packs = [data.pack(pack_at(step * PACKS + at, data.num_packs, config.seed)) for at in range(PACKS)]
        assert all(len(pack.lengths) >= FEWEST_DOCUMENTS for pack in packs[:-1])
        whole = [(torch.from_numpy(one.input_ids).long(), torch.from_numpy(one.weights)) for one in packs]
        parts = [
            part
            for pack, (ids, weights) in zip(packs, whole, strict=True)
            for part in zip(ids.split(pack.lengths.tolist()), weights.split(pack.lengths.tolist()), strict=True)
        ]
        optimizer.zero_grad()
        loss = _loss(model, parts, backward=True)
        if step == 0:
            leak = abs(_loss(model, whole, backward=False) - loss) / loss
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        found.append((loss, norm))
    return found, leak


def _loss(model: torch.nn.Module, rows: Sequence[tuple[Tensor, Tensor]], *, backward: bool) -> float:
    """Mean over supervised tokens, each row by itself."""
    total = sum(float(weights.sum()) for _, weights in rows)
    loss = 0.0
    with torch.set_grad_enabled(backward):
        for ids, weights in rows:
            logits = model(ids.unsqueeze(0), use_cache=False).logits[0, :-1].float()
            of_row = (F.cross_entropy(logits, ids[1:], reduction="none") * weights[1:]).sum() / total
            if backward:
                of_row.backward()
            loss += float(of_row.detach())
    assert math.isfinite(loss)
    return loss
