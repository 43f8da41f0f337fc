"""Go on from a checkpoint: choose it, check it, read it back onto any number of ranks.

A checkpoint knows nothing of the ranks that wrote it, only where each part lies in its tensor (``shards``), so a rank
reads the regions that it holds now. The fp32 master of a weight is stored in one of two forms, which hold the same 32
bits: as fp32, or as bf16 with the low half beside it (``kernels.adamw``). A run on one worker in bf16 uses the second,
all others the first; ``restore`` turns one into the other, exactly. Moments that rest in another form
(``kernels.moments``) are decoded to fp32 and encoded again, and it says so.

Nothing here starts over: a checkpoint that cannot be used is an error that names the file, and an earlier one is used
only when the user says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tonnage.checkpoint.save import FORMAT, STATE, complete_checkpoints, interrupted_saves, read_state, step_of
from tonnage.checkpoint.shards import Shards
from tonnage.checkpoint.verify import check_checkpoint, check_hash, listed_files
from tonnage.errors import Problem, UserError, user_error
from tonnage.kernels.adamw import join, split
from tonnage.kernels.moments import Moments, blocks_in, decode, encode, moments_of, noise_key, row_length
from tonnage.kernels.regions import region_of
from tonnage.parallel.world import World

TELL_SECONDS = 5.0
"""After which ranks that read files tell those that wait for them."""


def choose(checkpoints: Path, step: int | None = None) -> Path:
    """The newest complete checkpoint, or that of ``step``, checked as far as that is possible without reading it all.

    Raises:
        UserError: there is none, or it is damaged; the earlier ones are named.
    """
    complete = complete_checkpoints(checkpoints)
    if not complete:
        interrupted = ", ".join(path.name for path in interrupted_saves(checkpoints))
        raise user_error(
            found="no complete checkpoint" + (f" (interrupted: {interrupted})" if interrupted else ""),
            needed="a run that has saved at least once",
            change="start it again in a new directory; checkpoint.every says how often a run saves",
            where=str(checkpoints),
        )
    chosen = complete[-1]
    if step is not None:
        fitting = [path for path in complete if step_of(path) == step]
        if not fitting:
            raise user_error(
                found=f"no complete checkpoint of step {step}",
                needed=f"one of {', '.join(str(step_of(path)) for path in complete)}",
                where="--from",
            )
        (chosen,) = fitting
    if problems := check_checkpoint(chosen):
        raise damaged(chosen, *problems)
    state = read_state(chosen)
    if state["format"] != FORMAT:
        raise user_error(
            found=f"a checkpoint of format {state['format']}",
            needed=f"format {FORMAT}",
            change="go on with the version of tonnage that wrote it",
            where=str(chosen / STATE),
        )
    if state["step"] != step_of(chosen):
        observed = f"the state of step {state['step']:,} in the checkpoint of step {step_of(chosen):,}"
        raise damaged(chosen, Problem(observed, f"step {step_of(chosen):,}", where=str(chosen / STATE)))
    return chosen


def damaged(checkpoint: Path, *problems: Problem) -> UserError:
    """The error of a checkpoint that must not be used, with what to do instead."""
    earlier = [path for path in complete_checkpoints(checkpoint.parent) if step_of(path) < step_of(checkpoint)]
    change = "restore the file from a copy"
    if earlier:
        change += f", or go on from an earlier checkpoint: --from {step_of(earlier[-1])}"
    return UserError(
        *(
            Problem(f"a damaged checkpoint: {problem.found}", problem.needed, change, problem.where)
            for problem in problems
        )
    )


def set_aside(checkpoints: Path, step: int) -> list[Path]:
    """Rename the checkpoints after ``step``, which a run that goes on from there will write again; their new paths."""
    moved = []
    for path in complete_checkpoints(checkpoints):
        if step_of(path) > step:
            number = 1
            while (target := checkpoints / f"aside-{number}-{path.name}").exists():
                number += 1
            moved.append(path.rename(target))
    return moved


def check_content(checkpoint: Path, world: World, progress: Callable[[], None] = lambda: None) -> None:
    """Compare the hash of every file, each on one of the ranks; ``progress`` is called on all as long as one reads.
    Raises ``UserError`` on the rank that finds a fault."""
    latest = time.monotonic()

    def advanced(_: int) -> None:
        nonlocal latest
        progress()
        if time.monotonic() > latest + TELL_SECONDS:
            world.sum(1.0)
            latest = time.monotonic()

    for file in listed_files(checkpoint)[world.rank :: world.size]:
        if (problem := check_hash(file, advanced)) is not None:
            raise damaged(checkpoint, problem)
    while world.sum(0.0)[0]:  # nobody goes on with what another found to be damaged, or is still reading
        progress()


def restore(
    checkpoint: Path,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    world: World,
    log: Callable[[str], None] = lambda message: None,
    elsewhere: Collection[str] = (),
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Fill parameters and optimizer state (as given to ``Saver.save``) from a checkpoint; every rank calls this.

    Every byte of the checkpoint is compared with its hash first, by one rank each. A rank reads no more than its own
    regions. ``elsewhere`` are parameters that other stages of a pipeline restore; ``progress`` is called while it
    reads. Returns what the checkpoint holds besides tensors.

    Raises:
        UserError: a file has changed since it was written, or the checkpoint is of another model.
    """
    check_content(checkpoint, world, progress)
    shards = Shards(checkpoint)
    _check_fit(shards, checkpoint, model, optimizer, elsewhere)
    notes = Counter[str]()

    def read(target: Tensor, name: str, kind: str) -> None:
        memory, region = region_of(target)
        shards.read_into(memory, name, region)
        if shards.dtype(name) != memory.dtype:
            notes[f"{kind}: {_name(shards.dtype(name))} as {_name(memory.dtype)}"] += 1

    for name, parameter in model.items():
        progress()
        low, stored, stored_low = optimizer.get(f"{name}.low"), f"model.{name}", f"optimizer.{name}.low"
        is_split, stored_type = low is not None, _name(shards.dtype(stored))
        if is_split == (stored_low in shards) and (not is_split or shards.dtype(stored) == parameter.dtype):
            read(parameter, stored, "weights")
            if low is not None:
                read(low, stored_low, "low halves")
            continue
        memory, region = region_of(parameter)
        master = shards.read(stored, region)
        if stored_low in shards:
            master = join(master, shards.read(stored_low, region))
            note = f"masters: {stored_type} weight and low half joined to fp32, bit for bit"
        if low is None:
            memory.copy_(master)
        else:
            high, rest = split(master.float(), memory.dtype)
            memory.copy_(high)
            region_of(low)[0].copy_(rest)
            note = f"masters: fp32 split into {_name(memory.dtype)} weight and low half, bit for bit"
        notes[note] += 1
    for name, parameter in model.items():
        progress()
        if f"{name}.m" in optimizer and (converted := _restore_moments(shards, name, parameter, optimizer)):
            notes[converted] += 1
    for note, count in notes.items():
        log(f"converted {count} tensors of {checkpoint.name}, {note}")
    return read_state(checkpoint)


