"""What rests on disk, and whether the disks have room for it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tonnage.config import Config
from tonnage.errors import Problem, UserError
from tonnage.files.places import existing, free_bytes
from tonnage.host.cachedir import default_directory, trusted
from tonnage.host.moments import MOMENT_BYTES
from tonnage.planning.plan import Plan
from tonnage.planning.states import is_packed, packed_on_disk, resting_on_disk, without_second_moments
from tonnage.rundir.directory import RunDirectory

PACKED_VERSION = 1
"""Of the cache of packed bases: a change of what is in it is a new number."""


@dataclass(frozen=True)
class Need:
    """Bytes that will be taken in a directory, and for what."""

    directory: Path
    num_bytes: int
    what: str


def offload_directories(config: Config, rank: int) -> list[Path]:
    """Where a rank keeps what rests on disk: by default in the run's directory, else in its own part of those given."""
    if not config.memory.offload_dirs:
        return [RunDirectory(config.output).path / "offload" / f"rank-{rank}"]
    output = Path(config.output).absolute()
    run = f"{output.name}-{hashlib.blake2b(str(output).encode(), digest_size=4).hexdigest()}"
    return [Path(directory) / run / f"rank-{rank}" for directory in config.memory.offload_dirs]


def resting_bytes(plan: Plan) -> int:
    """Bytes of one worker on disk while it trains and saves, a packed base in the cache left out."""
    return resting_on_disk(plan.layout, plan.model, plan.states, caches=bool(plan.weights.base_digest))


def free_for_states(config: Config) -> int:
    """Bytes that workers of this machine can have on the disks where states rest, which they fill evenly."""
    disks = [existing(directory) for directory in offload_directories(config, 0)]
    numbers = [disk.stat().st_dev for disk in disks]
    free = map(free_bytes, disks)
    return min(num_bytes * len(disks) // numbers.count(disk) for num_bytes, disk in zip(free, numbers, strict=True))


def packs_into_cache(plan: Plan) -> bool:
    """Whether the packed weights of a frozen base rest in the cache, from where every run reads them."""
    return is_packed(plan.layout, plan.model) and bool(plan.weights.base_digest)


def packed_directory(config: Config, plan: Plan) -> Path | None:
    """Where in the cache the packed weights of a base are; None if they rest elsewhere. Every worker that streams them
    has rows of the same ones.

    Raises:
        UserError: others may have written the cache.
    """
    if isinstance(config.adapter, str) or not packs_into_cache(plan):
        return None
    told = (PACKED_VERSION, plan.weights.base_digest, plan.weights.base_stamp, config.adapter.quantize)
    return trusted(default_directory(), "packed", hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest())


def packed_base(config: Config, plan: Plan) -> tuple[int, int]:
    """Bytes of a packed base in the cache, and of what is not there yet of it; (0, 0) if it rests elsewhere."""
    if (place := packed_directory(config, plan)) is None:
        return 0, 0
    whole = packed_on_disk(plan.model)
    return whole, 0 if place.is_dir() else whole


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of one checkpoint: fp32 masters and both moments, or the one that matrices have which Muon updates."""
    both = plan.model.trained_parameters * (4 + MOMENT_BYTES[plan.layout.moments])
    return int(both - without_second_moments(plan.layout, plan.model, shards=1))


def check_space(config: Config, plan: Plan, checkpoints_there: int = 0, *, workers: int | None = None) -> None:
    """Refuse a disk that would be full after some saves, rather than then. ``workers`` are those of this machine.

    While one checkpoint is written, ``checkpoint.keep`` older ones are there; then comes the export.

    Raises:
        UserError: says for every disk that is too small what is free, what is needed and for what.
    """
    every, keep = config.checkpoint.steps_between, config.checkpoint.keep
    saves = 1 if every == 0 else 1 + plan.num_steps // every
    most = max(1, min(saves, keep + 1) - checkpoints_there)
    if problems := _too_small(_needs(config, plan, most, workers or plan.workers)):
        raise UserError(*problems)


def no_room_for_saves(config: Config, plan: Plan, workers: int) -> str:
    """Why a run that would be saved before its end is not: where the disk has room for a checkpoint, but not for as
    many as are there at a time. Empty if it has, or has room for none. ``workers`` are those of this machine."""
    every, keep = plan.choice.saving.every, config.checkpoint.keep
    most = min(1 + plan.num_steps // every, keep + 1) if every else 1
    if most == 1 or not _too_small(_needs(config, plan, most, workers)) or _too_small(_needs(config, plan, 1, workers)):
        return ""
    one, room_for_two = checkpoint_bytes(plan) / 1e9, not _too_small(_needs(config, plan, 2, workers))
    change = "make room, or set checkpoint.keep=1" if room_for_two and keep > 1 else "make room"
    return f"at its end alone: the disk has no room for {most} checkpoints of {one:.2f} GB each; {change}"


def _needs(config: Config, plan: Plan, most: int, workers: int) -> list[Need]:
    """What ``workers`` of one machine take, and ``most`` checkpoints of the whole run."""
    num_bytes, keep = checkpoint_bytes(plan), config.checkpoint.keep
    needs = [
        Need(
            Path(config.output),
            num_bytes * most,
            f"{most} more checkpoint(s) of {num_bytes / 1e9:.2f} GB (checkpoint.keep {keep})",
        )
    ]
    adapter = config.adapter
    if not isinstance(adapter, str) and adapter.init != "zero":
        start = 4 * plan.model.trained_parameters * (2 if adapter.init == "loftq" and adapter.rounds > 1 else 1)
        needs.append(Need(Path(config.output), start, f"{start / 1e9:.2f} GB for where additions began"))
    for rank in range(workers):
        directories = offload_directories(config, rank)
        each = resting_bytes(plan) // len(directories)
        if each:
            reason = f"{each / 1e9:.2f} GB that rest in {len(directories) * workers} place(s) (memory.*_tier: disk)"
            needs += [Need(directory, each, reason) for directory in directories]
    if coming := packed_base(config, plan)[1]:
        needs.append(Need(default_directory(), coming, f"{coming / 1e9:.2f} GB for the packed base (TONNAGE_CACHE)"))
    return needs


def _too_small(needs: list[Need]) -> list[Problem]:
    by_disk: dict[int, list[Need]] = {}
    for need in needs:
        by_disk.setdefault(existing(need.directory).stat().st_dev, []).append(need)
    problems = []
    for on_disk in by_disk.values():
        free, needed = free_bytes(on_disk[0].directory), sum(need.num_bytes for need in on_disk)
        if free < needed:
            problems.append(
                Problem(
                    where=", ".join(dict.fromkeys(str(existing(need.directory)) for need in on_disk)),
                    found=f"{free / 1e9:.2f} GB free",
                    needed=f"{needed / 1e9:.2f} GB: " + ", ".join(dict.fromkeys(need.what for need in on_disk)),
                    change="make room, lower checkpoint.keep, write output=... on another disk"
                    + (", or set memory.offload_dirs to other disks" if len(on_disk) > 1 else ""),
                )
            )
    return problems
