"""A saved command line in, the keys of its launcher and of its script out.

    CUDA_VISIBLE_DEVICES=0,1  torchrun --nproc_per_node=2  sft.py  --learning_rate 2e-5 ...
    └─ the shell              └─ the launcher and its own  └─ script and its arguments

The text is that of a shell: comments, continued lines, quotes, and variables and arrays that the same text sets. One
command of it must start training; what stands around it (``cd``, ``module load``, ``#SBATCH``) is not looked at.
Nothing is run.
"""

from __future__ import annotations

import json
import operator
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from tonnage.errors import user_error
from tonnage.migration.keys import (
    ACCELERATE,
    ARGUMENTS,
    AXOLOTL,
    DEEPSPEED_LAUNCHER,
    LLAMA_FACTORY,
    PYTHON,
    SWIFT,
    TORCHRUN,
    TORCHTUNE,
    Table,
)
from tonnage.migration.references import plain_value
from tonnage.migration.settings import RANK_LAUNCHER, RANK_WORDS, ForeignSetting, flat, unreadable
from tonnage.migration.yaml_files import read_data

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_ARRAY = re.compile(r"^([ \t]*(?:export[ \t]+)?)([A-Za-z_]\w*)(\+?)=\(([^()]*)\)", re.MULTILINE)
_ARITHMETIC = re.compile(r"\$\(\(([^()\n]{1,100})\)\)|\$\(expr ([^()\n]{1,100})\)|`expr ([^`\n]{1,100})`")
_WHOLE_NUMBERS = re.compile(r"\$\(\((\w+(?:[-+*/%]\w+)*)\)\)")
"""``$((16/n))``, once variables are filled in."""
_APPENDED = re.compile(r"^([ \t]*(?:export[ \t]+)?)([A-Za-z_]\w*)\+=([\"']?)", re.MULTILINE)
_TABLE = read_data("commands")
_PREFIXES = _TABLE["prefixes"].split()
OF_SLURM = "SRUN_STARTS_IT"
"""A variable in the place of ``srun`` before a command."""
DEVICES = "CUDA_VISIBLE_DEVICES"
_FLAGS_OF_PYTHON = re.compile(r"-[^-mcWX]+$")
_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?$")
_SCRIPT_OF_SWIFT = re.compile(r"swift[/.]cli[/.](sft|pt|rlhf)(?:\.py)?$")
_BORDERS = ";&|"
"""What ends a command, unless it is quoted."""
_QUOTED = str.maketrans(_BORDERS, "\ue000\ue001\ue002")
"""How they are written where they are quoted, until commands are told apart: as characters that no text has."""
_UNQUOTED = {code: chr(letter) for letter, code in _QUOTED.items()}
_NO_KEY = "word"
FILES_OF_KEYS = (".yaml", ".yml", ".json")
OWN_PROGRAMS = {"axolotl": AXOLOTL, "llamafactory-cli": LLAMA_FACTORY, "swift": SWIFT}
"""Programs that are started by themselves, and tables of the keys that they take."""
OF_A_TRAINER = (ARGUMENTS, TORCHTUNE, *OWN_PROGRAMS.values())
"""Tables of what is told to what is started, and not to what starts it."""
OF_SWIFT = ("NPROC_PER_NODE", "NNODES")
"""Variables by which ms-swift is told how many processes there are."""
LONGEST_QUOTE = 200
"""Lines."""
_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod}
LONGEST_TEXT = 256 << 10
"""Of a word once its variables are filled in, and of all variables together."""


@dataclass(frozen=True)
class Command:
    launcher: str
    """``accelerate``, ``torchrun``, ``deepspeed``, ``python``, ``trl``, ``tune``, or a program of its own."""
    settings: list[ForeignSetting]


def read_command(text: str, where: str) -> Command:
    """Find the command that trains and take it apart. Raises ``UserError`` if there is none or more than one."""
    variables: dict[str, str] = {}
    commands: list[tuple[str, list[str], dict[str, str]]] = []
    for words, may_be_left_out in _commands(text, where):
        assigned, rest = _split_assignments([part for word in words for part in _expand(word, variables, where)])
        if not rest:
            unsettled = {name for name in assigned if variables.get(name, assigned[name]) != assigned[name]}
            variables |= assigned
            if may_be_left_out:
                variables = {name: value for name, value in variables.items() if name not in unsettled}
            _check_length(sum(map(len, variables.values())), where)
        elif (launcher := _launcher(rest)) is not None:
            commands.append((launcher, rest, variables | assigned))
    if not commands:
        raise unreadable("no command that trains", where)
    if others := [words for launcher, words, _ in commands if launcher == "megatron"]:
        raise unreadable(f"a command of Megatron-SWIFT ({' '.join(others[0][:2])}), whose engine is not read", where)
    started = [command for command in commands if command[0] not in ("python", "arguments")]
    if len(started) == 1:  # python beside it prepares something
        commands = started
    if len(commands) > 1:
        names = ", ".join(" ".join(words[:3]) + " ..." for _, words, _ in commands[:4])
        observed = f"{len(commands)} commands that may train: {names}"
        raise user_error(observed, "one", "leave one of them in the file", where)
    settings = []
    for table, name, value, written in _settings(*commands[0]):
        is_started_with = table not in OF_A_TRAINER or name == DEVICES
        rank = RANK_LAUNCHER if is_started_with else RANK_WORDS
        settings.append(ForeignSetting(table, name, value, where, rank, written))
    return Command(commands[0][0], settings)


