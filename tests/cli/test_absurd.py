"""No value of any key ends in a traceback, however absurd: it is refused in a sentence, or there is a plan; at once.

Every key is set to every value by what ``tonnage plan`` and ``tonnage train --dry-run`` call. The model is found and
the rows are prepared once for each way to do that.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiny import write_config
from tonnage.cli.plan import show_plan
from tonnage.config import config_text, keys
from tonnage.decide import decision as deciding
from tonnage.decide.decision import decide
from tonnage.decide.models import find
from tonnage.decide.rows import prepare_data
from tonnage.errors import UserError
from tonnage.files.reading import parse_record
from tonnage.planning.machine import parse_hardware
from tonnage.planning.plan import Plan

NUMBERS = [
    *("-1", "0", "1", "1000000", "1000000000000", "9223372036854775807", "9223372036854775808", "18446744073709551616"),
    *("1e308", "-1e308", "1e-320", ".nan", ".inf", "-.inf", "9" * 3000, "9" * 5000, "9" * 400 + ".5"),
]
TEXTS = [
    *(
        '""',
        '" "',
        "x" * 300,
        "x" * 70_000,
        "x/" * 3000,
        '"a\\0b"',
        '"a\\nb"',
        '"a\\rb"',
        '"a\\u2028b"',
        '"\\e[31mred"',
    ),
    *("~", "~/x", "~nobody-of-that-name/x", "$HOME/x", "%s", "--x", "'*'", "..", "9GB", "'" + "9" * 5000 + "GB'"),
]
SHAPES = ["null", "true", "[]", "{}", "[x, x]", "{a: 1}", "[[1], [2]]"]
PLACES = ["/dev/zero", "{folder}/pipe", "{folder}/file", "{folder}/file/x", "{folder}", "{folder}/new"]
SECONDS = 1.0
LONGEST_MESSAGE = 4000
KINDS = {"slurm": "launch={with: slurm, threads: 1}", "ray": "launch={with: ray, address: auto, threads: 1}"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("absurd")
    path = write_config(folder, 60, batch="auto", launch={"workers": 1, "threads": 1})
    (folder / "file").write_text("x")
    os.mkfifo(folder / "pipe")
    return path


@pytest.fixture(scope="module")
def decided_once(config: Path) -> Iterator[None]:
    """What does not depend on most keys is found once."""
    found: dict[str, Any] = {}

    def once(function: Callable[..., Any], what: Callable[[Any], Any]) -> Callable[..., Any]:
        def answer(config: Any, *others: Any, **named: Any) -> Any:
            key = f"{function.__name__}: {what(config)!r}"
            if key not in found:
                found[key] = function(config, *others, **named)
            return found[key]

        return answer

    prepared = once(prepare_data, lambda config: (config.data.model_copy(update={"cache": None}), config.seed))
    keys_of_model = ("model", "init", "trust_remote_code", "parallel")
    model = once(find, lambda config: [getattr(config, key) for key in keys_of_model] + [config.data.max_length])
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(config.parent)
        patched.setenv("HOME", str(config.parent))
        patched.setattr(deciding, "prepare_data", prepared)
        patched.setattr(deciding, "find", model)
        for words in ([], ["adapter={}"], ["adapter=auto"]):  # imports and weighing take their time once
            decide(str(config), words)
        yield


def overrides(section: str) -> Iterator[list[str]]:
    """Each key of a section, in a kind of launch that has it; its value is left open."""
    for key in keys.all_keys():
        if key.name.partition(".")[0] != section or (key.is_section and key.default in ("", "required")):
            continue
        name = key.name.replace("data.train.", "data.train.0.")
        kinds = [kind for kind in keys.kinds_with(tuple(key.name.split("."))) if kind in KINDS]
        yield [*(KINDS[kind] for kind in kinds[:1]), name]


def refusal(config: Path, words: list[str]) -> str:
    """Why a config is refused; empty where it has a plan, which can be shown and stored."""
    try:
        decision = decide(str(config), words)
    except UserError as error:
        return str(error)
    show_plan(decision.plan, Console(file=io.StringIO(), width=120))
    assert parse_record(decision.plan.to_json(), Plan, "plan") == decision.plan
    assert config_text(decision.config)
    return ""


WEIGHING = 8
WEIGHED = ("adapter", "train", "data.eos_token", "data.added_tokens", "memory.sequence_tiles")
"""What is trained, and of how many tokens: a model is weighed anew for each value, which takes ``WEIGHING`` times as
long."""
LONG = ("adapter", "data", "launch")
"""Sections whose values take together more than five seconds."""
SECTIONS = list(dict.fromkeys(key.name.partition(".")[0] for key in keys.all_keys()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "section", [pytest.param(name, marks=pytest.mark.matrix if name in LONG else ()) for name in SECTIONS]
)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_every_key_with_every_value(half: int, section: str, config: Path, decided_once: None) -> None:
    """A key has every other value in one half, and the next key the others."""
    found: list[str] = []
    for number, (*before, key) in enumerate(overrides(section)):
        for value in (*NUMBERS, *TEXTS, *SHAPES, *PLACES)[(number + half) % 2 :: 2]:
            word = f"{key}={value.format(folder=config.parent) if value in PLACES else value}"
            began = time.process_time()
            found.append(refusal(config, [*before, word]))
            most = WEIGHING * SECONDS if {section, key} & {*WEIGHED} else SECONDS
            assert time.process_time() - began < most, word[:80]
            assert len(found[-1]) < LONGEST_MESSAGE, word[:80]
    assert any(found)


@pytest.mark.parametrize("text", ["a\nb", "", " ", "x" * 70_000, "9" * 5000 + "xH100", "1e308xH100", "0x0xH100", "\0",
                                  "99999999x9xH100", "cpu:" + "9" * 400 + "c:1GB", "cpu:1c:" + "9" * 400 + "GB",
                                  "RTX4090:0GB", "cpu:0c:0GB"])  # fmt: skip
def test_hardware_that_is_none(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_hardware(text)
    assert len(str(refused.value)) < LONGEST_MESSAGE
