"""One answer after another, in a thread of its own: what is asked beside it changes no answer.

A batch would be faster, and would add up in another order: now and then a token would be another one. Whoever needs the
speed serves the same directory with vLLM.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Literal

from tonnage.data import encode_prompt
from tonnage.errors import UserError
from tonnage.inference.generate import Decoding, Loaded
from tonnage.inference.tokens import Token, write_tokens
from tonnage.serving.pieces import Pieces
from tonnage.serving.requests import ChatRequest, CompletionRequest, Refused

LOOK_SECONDS = 0.2
"""Between two looks whether somebody still waits for an answer."""


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    """From which it came."""


@dataclass(frozen=True)
class Begun:
    """An answer was begun."""

    prompt_tokens: int


@dataclass(frozen=True)
class Ended:
    """An answer is over."""

    reason: Literal["stop", "length"]
    tokens: int
    """That were written, without the one that ends a turn."""


class Engine:
    """A model, and a line of those who wait for it."""

    def __init__(self, loaded: Loaded, *, max_tokens: int, most_waiting: int) -> None:
        """``max_tokens``: longest answer where nobody says; ``most_waiting``: how many may wait, the one that is
        answered among them."""
        self.loaded = loaded
        self._max_tokens = max_tokens
        self._most_waiting = most_waiting
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._closing = Event()

    def close(self) -> None:
        """End the answer that is being written, and all that wait."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def answer(
        self, request: ChatRequest | CompletionRequest, left: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[Begun | AnswerPart | Ended]:
        """An answer as it is written: ``Begun``, pieces, ``Ended``. Ends early, and stops the model, when ``left`` says
        that nobody waits any more, or when the iterator is closed.

        Raises:
            Refused: too many wait, or the request cannot be answered.
        """
        if self._waiting >= self._most_waiting:
            raise Refused(f"{self._waiting} requests wait already", status=429, code="rate_limit_exceeded")
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Begun | AnswerPart | Ended | BaseException]()
        enough = Event()

        def tell(event: Begun | AnswerPart | Ended | BaseException) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        self._waiting += 1
        work = self._thread.submit(self._work, request, tell, enough)
        try:
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), LOOK_SECONDS)
                except TimeoutError:
                    if await left() or self._closing.is_set():
                        return
                    continue
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            self._waiting -= 1
            enough.set()
            work.cancel()

    def _work(
        self,
        request: ChatRequest | CompletionRequest,
        tell: Callable[[Begun | AnswerPart | Ended | BaseException], None],
        enough: Event,
    ) -> None:
        """Write one answer, in the thread of the model."""
        if enough.is_set():
            return
        try:
            prompt = self._prompt(request)
            decoding = self._decoding(request, len(prompt))
            tell(Begun(len(prompt)))
            self._write(request, prompt, decoding, tell, enough)
        except BaseException as error:
            tell(error)

    def _write(
        self,
        request: ChatRequest | CompletionRequest,
        prompt: Sequence[int],
        decoding: Decoding,
        tell: Callable[[AnswerPart | Ended], None],
        enough: Event,
    ) -> None:
        tokenizer, stops = self.loaded.tokenizer, self.loaded.stop_tokens
        pieces = Pieces(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)), request.stops)
        reached_end = False

        def take(token: Token) -> bool:
            nonlocal reached_end
            if token.id in stops:
                reached_end = True
                return True
            text, sent = pieces.add(token)
            if text:
                tell(AnswerPart(text, tuple(sent)))
            return pieces.stopped or enough.is_set() or self._closing.is_set()

        seed = secrets.randbits(63) if request.seed is None else request.seed
        write_tokens(self.loaded, prompt, decoding, take, seed=seed, num_likeliest=request.likeliest)
        text, sent = pieces.end()
        if text or sent:
            tell(AnswerPart(text, tuple(sent)))
        tell(Ended("stop" if reached_end or pieces.stopped else "length", len(pieces.tokens)))

    def _prompt(self, request: ChatRequest | CompletionRequest) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if isinstance(request, ChatRequest):
            try:
                return encode_prompt([message.as_ours() for message in request.messages], tokenizer)
            except UserError as error:
                raise Refused(error.problems[0].found, param="messages") from error
        if isinstance(request.prompt, str):
            ids: list[int] = tokenizer(request.prompt)["input_ids"]
            if not ids:
                raise Refused("prompt is empty", param="prompt")
            return ids
        num_tokens = int(self.loaded.model.get_input_embeddings().weight.shape[0])
        if unknown := [token for token in request.prompt if token >= num_tokens]:
            raise Refused(f"the model has no token {unknown[0]}: it knows {num_tokens:,}", param="prompt")
        return request.prompt

    def _decoding(self, request: ChatRequest | CompletionRequest, prompt_tokens: int) -> Decoding:
        longest = request.max_tokens
        if isinstance(request, ChatRequest) and longest is None:
            longest = request.max_completion_tokens
        positions = self.loaded.positions
        if positions is not None and prompt_tokens + (longest or 1) > positions:
            and_answer = f" and {longest:,} for the answer" if longest else ""
            raise Refused(
                f"the model has {positions:,} positions; the prompt has {prompt_tokens:,} tokens{and_answer}",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        temperature = 1.0 if request.temperature is None else request.temperature
        return Decoding(longest or self._max_tokens, temperature, 1.0 if request.top_p is None else request.top_p)