_Parts = tuple[Table, str, Any, str]
"""Table, name, value, and the key as it is written."""


def _settings(launcher: str, words: list[str], environment: dict[str, str]) -> Iterator[_Parts]:
    """Everything that a command line says."""
    table = {"accelerate": ACCELERATE, "torchrun": TORCHRUN, "deepspeed": DEEPSPEED_LAUNCHER}.get(launcher, PYTHON)
    if DEVICES in environment and launcher not in ("tune", "swift"):  # which say how many processes there are
        yield ARGUMENTS if table is ACCELERATE else table, DEVICES, environment[DEVICES], ""
    if launcher == "python" and OF_SLURM in environment:
        yield PYTHON, "srun", True, "srun"
    if launcher == "swift":
        yield SWIFT, "command", words[1], "swift"
        yield from ((SWIFT, name, environment[name], name) for name in OF_SWIFT if name in environment)
    if launcher in OWN_PROGRAMS:
        yield from _of_a_program(OWN_PROGRAMS[launcher], words[2:])
    elif launcher == "trl":
        yield ARGUMENTS, "trl", words[1] if len(words) > 1 else "", "trl"
        for name, value, written in _arguments(words[2:]):
            is_accelerate_s = ARGUMENTS.find(name) is None and ACCELERATE.find(name) is not None
            yield ACCELERATE if is_accelerate_s else ARGUMENTS, name, value, written
    elif launcher == "tune":
        yield from _of_tune(words[2:])
    else:
        yield from _of_a_script(launcher, table, words)


def _of_a_program(table: Table, words: list[str]) -> Iterator[_Parts]:
    """What ``axolotl train`` and ``llamafactory-cli train`` are given: a file, and keys that count before its own."""
    rest = list(words)
    while rest and "=" in rest[-1] and not rest[-1].startswith("--"):  # as OmegaConf takes them
        name, _, value = rest.pop().partition("=")
        yield table, name, value, name
    yield from ((table, *argument) for argument in _leaves(rest))


def _of_tune(words: list[str]) -> Iterator[_Parts]:
    """What ``tune run`` is told: options of torchrun, a recipe, its file, keys that count before the file's, and those
    that are taken away (``~key``)."""
    options, start = _options(words, 0, TORCHRUN)
    yield from ((TORCHRUN, *option) for option in options)
    if start < len(words):
        yield TORCHTUNE, "recipe", words[start], "recipe"
    rest = iter(words[start + 1 :])
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--config":
            yield TORCHTUNE, "config", value if equals else next(rest, ""), name
        elif word.startswith("~"):
            yield TORCHTUNE, "~", word[1:], word
        elif equals:
            yield from ((TORCHTUNE, *leaf, name) for leaf in flat({name: plain_value(value)}))
        else:
            yield TORCHTUNE, _NO_KEY, word, word


def _of_a_script(launcher: str, table: Table, words: list[str]) -> Iterator[_Parts]:
    """What a launcher is told, the script that it starts, and what that is told."""
    if launcher == "arguments" or words[0].endswith(".py"):
        start = 0
    elif _PYTHON.match(words[0]) and launcher != "python":
        start = words.index("-m") + 2
    else:
        start = 2 if words[:2] == [words[0], "launch"] else 1
    arguments = ARGUMENTS
    if launcher != "arguments":
        options, start = _options(words, start, table)
        yield from ((table, *option) for option in options)
        if start < len(words):
            of_swift = _SCRIPT_OF_SWIFT.search(words[start])
            arguments = SWIFT if of_swift else ARGUMENTS
            yield (
                (SWIFT, "command", of_swift[1], "script") if of_swift else (ARGUMENTS, "script", words[start], "script")
            )
            start += 1
    yield from ((arguments, *argument) for argument in _leaves(words[start:]))


