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
LABEL, CELL, MARGIN = 96, 24, 40


def room_of(module: str) -> str | None:
    """The room in which a module lies; None for the package itself, its ``__main__``, and modules of others."""
    parts = module.split(".")
    return parts[1] if parts[0] == ROOT and len(parts) > 1 and parts[1] != "__main__" else None


class Rooms(Contract):  # type: ignore[misc]
    """Every room imports only rooms that it names, every room is named, torch is only where it may be, and no modules
    import each other in a circle, for types alone included."""

    everybody = fields.ListField(subfield=fields.StringField())
    uses = fields.ListField(subfield=fields.StringField())
    without_torch = fields.ListField(subfield=fields.StringField(), required=False)
    with_torch = fields.ListField(subfield=fields.StringField(), required=False)
    with_circles = fields.ListField(subfield=fields.StringField(), required=False)

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
        circles = circle(graph)
        wrong.extend(
            f"{importer} imports {', '.join(sorted(others))}: there is a circle of imports"
            for importer, others in circles.items()
            if room_of(importer) not in (self.with_circles or [])
        )
        rooms = {room_of(importer) for importer in circles}
        wrong.extend(f"{room} has no circle of imports" for room in self.with_circles or [] if room not in rooms)
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


def circle(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """Modules of a room that import each other in a circle, or lie between two, with those of them that each imports.

    Rooms themselves have none, as each may use what lies below it alone.
    """
    left: dict[str, set[str]] = {}
    for importer, imported in direct_imports(graph):
        if room_of(importer) == room_of(imported) is not None:
            left.setdefault(importer, set()).add(imported)
    while True:
        imported = set().union(*left.values()) & left.keys()
        inner = {module: left[module] & imported for module in imported if left[module] & imported}
        if inner == left:
            return left
        left = inner


def arrows(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """Which rooms each room imports."""
    found: dict[str, set[str]] = {}
    for importer, imported in direct_imports(graph):
        room, other = room_of(importer), room_of(imported)
        for one in filter(None, (room, other)):
            found.setdefault(one, set())
        if room is not None and other not in (None, room):
            found[room].add(other)
    return found


def drawing(found: dict[str, set[str]]) -> str:
    """The rooms as an SVG: a row for each with a dot under every room that it imports, the highest room first.

    With no circle of imports, every dot is to the right of the diagonal.
    """
    level: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in level:
            level[room] = 1 + max((height(other) for other in found[room]), default=0)
        return level[room]

    rooms = sorted(found, key=lambda room: (-height(room), room))
    place = {room: LABEL + number * CELL for number, room in enumerate(rooms)}
    size = LABEL + len(rooms) * CELL + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="13">',
        "<title>Which room imports which</title>",
        f'<rect width="{size}" height="{size}" fill="#fff"/>',
    ]
    for number, room in enumerate(rooms):
        at = place[room]
        if number % 2 == 0:
            lines.append(f'<rect x="0" y="{at}" width="{size}" height="{CELL}" fill="#f1f4f8"/>')
        middle = at + CELL / 2
        lines.append(f'<text x="{LABEL - 8}" y="{middle + 4:g}" text-anchor="end">{escape(room)}</text>')
        turned = f'transform="rotate(-60 {middle:g} {LABEL - 8})"'
        lines.append(f'<text x="{middle:g}" y="{LABEL - 8}" {turned}>{escape(room)}</text>')
        lines.append(f'<rect x="{at}" y="{at}" width="{CELL}" height="{CELL}" fill="#d5dbe3"/>')
    for room in rooms:
        for other in sorted(found[room]):
            lines.append(
                f'<circle cx="{place[other] + CELL / 2:g}" cy="{place[room] + CELL / 2:g}" r="6" fill="#2b5f8f">'
                f"<title>{escape(room)} imports {escape(other)}</title></circle>"
            )
    return "\n".join([*lines, "</svg>", ""])


def main(words: list[str]) -> int:
    """Returns 1 where the drawing is not that of today."""
    check = words[:1] == ["--check"]
    if len(words) != 1 + check or words[-1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(words[-1])
    drawn = drawing(arrows(grimp.build_graph(ROOT)))
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
