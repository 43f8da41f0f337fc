"""``tonnage serve`` as its page has it: a process that says where it listens, answers, and ends with Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

import entry
import tiny
from tonnage.config.schema import Checkpoint

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("models") / "gsm8k", tiny.llama_config(num_hidden_layers=1))


@pytest.mark.slow
def test_it_says_where_it_is_and_what_is_for_load_and_ends_with_ctrl_c(model: Path) -> None:
    command = [sys.executable, "-m", "tonnage.cli.main", "serve", str(model), "--port", "0", "--template", "plain"]
    serving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "300"})
    assert serving.stderr is not None
    told = [serving.stderr.readline() for _ in range(2)]
    assert told[0].startswith("Serving gsm8k at http://localhost:"), told
    assert "for trying it" in told[0]
    assert told[1] == f"For load: vllm serve {model} --served-model-name gsm8k\n"
    address = told[0].split(" at ")[1].split(", ")[0]
    (text,) = re.findall(r"^(curl .*?)\n```", PAGE, re.DOTALL | re.MULTILINE)
    _, url, _, header, _, body = shlex.split(text.replace("\\\n", " "))
    assert url.startswith("localhost:8000/v1/")
    asked = json.loads(body)
    assert header == "Content-Type: application/json"
    request = urllib.request.Request(
        url.replace("localhost:8000/v1", address),
        json.dumps(asked | {"max_tokens": 3}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    prompt = asked["messages"][0]["content"]
    said = entry.tonnage("generate", str(model), "--prompt", prompt, "--max-new-tokens", "3", "--template", "plain").out
    assert answer["choices"][0]["message"]["content"] == said.removesuffix("\n")
    serving.send_signal(signal.SIGINT)
    assert serving.wait(timeout=30) == 130
    assert "Traceback" not in serving.stderr.read()


def test_the_configuration_of_the_page_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found = Checkpoint(**yaml.safe_load(text)["checkpoint"])
    assert (found.every, found.push, found.public) == (100, "me/gsm8k", False)


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = entry.tonnage("serve", str(model), "--port", str(taken.getsockname()[1]))
    assert result.status == 2
    assert "cannot be listened at" in result.err
    assert "--port 0" in result.err
    assert "no.such.address" in entry.tonnage("serve", str(model), "--host", "no.such.address").err