def _leaves(words: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Arguments, objects among them by their keys."""
    for name, value, written in _arguments(words):
        for leaf, leaf_value in flat({name: value}) if isinstance(value, dict) else [(name, value)]:
            yield leaf, leaf_value, written if leaf == name else f"{written} {leaf.removeprefix(name + '.')}"


def _launcher(words: Sequence[str]) -> str | None:
    """Which program a command starts training with; None if it does not look like training."""
    name = words[0].rpartition("/")[2]
    if name in _TABLE["launchers"]:
        commands = _TABLE["commands"].get(name, "").split()
        return str(_TABLE["launchers"][name]) if not commands or {*words[1:2]} & {*commands} else None
    if _PYTHON.match(words[0]):
        rest = [word for word in words[1:] if not _FLAGS_OF_PYTHON.match(word)]
        if rest[:1] == ["-m"] and len(rest) > 1 and rest[1] in _TABLE["modules"]:
            return str(_TABLE["modules"][rest[1]])
        return "python" if any(word.startswith("--") for word in words[2:]) else None
    if name.endswith(".py"):
        return "python" if any(word.startswith("--") for word in words[1:]) else None
    return "arguments" if words[0].startswith("--") else None


def _options(words: list[str], start: int, table: Table) -> tuple[list[tuple[str, Any, str]], int]:
    """The launcher's own options, and where the script stands."""
    options: list[tuple[str, Any, str]] = []
    while start < len(words) and words[start].startswith("-"):
        written, equals, value = words[start].partition("=")
        name = written.lstrip("-").replace("-", "_")
        name = _TABLE["short"].get(name, name) if not written.startswith("--") else name
        if table is PYTHON and (name in ("module", "X", "W") or _FLAGS_OF_PYTHON.match(words[start])):
            start += 2 if name in ("X", "W") else 1
            continue
        key = table.find(name)
        start += 1
        if equals:
            options.append((name, _value([value]), written))
        elif (key is not None and key.is_flag) or start >= len(words) or words[start].startswith("--"):
            options.append((name, True, written))
        else:
            options.append((name, _value([words[start]]), written))
            start += 1
    return options, start


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Arguments of the script as HfArgumentParser takes them: ``--name value ...``, ``--name=value`` or ``--name``."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            if word:
                yield "config" if word.endswith(FILES_OF_KEYS) else _NO_KEY, word, word
            continue
        written, equals, value = word.partition("=")
        name = written.removeprefix("--").replace("-", "_")
        values = [value] if equals else []
        while not equals and index < len(words) and not words[index].startswith("--"):
            values.append(words[index])
            index += 1
        is_negated = name.startswith("no_") and ARGUMENTS.find(name) is None and ARGUMENTS.find(name[3:]) is not None
        if is_negated and not values:
            yield name[3:], False, written
        else:
            yield name, _value(values) if values else True, written


def _value(words: list[str]) -> Any:
    """The value of an argument: JSON if it is an object, a list of several words, else the word."""
    words = [word for word in words if word] or words[:1]  # a variable that is empty is no word to a shell
    if len(words) > 1:
        return words
    if words[0].lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            return json.loads(words[0])
    return words[0]


def _commands(text: str, where: str) -> Iterator[tuple[list[str], bool]]:
    """The words of every command of a shell text, without what only wraps them, and whether it may be left out: in a
    branch, or behind ``&&`` or ``||``."""
    text = _APPENDED.sub(r"\1\2=\3${\2}", _ARRAY.sub(_as_text, re.sub(r"\\\r?\n", " ", text)))
    text = re.sub(r"\$\{(\w+)\[[@*]\]\}", r"${\1}", text)
    text = _ARITHMETIC.sub(lambda match: "$((" + "".join((match[1] or match[2] or match[3]).split()) + "))", text)
    pending, depth = "", 0
    for line in text.splitlines():
        pending += line
        words = _words(pending)
        if words is None and pending.count("\n") < LONGEST_QUOTE:  # it goes on in the next line
            pending += "\n"
            continue
        if words is None:
            break
        pending, border = "", ""
        for is_border, part in groupby(_rejoined(words), lambda word: word != "" and set(word) <= set(_BORDERS)):
            if is_border:
                border = next(part)
            elif command := _unwrapped([word.translate(_UNQUOTED) for word in part]):
                depth += (command[0] in ("if", "case")) - (command[0] in ("fi", "esac"))
                yield command, depth > 0 or border in ("&&", "||")
    if pending.strip():
        raise unreadable("a quote that is not closed", where)


def _words(line: str) -> list[str] | None:
    """The words of a line without its comment; None if a quote is open at its end. Borders that are quoted are written
    as ``_QUOTED`` has them."""
    letters = (letter.translate(_QUOTED) if quoted else letter for letter, quoted in _letters(_without_comment(line)))
    lexer = shlex.shlex("".join(letters), posix=True, punctuation_chars=_BORDERS)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:
        return None


def _rejoined(words: Sequence[str]) -> Iterator[str]:
    """Words in which a command whose output is to stand there, ``$(nvidia-smi -L | wc -l)``, is part of one word."""
    held, depth, num_ticks = list[str](), 0, 0
    for word in words:
        held.append(word)
        num_ticks += word.count("`")
        depth += word.count("(") - word.count(")") if depth or "$(" in word else 0
        if depth <= 0 and num_ticks % 2 == 0:
            yield " ".join(held)
            held, depth = [], 0
    yield from held


def _letters(line: str) -> Iterator[tuple[str, bool]]:
    """Every letter of a line, and whether it is quoted."""
    quote, before = "", " "
    for letter in line:
        yield letter, bool(quote) or before == "\\"
        if quote:
            quote = "" if letter == quote and (before != "\\" or quote == "'") else quote
        elif letter in "\"'" and before != "\\":
            quote = letter
        before = letter


def _without_comment(line: str) -> str:
    """A line up to the first ``#`` that begins a word and is not quoted: shlex takes those inside of words as well."""
    before = " "
    for place, (letter, quoted) in enumerate(_letters(line)):
        if letter == "#" and not quoted and before in " \t\n" + _BORDERS:
            return line[:place] + _without_comment(line[end:]) if (end := line.find("\n", place)) >= 0 else line[:place]
        before = letter
    return line


def _as_text(match: re.Match[str]) -> str:
    """``NAME=(words)`` as ``NAME='words'``."""
    try:
        words = shlex.join(shlex.split(match[4], comments=True))
    except ValueError:
        return match[0]
    return f"{match[1]}{match[2]}={shlex.quote(f'${{{match[2]}}} {words}' if match[3] else words)}"


def _unwrapped(words: list[str]) -> list[str]:
    """A command without redirections, and without the programs that only start another."""
    words_left: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"\d?(?:>>?|<)", word):
            skip = True
        elif not re.match(r"\d?>>?\S", word):
            words_left.append(word)
    before = list(takewhile(lambda word: word in _PREFIXES or _ASSIGNMENT.match(word), words_left))
    settings = [word for word in before if word not in _PREFIXES] + ([f"{OF_SLURM}=1"] if "srun" in before else [])
    if set(before) & set(_PREFIXES):  # what starts another program may have options of its own
        for place in range(len(before), len(words_left)):
            if not words_left[place].startswith("-") and _launcher(words_left[place:]) is not None:
                return [*settings, *words_left[place:]]
    return [*settings, *words_left[len(before) :]]