def _restore_moments(shards: Shards, name: str, parameter: Tensor, optimizer: Mapping[str, Tensor]) -> str:
    """Read the moments of a parameter, and convert them if they are stored in another form. Returns a note on the
    conversion, or an empty text."""
    local, region = region_of(parameter)
    row, local_row = row_length(parameter.shape), row_length(local.shape)
    own = {part: region_of(optimizer[f"{name}.{part}"]) for part in PARTS if f"{name}.{part}" in optimizer}
    tensors = {part: tensor for part, (tensor, _) in own.items()}
    stored = {part: f"optimizer.{name}.{part}" for part in PARTS if f"optimizer.{name}.{part}" in shards}
    if {part: tensor.dtype for part, tensor in tensors.items()} == {p: shards.dtype(key) for p, key in stored.items()}:
        for part, (tensor, held) in own.items():
            shards.read_into(tensor, stored[part], held)
        return ""
    # Blocks that share a scale may be cut where a rank's part is in another form, so all of their rows is read.
    rows = (*region[:1], *(slice(0, size) for size in parameter.shape[1:]))
    cut = rows if "m_scale" in stored else region
    regions = {part: (region[0], slice(0, blocks_in(row))) if part.endswith("scale") else cut for part in stored}
    if local.numel():
        read = {part: shards.read(key, regions[part]).to(local.device) for part, key in stored.items()}
        shape = [side.stop - side.start for side in cut]
        columns = (slice(None), *region[1:]) if cut is not region else (slice(None),) * len(shape)
        before, moments = moments_of(read, row), moments_of(tensors, local_row)
        decoded = decode(before) if isinstance(before, Moments) else (before.decoded(),)
        m, *second = (moment.view(shape)[columns].reshape(-1) for moment in decoded)
        # The random bits of rounding to bf16: by the place in the whole parameter, so that they depend on no layout.
        key, first = noise_key(0, 0, name), region[0].start * local_row if region else 0
        signed = ((value + 2**31) % 2**32 - 2**31 for value in (key, first))  # of their 32 low bits
        number = (torch.tensor(value, dtype=torch.int32, device=local.device) for value in signed)
        if isinstance(moments, Moments):
            encode(moments, m, second[0], second[0].sqrt(), *number)
        else:
            moments.encode(m, *number)
    return f"moments: {_name(shards.dtype(stored['m']))} as {_name(tensors['m'].dtype)}, rounded where it must be"


PARTS = ("m", "v", "m_scale", "v_scale")


def _check_fit(
    shards: Shards,
    checkpoint: Path,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    elsewhere: Collection[str],
) -> None:
    """Names and shapes must be those of this model; what depends on a form (low halves, scales) may be there or not."""
    of_a_form = (".low", ".m_scale", ".v_scale")
    needed = {f"model.{name}": tensor for name, tensor in model.items()}
    needed |= {f"optimizer.{name}": tensor for name, tensor in optimizer.items() if not name.endswith(of_a_form)}
    others = {name for one in elsewhere for name in (f"model.{one}", f"optimizer.{one}.m", f"optimizer.{one}.v")}
    all_names = shards.names()
    stored = {name for name in all_names if name.startswith("model.") or not name.endswith(of_a_form)} - others
    problems = []
    for names, relation in ((sorted(needed.keys() - stored), "lacks"), (sorted(stored - needed.keys()), "also holds")):
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            problems.append(Problem(f"a checkpoint that {relation} {listed}", "the tensors of this model"))
    problems += [
        Problem(f"{name} of shape {shards.shape(name)}", f"{tuple(tensor.shape)}, as the model has it")
        for name, tensor in needed.items()
        if name in stored and shards.shape(name) != tuple(tensor.shape)
    ]
    if problems:
        change = "go on with the model and the settings that the run was started with"
        raise UserError(*(Problem(p.found, p.needed, change, str(checkpoint)) for p in problems))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
