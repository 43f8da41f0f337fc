"""Files that grow, turn in circles or hold what no configuration holds: read soon or refused in a sentence."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tonnage.errors import UserError
from tonnage.migration import Import, import_files

NESTED = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}' if i else 'x'] * 9)}]\n" for i in range(20))
MERGED = "k0: &k0 {x: 1}\n" + "".join(f"k{i}: &k{i} {{<<: [{', '.join([f'*k{i - 1}'] * 9)}]}}\n" for i in range(1, 20))
REFUSED = {
    "aliases that multiply.yaml": (NESTED, "aliases that stand for more than 20,000 values"),
    "merges that multiply.yaml": (MERGED, "aliases that stand for more than 20,000 values"),
    "an alias within itself.yaml": ("a: &a [*a]\n", "within what it stands for"),
    "a merge within itself.yaml": ("a: &a {<<: *a}\n", "within what it stands for"),
    "a set.yaml": ("num_processes: !!set {a, b}\n", "not YAML"),
    "bytes.yaml": ("num_processes: !!binary aGk=\n", "not YAML"),
    "code.yaml": ('num_processes: !!python/object/apply:os.system ["touch canary"]\n', "not YAML"),
    "digits.yaml": (f"num_processes: {'9' * 5000}\n", "a number of thousands of digits"),
    "bits.yaml": (f"num_processes: 0x{'f' * 5000}\n", "a number of 20,000 bits"),
    "sixties.yaml": (f"num_processes: {':'.join(['59'] * 3000)}\n", "bits"),
    "levels.yaml": ("a: " + "[" * 2000 + "]" * 2000, "more than 50 levels"),
    "items.yaml": (f"num_processes: [{', '.join(['1'] * 30_000)}]", "more than 20,000 keys and values"),
    "a list as key.yaml": ("? [a]\n: 1\n", "not YAML"),
    "digits.json": (f'{{"train_batch_size": {"9" * 5000}}}', "a number of thousands of digits"),
    "more digits.json": (f'{{"train_batch_size": {"9" * 400}}}', "a number of 1,329 bits"),
    "levels.json": ('{"zero_optimization":' * 300 + "1" + "}" * 300, "more than 50 levels"),
    "open levels.json": ('{"a":' * 20_000, "more than 50 levels"),
    "keys.json": ("{" + ",".join(f'"gradient_clippin{i}":1' for i in range(9000)) + ',"bf16":1}', "1,000 keys"),
    "keys twice.json": ("{" + ",".join(f'"k{i % 9000}":1' for i in range(18_000)) + "}", "written twice"),
    "variables that double.sh": ("A=x\n" + "A=$A$A\n" * 60 + "python t.py --a $A", "variables that grow beyond"),
    "variables that fill.sh": (f"A={'x' * 9000}\npython t.py --a {'$A' * 90_000}", "variables that grow beyond"),
    "words.sh": ("python t.py " + " ".join(f"--learnin_rate{i} 1" for i in range(9000)), "more than 1,000 keys"),
    "open quotes.sh": ("python t.py --a 'x\n" + "y\n" * 100_000, "a quote that is not closed"),
    "bytes.sh": ("x" * (300 << 10), "300,000 bytes|307,200 bytes"),
}  # fmt: skip
READ = {
    "a file in the place of its name.yaml": (
        f"output_dir: a\nlearning_rate: 1.0\ndeepspeed: '{json.dumps({'steps_per_print': '1' * 300})}'\n"
    ),
    "dates stay text.yaml": "compute_environment: 2001-01-01\nnum_processes: 4\n",
    "an alias.yaml": "num_machines: &n 4\nnum_processes: *n\n",
    "other keys.yaml": "num_processes: 4\nfsdp_config: {1: 2, null: 4, true: 5}\n",
    "a set in braces.yaml": "num_processes: 4\nmixed_precision: {? a, ? b}\n",
    "a long key.json": json.dumps({"zero_optimization": {"stage": 3}, "k" * 200_000: 1}),
    "no numbers.json": '{"train_batch_size": NaN, "gradient_clipping": Infinity}',
    "a power.json": '{"fp16": {"enabled": true, "initial_scale_power": 1000000000000}, "train_batch_size": 8}',
    "json in a word.sh": 'python t.py --learning_rate 1 --x \'{"a":' + "9" * 5000 + "}'",
    "deep json in a word.sh": "python t.py --learning_rate 1 --x '" + '{"a":' * 3000 + "'",
    "letters of a terminal.sh": "python t.py --a '\x1b[31m' --\x1b[0m 1",
    "a thousand near keys.json": json.dumps({"train_batch_size": 1} | {f"gradient_clippin{i}": 1 for i in range(990)}),
}


def imported(path: Path) -> tuple[Import, float]:
    began = time.monotonic()
    found = import_files([path])
    json.dumps(found.to_json(), default=str)
    return found, time.monotonic() - began


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    text, message = REFUSED[name]
    (tmp_path / name).write_text(text)
    began = time.monotonic()
    with pytest.raises(UserError, match=message) as caught:
        import_files([tmp_path / name])
    assert time.monotonic() - began < 10  # 1 on a machine that does nothing else
    assert len(str(caught.value)) < 1000
    assert not Path("canary").exists()


@pytest.mark.parametrize("name", READ)
def test_what_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(READ[name])
    found, seconds = imported(tmp_path / name)
    assert seconds < 30
    assert found.entries
    assert max(len(entry.setting.shown) for entry in found.entries) <= 120
    assert len(found.text) < 20_000


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "file").touch()
    for path, message in (
        (Path("/dev/zero"), "a device"), (tmp_path / "pipe.yaml", "nobody writes"), (tmp_path, "a directory"),
        (Path("a\0"), "null"), (tmp_path / "file" / "below", "a part of the path is a file"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            import_files([path])


def test_an_absurd_power_of_a_loss_scale_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(READ["a power.json"])
    found, _ = imported(tmp_path / "ds.json")
    assert [entry.verdict for entry in found.entries if "power" in entry.setting.shown] == ["not supported"]
