"""An endpoint over a real socket, for the tests."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from tonnage.inference.generate import Decoding, Loaded, generate
from tonnage.serving.app import create_app
from tonnage.serving.engine import Engine
from tonnage.serving.listen import listen

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Served:
    """A model, and the port at which it is asked."""

    loaded: Loaded
    port: int

    def ask(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and content of an answer; ``body`` is sent as it is, or as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, sent, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        return response.status, json.loads(content) if content.startswith("{") else content

    def chat(self, text: str, **more: Any) -> Any:
        """The answer to a question, greedily unless said otherwise."""
        status, answer = self.ask(CHAT, question(text, **more))
        assert status == 200, answer
        return answer

    def expected(self, text: str, num_tokens: int = 24) -> str:
        """What ``generate`` says."""
        return generate(self.loaded, [[{"role": "user", "content": text}]], Decoding(num_tokens))[0]


def question(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **more}


def said(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def events(content: str) -> list[Any]:
    lines = content.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@contextmanager
def serving(engine: Engine) -> Iterator[Served]:
    """Serve a model that is called tiny."""
    app = create_app(engine, "tiny", only_local=True)
    with listen("127.0.0.1", 0) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield Served(engine.loaded, listening.getsockname()[1])
        server.should_exit = True
        thread.join()