def _split_assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """``NAME=value`` words before a command, and the rest."""
    assignments = [word.partition("=") for word in takewhile(_ASSIGNMENT.match, words)]
    return {name: value for name, _, value in assignments}, words[len(assignments) :]


def _check_length(num_letters: int, where: str) -> None:
    """Refuse variables that hold each other over and over. Raises ``UserError``."""
    if num_letters > LONGEST_TEXT:
        raise unreadable(f"variables that grow beyond {LONGEST_TEXT:,} letters", where)


def _expand(word: str, variables: dict[str, str], where: str) -> list[str]:
    """A word with the variables that the text itself has set; several if it is nothing but one that holds options."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name]
        return match[2] if match[2] is not None else match[0]

    _check_length(sum(len(value(match)) for match in _VARIABLE.finditer(word)), where)
    expanded = _VARIABLE.sub(value, word)
    expanded = _WHOLE_NUMBERS.sub(lambda match: _computed(match, variables), expanded)
    if _VARIABLE.fullmatch(word) and expanded.lstrip().startswith("-"):
        with suppress(ValueError):
            return shlex.split(expanded)
    return [expanded]


def _computed(match: re.Match[str], variables: dict[str, str]) -> str:
    """The value of ``$((16/n))``, of whole numbers between signs of one rank; the text itself of anything else."""
    terms = re.split(r"([-+*/%])", match[1])
    numbers = [variables.get(term, term) for term in terms[::2]]
    ranks = {"*/%" if sign in "*/%" else "+-" for sign in terms[1::2]}
    if len(ranks) > 1 or not all(re.fullmatch(r"\d{1,9}", number) for number in numbers):
        return match[0]
    total = int(numbers[0])
    for sign, number in zip(terms[1::2], map(int, numbers[1:]), strict=True):
        if sign in "/%" and number == 0:
            return match[0]
        total = _SIGNS[sign](total, number)
    return str(total)
