"""What happens before what, on lanes of a device and threads of its host, and accesses that no order holds.

An *agent* is whoever does one thing after another: a lane (by the number of its stream) or a thread (by a name). Each
act of an agent has a number; what an agent knows is, for every other, the number of the last act that certainly came
before its own next one. Two accesses to the same bytes, one of which writes, are a race where neither is known to the
other's agent (vector clocks). Knowing nothing of torch, this runs anywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

PAGE_BITS = 20
"""Accesses are looked up by pages of so many bytes, as a power of two."""

Agent = Hashable


@dataclass(frozen=True)
class Access:
    """A run of bytes that was read or written."""

    start: int
    end: int
    agent: Agent
    number: int
    """Of the act."""
    writes: bool
    what: str
    where: str


@dataclass(frozen=True)
class Race:
    """Two accesses that no order holds."""

    first: Access
    second: Access

    def __str__(self) -> str:
        return "\n".join(
            f"{'race: ' if one is self.second else '  after '}{'write' if one.writes else 'read'} by {one.what} of "
            f"{one.agent}, at {one.where}"
            for one in (self.second, self.first)
        )


class Order:
    """Who knows what, and who touched which bytes."""

    def __init__(self) -> None:
        self._known: dict[Agent, dict[Agent, int]] = defaultdict(dict)
        self._acts = 0
        self._pages: dict[int, list[Access]] = {}
        self.races: Counter[tuple[str, str, str, str]] = Counter()
        """By what was done where, of both."""

    def act(self, agent: Agent) -> int:
        """The number of a new act."""
        self._acts += 1
        self._known[agent][agent] = self._acts
        return self._acts

    def knowledge(self, agent: Agent) -> dict[Agent, int]:
        """What an agent knows now, to be told to others later."""
        return dict(self._known[agent])

    def learn(self, agent: Agent, told: dict[Agent, int]) -> None:
        """From now on an agent knows what it was told."""
        known = self._known[agent]
        for other, number in told.items():
            if number > known.get(other, -1):
                known[other] = number

    def agents(self) -> list[Agent]:
        """All that did or learnt something."""
        return list(self._known)

    def forget(self, start: int, end: int) -> None:
        """Bytes that are given out anew only once all that was done with them is over."""
        for page in range(start >> PAGE_BITS, (end - 1 >> PAGE_BITS) + 1):
            kept = list[Access]()
            for one in self._pages.get(page, ()):
                rest = ((one.start, min(one.end, start)), (max(one.start, end), one.end))
                kept += [replace(one, start=first, end=last) for first, last in rest if first < last]
            self._pages[page] = kept

    def access(self, access: Access) -> list[Race]:
        """Note an access; the races that it is in, each kind once."""
        found = []
        for page in range(access.start >> PAGE_BITS, (access.end - 1 >> PAGE_BITS) + 1):
            kept = []
            for one in self._pages.get(page, ()):
                if one.start >= access.end or one.end <= access.start:
                    kept.append(one)
                    continue
                ordered = one.agent == access.agent or one.number <= self._known[access.agent].get(one.agent, -1)
                if (access.writes or one.writes) and not ordered:
                    kind = (access.what, access.where, one.what, one.where)
                    self.races[kind] += 1
                    if self.races[kind] == 1:
                        found.append(Race(one, access))
                covered = access.start <= one.start and one.end <= access.end
                if not (covered and (access.writes or (one.agent == access.agent and not one.writes))):
                    kept.append(one)
            kept.append(access)
            self._pages[page] = kept
        return found
