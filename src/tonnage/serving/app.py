"""The routes: as OpenAI's are, for chat completions, completions and the list of models."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tonnage.host.nodes import names_this_machine
from tonnage.inference.pieces import Token
from tonnage.serving.engine import AnswerPart, Begun, Ended, Engine
from tonnage.serving.requests import (
    MOST_BYTES,
    MOST_BYTES_WITH_IMAGES,
    ChatRequest,
    CompletionRequest,
    Refused,
    read_request,
)


def create_app(engine: Engine, name: str, *, only_local: bool) -> Starlette:
    """The endpoint for a model that is called ``name``; ``only_local``: whether it is for this machine alone."""
    began = int(time.time())
    most_bytes = MOST_BYTES if engine.loaded.sight is None else MOST_BYTES_WITH_IMAGES

    async def complete(request: Request) -> Response:
        return await _answered(request, engine, await read(request, CompletionRequest), _Texts(engine, name))

    async def chat(request: Request) -> Response:
        return await _answered(request, engine, await read(request, ChatRequest), _Chats(engine, name))

    async def read(request: Request, form: Any) -> Any:
        check_host(request)
        wish = read_request(form, await _body(request, most_bytes))
        if wish.model != name:
            raise Refused(f"no model {wish.model[:200]!r}: this is {name!r}", status=404, param="model", code=MISSING)
        return wish

    def check_host(request: Request) -> None:
        if only_local and not names_this_machine(request.headers.get("host", "")):
            raise Refused("this endpoint is for localhost alone", status=403)

    async def models(request: Request) -> Response:
        check_host(request)
        described = {"id": name, "object": "model", "created": began, "owned_by": "tonnage"}
        if "model" not in request.path_params:
            return JSONResponse({"object": "list", "data": [described]})
        if request.path_params["model"] != name:
            raise Refused(f"no such model: this is {name!r}", status=404, param="model", code=MISSING)
        return JSONResponse(described)

    async def front(request: Request) -> Response:
        check_host(request)
        return PlainTextResponse(f"{name}, for trying it: POST /v1/chat/completions\n")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        engine.close()

    routes = [
        Route("/", front),
        Route("/health", front),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {Refused: _refuse, HTTPException: _refuse_route, Exception: _fail}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


MISSING = "model_not_found"
MOST_READ = 4
"""How many times as much is read of a request that is too large: who sends no more hears why, and the connection is
closed to the others."""
CLOSING = {"Connection": "close"}
"""What is left of a refused request is not read: the server would read it to its end."""


async def _body(request: Request, most_bytes: int) -> bytes:
    """What was sent, within bounds. A page in a browser cannot send JSON to another site unasked."""
    length = request.headers.get("content-length", "0")
    num_bytes, body = 0, bytearray()
    if not (length.isdecimal() and int(length[:19]) > MOST_READ * most_bytes):
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > MOST_READ * most_bytes:
                break
            body += part if num_bytes <= most_bytes else b""
        else:
            if num_bytes <= most_bytes:
                kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
                if kind != "application/json":
                    raise Refused(f"content of type {kind[:80] or 'none'}: application/json is taken", status=415)
                return bytes(body)
    raise Refused(f"a request of more than {most_bytes:,} bytes", status=413)


async def _answered(
    request: Request, engine: Engine, wish: ChatRequest | CompletionRequest, answers: _Answers
) -> Response:
    written = engine.answer(wish, request.is_disconnected)
    try:
        first = await anext(written)
    except StopAsyncIteration:
        return Response(status_code=499)  # whoever asked has left
    assert isinstance(first, Begun)
    answers.prompt_tokens = first.prompt_tokens
    if wish.stream:
        return StreamingResponse(_streamed(written, answers, wish), media_type="text/event-stream")
    tokens = list[Token]()
    async with aclosing(written):  # type: ignore[type-var]
        async for event in written:
            if isinstance(event, AnswerPart):
                tokens += event.tokens
            elif isinstance(event, Ended):
                probable = tokens if wish.likeliest is not None else None
                return JSONResponse(answers.whole(probable, event))
    return Response(status_code=499)


async def _streamed(
    written: AsyncIterator[Begun | AnswerPart | Ended], answers: _Answers, wish: ChatRequest | CompletionRequest
) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    with_tokens = wish.likeliest is not None
    try:
        async with aclosing(written):  # type: ignore[type-var]
            for event in answers.opening():
                yield _event(event, wish)
            async for written_part in written:
                if isinstance(written_part, AnswerPart):
                    yield _event(answers.piece(written_part.text, written_part.tokens if with_tokens else None), wish)
                elif isinstance(written_part, Ended):
                    yield _event(answers.ending(written_part), wish)
                    if wish.tells_usage:
                        usage = {"choices": [], "usage": answers.usage(written_part)}
                        yield _event(answers.piece("", None) | usage, wish)
                    yield "data: [DONE]\n\n"
    except Refused as error:
        yield f"data: {json.dumps(error.body())}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(_failure(error).body())}\n\n"


def _event(value: dict[str, Any], wish: ChatRequest | CompletionRequest) -> str:
    content = {"usage": None, **value} if wish.tells_usage else value
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class _Answers(ABC):
    """The form in which an answer is sent."""

    kind = piece_kind = prefix = ""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self.prompt_tokens = 0
        self._offset = 0

    def usage(self, ended: Ended) -> dict[str, int]:
        total = self.prompt_tokens + ended.tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": ended.tokens, "total_tokens": total}

    def whole(self, tokens: Sequence[Token] | None, ended: Ended) -> dict[str, Any]:
        """An answer at once."""
        said, probable = self._said(ended.text), self._probable(tokens)
        choice = {"index": 0, **said, "logprobs": probable, "finish_reason": ended.reason}
        return {**self._head, "object": self.kind, "choices": [choice], "usage": self.usage(ended)}

    def opening(self) -> list[dict[str, Any]]:
        """What comes before the first piece."""
        return []

    def piece(self, text: str, tokens: Sequence[Token] | None) -> dict[str, Any]:
        """A part of an answer."""
        return self._part(self._said_more(text), self._probable(tokens), None)

    def ending(self, ended: Ended) -> dict[str, Any]:
        return self._part(self._said_more(""), None, ended.reason)

    def _part(self, said: dict[str, Any], probable: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **said, "logprobs": probable, "finish_reason": reason}
        return {**self._head, "object": self.piece_kind, "choices": [choice]}

    @abstractmethod
    def _said(self, text: str) -> dict[str, Any]: ...

    def _said_more(self, text: str) -> dict[str, Any]:
        return self._said(text)

    @abstractmethod
    def _probable(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None: ...

    def _text(self, token: int) -> str:
        return self._engine.text_of(token)


class _Chats(_Answers):
    """Answers in a conversation."""

    kind, piece_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self) -> list[dict[str, Any]]:
        return [self._part({"delta": {"role": "assistant", "content": ""}}, None, None)]

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _said_more(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _probable(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {
            "content": [
                {
                    **self._one(token.id, token.logprob),
                    "top_logprobs": [self._one(other, logprob) for other, logprob in token.likeliest],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        is_whole = "\ufffd" not in text  # some tokens are parts of a character
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if is_whole else None}


class _Texts(_Answers):
    """Continuations of a text."""

    kind, piece_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _probable(self, tokens: Sequence[Token] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        texts, offsets = [self._text(token.id) for token in tokens], list[int]()
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        likeliest = [{self._text(other): _finite(one) for other, one in token.likeliest} for token in tokens]
        logprobs = [_finite(token.logprob) for token in tokens]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}


def _finite(logprob: float | None) -> float:
    return max(-9999.0, logprob if logprob is not None else -9999.0)  # JSON has no infinity; OpenAI says -9999


def _failure(error: Exception) -> Refused:
    return Refused(f"the answer failed ({type(error).__name__})", status=500)


async def _refuse(_: Request, error: Refused) -> Response:
    return JSONResponse(error.body(), error.status, CLOSING)


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    refused = Refused(f"{request.method} {request.url.path[:200]}: {error.detail}", status=error.status_code)
    return JSONResponse(refused.body(), refused.status, {**(error.headers or {}), **CLOSING})


async def _fail(_: Request, error: Exception) -> Response:
    return JSONResponse(_failure(error).body(), 500)
