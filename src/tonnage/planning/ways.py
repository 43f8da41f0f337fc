"""The ways to train a model: all of its weights, additions to them (LoRA), and additions to weights in 4 bits.

``compare`` holds them beside each other. ``choose`` is what ``adapter: auto`` means: the first of them that fits on the
same terms as the others, giving up no more for memory than the config asks for: moments stay fp32, and nothing comes to
rest on disk. Each way is planned as any config is; how is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tonnage.config import Adapter, Config
from tonnage.config.rules import TIER_KEYS
from tonnage.config.schema import MOST_BYTES
from tonnage.errors import Problem, UserError
from tonnage.planning.plan import SAFETY, Plan
from tonnage.planning.refusal import LAST_RESORT, relaxations
from tonnage.planning.words import size

Planned = Callable[[Config, bool], Sequence[Plan]]
"""The plans of a config, one for every number of workers that it may have. With the second argument what does not fit
is planned, too: as small as it can be."""


@dataclass(frozen=True)
class Way:
    """What is trained."""

    name: str
    adapter: Adapter | None
    override: str = ""
    """For the command line."""

    def taken(self, config: Config) -> Config:
        """The config that trains in this way, with the learning rate that it implies where none was given."""
        if self.adapter is None:
            return config.model_copy(update={"adapter": "none"})
        return config.model_copy(update={"adapter": self.adapter, "optimizer": config.for_adapter()})


FULL = Way("full weights", None, "adapter=none")
LORA = Way("LoRA", Adapter(), f"adapter.rank={Adapter().rank}")
LORA_NF4 = Way("LoRA on 4 bits (nf4)", Adapter(quantize="nf4"), "adapter.quantize=nf4")
WAYS = (FULL, LORA, LORA_NF4)
"""Each takes less memory than the one before it."""


@dataclass(frozen=True)
class Compared:
    """A way, and what it would take: a plan, or why there is none."""

    way: Way
    plan: Plan | None
    why_not: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits


def compare(config: Config, planned: Planned) -> tuple[Compared, ...]:
    """Every way, each in its best layout, whether it fits or not."""
    return tuple(_compared(way, config, planned) for way in WAYS)


def _compared(way: Way, config: Config, planned: Planned) -> Compared:
    try:
        return Compared(way, planned(way.taken(config), True)[0])
    except UserError as error:
        return Compared(way, None, error.problems[0].found)


def without_sacrifices(config: Config, device: str) -> Config:
    """The config, with nothing open that gives up something for memory: moments are fp32 and, where states could come
    to rest on disk alone, which is on a CPU, they stay. What the config says is kept."""
    exact = {"moments": "fp32"} | (dict.fromkeys(TIER_KEYS, "device") if device == "cpu" else {})
    left_open = {key: value for key, value in exact.items() if getattr(config.memory, key) == "auto"}
    return config.with_keys("memory", left_open)


def _exact(config: Config, planned: Planned, device: str) -> Sequence[Plan]:
    """The plans of a config without sacrifices: beside a GPU, what they would let rest on disk is in host memory."""
    asked = without_sacrifices(config, device)
    plans = planned(asked, True)
    on_disk = [key for key in TIER_KEYS for plan in plans if getattr(plan.layout, key) == "disk"]
    if still_open := dict.fromkeys((key for key in on_disk if getattr(asked.memory, key) == "auto"), "host"):
        plans = planned(asked.with_keys("memory", still_open), True)
    return plans


def choose(config: Config, planned: Planned, device: str, *, force: bool = False) -> tuple[Config, str]:
    """What ``adapter: auto`` becomes on a ``device``: the config with it written out, and why.

    With ``force``, where no way fits, it is the one that takes least.

    Raises:
        UserError: no way fits; says what each takes and the smallest change with which one would.
    """
    tried: list[tuple[Way, Sequence[Plan]]] = []
    errors: list[UserError] = []
    chosen: Way | None = None
    for way in WAYS:
        try:
            plans = _exact(way.taken(config), planned, device)
        except UserError as error:
            errors.append(error)
            continue
        tried.append((way, plans))
        if chosen is None and all(plan.fits for plan in plans):
            chosen = way
    if not tried:
        raise errors[0]
    if chosen is None and force:
        chosen = tried[-1][0]
    if chosen is None:
        others = [problem for error in errors for problem in error.problems]
        raise UserError(_refusal(config, tried, planned, device), *others)
    return chosen.taken(config), _reason(config, chosen, tried, planned, device)


def _reason(
    config: Config, chosen: Way, tried: Sequence[tuple[Way, Sequence[Plan]]], planned: Planned, device: str
) -> str:
    """Why it is this way, what the others would cost in time, and the learning rate that comes with it."""
    short = [f"{way.name} ({_shortfall(plans)})" for way, plans in tried if not _fits(plans)]
    why = f"as there is no room for {' and '.join(short)}" if short else f"for which there is room {_terms(config)}"
    reason = f"auto: {chosen.name}, {why}"
    seconds: dict[str, float] = {}  # of a step; of what does not fit, as fast as it would be if it did, not as small
    for way, plans in tried:
        if not plans[0].fits:
            roomy = without_sacrifices(way.taken(config), device).with_keys("memory.budget", {"device": MOST_BYTES})
            plans = planned(roomy, True)
        seconds[way.name] = plans[0].choice.seconds.total
    others = [
        f"{seconds[way.name] / seconds[chosen.name]:.2f} times as long with {way.name}"
        + ("" if _fits(plans) else ", if it had room,")
        for way, plans in tried
        if way != chosen
    ]
    if others:
        reason += f"; a step would take {' and '.join(others).removesuffix(',')}"
    if chosen.adapter is not None and config.leaves_lr_open:
        lr = config.for_adapter().lr
        reason += f"; optimizer.lr is {lr:g}, {lr / config.optimizer.lr:.0f} times that of full weights"
    return reason


def _terms(config: Config) -> str:
    """On which a way is taken, in words."""
    memory = config.memory
    if memory.moments in ("auto", "fp32") and "disk" not in (getattr(memory, tier) for tier in TIER_KEYS):
        return "with fp32 moments and nothing on disk"
    return "and gives up no more for memory than the config asks for"


def _shortfall(plans: Sequence[Plan]) -> str:
    """What a way takes at least that does not fit."""
    plan = next(plan for plan in plans if not plan.fits)
    return plan.shortfall + (f" on {plan.workers} workers" if len(plans) > 1 else "")


def _refusal(config: Config, tried: Sequence[tuple[Way, Sequence[Plan]]], planned: Planned, device: str) -> Problem:
    """What each way takes at least, and the smallest change with which one of them would fit."""
    budget = tried[0][1][0].budget
    least = ", ".join(f"{way.name} ({_shortfall(plans)})" for way, plans in tried)
    return Problem(
        where="memory",
        found=f"no room for {least}: the least that the config allows {_terms(config)}",
        needed=f"room for one of them in {SAFETY:.0%} of {size(budget.memory)} ({budget.what}), as adapter is auto",
        change=smallest_change(config, [way for way, _ in tried], planned, device),
    )


def smallest_change(config: Config, ways: Sequence[Way], planned: Planned, device: str) -> str:
    """Words for the command line with which one of the ``ways`` would fit."""
    return next(_changes(config, ways, planned, device), LAST_RESORT)


def _changes(config: Config, ways: Sequence[Way], planned: Planned, device: str) -> Iterator[str]:
    """The smallest first: keys left to the planner, then what is given up for memory, then both."""
    relaxed = list(relaxations(config))
    for words, changed in relaxed:
        if any(_fits(planned(without_sacrifices(way.taken(changed), device), True)) for way in ways):
            yield words
    for words, changed in (("", config), *relaxed[-1:]):  # all of the keys that are said, where any is
        fitting = [plans for way in ways if _fits(plans := planned(way.taken(changed), True))]
        if fitting:
            given_up = min((_given_up(changed, plans) for plans in fitting), key=len)  # of as many, in the earliest way
            yield " ".join(
                [*(word for word in words.split() if word.partition("=")[0] not in given_up), *given_up.values()]
            )


def _fits(plans: Sequence[Plan]) -> bool:
    return all(plan.fits for plan in plans)


def _given_up(config: Config, plans: Sequence[Plan]) -> dict[str, str]:
    """What plans give up for memory that the config does not ask for, by key, as overrides."""
    found: dict[str, str] = {}
    for plan in plans:
        layout = plan.layout
        exact = {"moments": layout.moments == "fp32"} | {key: getattr(layout, key) != "disk" for key in TIER_KEYS}
        for key, kept in exact.items():
            if not kept and getattr(config.memory, key) == "auto":
                found[f"memory.{key}"] = f"memory.{key}={getattr(layout, key)}"
    return found
