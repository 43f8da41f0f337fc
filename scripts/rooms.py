"""The rooms of the house: who may import whom, checked by import-linter, and a drawing of who does.

    python scripts/rooms.py docs/rooms.svg            draw
    python scripts/rooms.py --check docs/rooms.svg    say whether the drawing shows the imports of today

``Rooms`` is a type of contract for import-linter; pyproject.toml names what each room may use.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import grimp
from importlinter import Contract, ContractCheck, fields, output

ROOT = "tonnage"
WIDTH, HEIGHT, GAP, BETWEEN, MARGIN = 118, 34, 22, 44, 16


def room_of(module: str) -> str | None:
    """The room in which a module lies; None for the package itself, its ``__main__``, and modules of others."""
    parts = module.split(".")
    return parts[1] if parts[0] == ROOT and len(parts) > 1 and parts[1] != "__main__" else None


class Rooms(Contract):  # type: ignore[misc]
    """Every room imports only rooms that it names, every room is named, and torch is only where it may be."""

    everybody = fields.ListField(subfield=fields.StringField())
    uses = fields.ListField(subfield=fields.StringField())
    without_torch = fields.ListField(subfield=fields.StringField(), required=False)
    with_torch = fields.ListField(subfield=fields.StringField(), required=False)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """Hold the imports of ``graph`` to the table."""
        allowed = {name: set(others.split()) for name, _, others in (line.partition(":") for line in self.uses)}
        wrong = []
        for importer, imported in direct_imports(graph):
            room, other = room_of(importer), room_of(imported)
            if room is None:
                continue
            if room not in allowed:
                wrong.append(f"{importer}: {room} is no room that the contract names")
            elif other is None:
                if (
                    imported == "torch"
                    and room in (self.without_torch or [])
                    and importer not in (self.with_torch or [])
                ):
                    wrong.append(f"{importer} imports torch: {room} does without")
            elif other != room and other not in allowed[room] and other not in self.everybody:
                wrong.append(f"{importer} imports {imported}: {room} may not use {other}")
        found = {room: set(others) for room, others in arrows(graph).items()}
        for room, others in allowed.items():
            wrong.extend(f"{room} may use {other} and does not" for other in sorted(others - found.get(room, set())))
        return ContractCheck(kept=not wrong, metadata={"wrong": sorted(set(wrong))})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Say each import that must not be."""
        for line in check.metadata["wrong"]:
            output.print_error(line)


def direct_imports(graph: grimp.ImportGraph) -> list[tuple[str, str]]:
    """Pairs of a module of ours and what it imports, at whatever place in the file."""
    return sorted(
        (module, imported)
        for module in graph.modules
        if module.split(".")[0] == ROOT
        for imported in graph.find_modules_directly_imported_by(module)
    )


def arrows(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """Which rooms each room imports."""
    found: dict[str, set[str]] = {}
    for importer, imported in direct_imports(graph):
        room, other = room_of(importer), room_of(imported)
        if room is not None:
            found.setdefault(room, set())
            if other is not None and other != room:
                found[room].add(other)
    return found


def drawing(found: dict[str, set[str]], everybody: set[str]) -> str:
    """The rooms as an SVG: each above what it imports, an arrow where no longer way leads there anyway."""
    rooms = {room: others - everybody for room, others in found.items() if room not in everybody}
    level: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in level:
            level[room] = 1 + max((height(other) for other in rooms[room]), default=0)
        return level[room]

    def below(room: str) -> set[str]:
        return set().union(*({other} | below(other) for other in rooms[room]))

    highest = max(height(room) for room in rooms)
    rows = [sorted(room for room in rooms if level[room] == number) for number in range(highest, 0, -1)]
    rows.append(sorted(everybody))
    width = max(len(row) for row in rows) * (WIDTH + GAP) - GAP + 2 * MARGIN
    total = len(rows) * (HEIGHT + BETWEEN) - BETWEEN + 2 * MARGIN + 14
    centre: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        first = (width - len(row) * (WIDTH + GAP) + GAP + WIDTH) / 2
        for place, room in enumerate(row):
            centre[room] = (first + place * (WIDTH + GAP), MARGIN + number * (HEIGHT + BETWEEN) + HEIGHT / 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" font-family="sans-serif" '
        'font-size="14">',
        "<title>Which room imports which; arrows that follow from others are left out</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#777"/></marker></defs>',
        f'<rect width="{width}" height="{total}" fill="#fff"/>',
    ]
    for room in sorted(rooms):
        direct = rooms[room] - set().union(*(below(other) for other in rooms[room]))
        x, y = centre[room]
        for other in sorted(direct):
            to_x, to_y = centre[other]
            lines.append(
                f'<path d="M{x:g} {y + HEIGHT / 2:g} C{x:g} {y + HEIGHT:g} {to_x:g} {to_y - HEIGHT:g} '
                f'{to_x:g} {to_y - HEIGHT / 2:g}" fill="none" stroke="#777" marker-end="url(#tip)"/>'
            )
    for room, (x, y) in sorted(centre.items()):
        fill = "#f3efe3" if room in everybody else "#e3edf7"
        lines.append(
            f'<rect x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
            f'fill="{fill}" stroke="#555"/>'
        )
        lines.append(f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle">{escape(room)}</text>')
    lines.append(
        f'<text x="{width / 2:g}" y="{total - 6}" text-anchor="middle" fill="#555">'
        "the lowest row: every room may use it</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def main(words: list[str]) -> int:
    """Returns 1 where the drawing is not that of today."""
    check = words[:1] == ["--check"]
    if len(words) != 1 + check:
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(words[-1])
    drawn = drawing(arrows(grimp.build_graph(ROOT)), {"errors", "files", "host", "rundir"})
    if check:
        if path.read_text() == drawn:
            return 0
        print(
            f"error: {path} does not show the imports of today\n  change: python scripts/rooms.py {path}",
            file=sys.stderr,
        )
        return 1
    path.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
