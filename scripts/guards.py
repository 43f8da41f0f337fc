"""What keeps the code readable, held by numbers that may only fall: sizes of functions, and names that say nothing.

    python scripts/guards.py            check src against scripts/guards.toml
    python scripts/guards.py --lower    write into it what has become smaller since
    python scripts/guards.py --size     lines of src, lengths of lines, statements of functions

A function has at most 60 lines, its docstring not counted, and 8 parameters. Kernels are left out, and of a command its
options, which are its signature. Vague names are counted where a function of more than ten lines gives a variable, a
parameter or a loop such a name; a comprehension on one line may.
"""

from __future__ import annotations

import ast
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE, LIMITS = ROOT / "src" / "tonnage", ROOT / "scripts" / "guards.toml"
MOST_LINES, MOST_PARAMETERS = 60, 8
SMALL = 10
"""Lines of a function whose names may be vague."""
VAGUE = frozenset(
    {"one", "found", "said", "given", "told", "there", "here", "kept", "asked", "known", "what", "which", "whose", "so"}
    | {"seen", "made", "wanted", "meant", "thing", "things", "stuff", "tmp"}
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Limits = dict[str, dict[str, Any]]
"""Of ``functions``, by name, and ``vague`` names, by room."""


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """All functions below a node with their qualified names, the outer before the inner."""
    for child in ast.iter_child_nodes(tree):
        name = f"{prefix}{child.name}" if isinstance(child, Function | ast.ClassDef) else prefix.rstrip(".")
        if isinstance(child, Function):
            yield name, child
        yield from functions(child, f"{name}." if name else "")


def body_of(function: Function) -> list[ast.stmt]:
    """Its statements but for the docstring."""
    return function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body


def num_lines(function: Function, *, signature: bool = True) -> int:
    """Lines of a function but for its docstring, and without ``signature`` but for that."""
    body = body_of(function)
    inside = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
    return inside + (function.body[0].lineno - function.lineno if signature else 0)


def num_parameters(function: Function) -> int:
    """Of a function, without ``self`` and ``cls``."""
    listed = function.args
    names = [argument.arg for argument in (*listed.posonlyargs, *listed.args)]
    return (
        len(names)
        - (names[:1] in (["self"], ["cls"]))
        + len(listed.kwonlyargs)
        + sum(argument is not None for argument in (listed.vararg, listed.kwarg))
    )


def oversized(source: Path) -> dict[str, list[int]]:
    """Functions above a limit, as ``file:name``, with their lines and parameters."""
    sizes: dict[str, list[int]] = {}
    for path in sorted(source.rglob("*.py")):
        room = path.relative_to(source).parts[0]
        if room == "kernels":
            continue
        for name, function in functions(ast.parse(path.read_text())):
            lines = num_lines(function, signature=room != "cli")
            parameters = 0 if room == "cli" else num_parameters(function)
            if lines > MOST_LINES or parameters > MOST_PARAMETERS:
                sizes[f"{path.relative_to(source).as_posix()}:{name}"] = [lines, parameters]
    return sizes


def vague_names(source: Path) -> dict[str, int]:
    """How often each room gives a vague name in a function of more than ten lines."""
    counts: Counter[str] = Counter()
    for path in sorted(source.rglob("*.py")):
        named: set[tuple[int, int]] = set()
        for _, function in functions(ast.parse(path.read_text())):
            if num_lines(function) > SMALL:
                named |= {(node.lineno, node.col_offset) for node in _vague(function)}
        counts[path.relative_to(source).parts[0]] += len(named)
    return {room: count for room, count in sorted(counts.items()) if count}


def _vague(node: ast.AST) -> Iterator[ast.Name | ast.arg]:
    if isinstance(node, ast.arg) and node.arg in VAGUE:
        yield node
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
        yield node
    for child in ast.iter_child_nodes(node):
        is_short = isinstance(child, ast.comprehension) and getattr(node, "lineno", 0) == getattr(node, "end_lineno", 0)
        if not is_short:
            yield from _vague(child)


def problems(source: Path, limits: Limits) -> list[str]:
    """What is larger than ``limits`` allow, and what they allow without need."""
    allowed, sizes, lines = limits.get("functions", {}), oversized(source), list[str]()
    for name, (num, parameters) in sizes.items():
        most_lines, most_parameters = allowed.get(name, (MOST_LINES, MOST_PARAMETERS))
        if num > max(most_lines, MOST_LINES) or parameters > max(most_parameters, MOST_PARAMETERS):
            lines.append(f"{name}: {num} lines and {parameters} parameters, {most_lines} and {most_parameters} at most")
    lines += [f"{name} is small enough: python scripts/guards.py --lower" for name in allowed if name not in sizes]
    for room, count in vague_names(source).items():
        if count > (most := limits.get("vague", {}).get(room, 0)):
            lines.append(f"{room}: {count} vague names, {most} at most ({', '.join(sorted(VAGUE))})")
    return lines


def lowered(source: Path, limits: Limits) -> str:
    """``limits`` as TOML, with what has become smaller."""
    sizes, counts = oversized(source), vague_names(source)
    lines = ["# Written by scripts/guards.py --lower; numbers only fall.", "", "[functions]  # lines, parameters"]
    for name, before in limits.get("functions", {}).items():
        if name in sizes:
            lines.append(f'"{name}" = {[min(pair) for pair in zip(before, sizes[name], strict=True)]}')
    lines += ["", "[vague]"]
    for room, before in limits.get("vague", {}).items():
        if number := min(before, counts.get(room, 0)):
            lines.append(f'"{room}" = {number}')
    return "\n".join([*lines, ""])


def size(source: Path) -> list[str]:
    """Lines, and how dense they are."""
    texts = [path.read_text() for path in sorted(source.rglob("*.py"))]
    lengths = [len(line) for text in texts for line in text.splitlines() if line.strip()]
    statements = [
        sum(isinstance(node, ast.stmt) for part in body_of(function) for node in ast.walk(part))
        for text in texts
        for _, function in functions(ast.parse(text))
    ]
    lines = [f"{sum(len(text.splitlines()) for text in texts):,} lines in {len(texts)} files"]
    for measured, numbers in (("length of a line", lengths), ("statements of a function", statements)):
        tenths = statistics.quantiles(numbers, n=10)
        lines.append(f"{measured}: median {statistics.median(numbers):g}, 90th percentile {tenths[-1]:g}")
    return lines


def main(words: list[str]) -> int:
    """Returns 1 where something is too large."""
    limits = tomllib.loads(LIMITS.read_text())
    if words == ["--size"]:
        print(*size(SOURCE), sep="\n")
        return 0
    if words == ["--lower"]:
        LIMITS.write_text(lowered(SOURCE, limits))
        return 0
    if words:
        print(__doc__, file=sys.stderr)
        return 2
    lines = problems(SOURCE, limits)
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
