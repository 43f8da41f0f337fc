"""One answer after another, in a thread of its own: what is asked beside it changes no answer.

A batch would be faster, and would add up in another order: now and then a token would be another one. Whoever needs the
speed serves the same directory with vLLM.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Literal

from tonnage.data.images.opening import located
from tonnage.errors import UserError
from tonnage.forms.conversation import Conversation, Image, RowError
from tonnage.forms.reader import conversation_of
from tonnage.inference.generate import Decoding, EncodedPrompt, Loaded, encode
from tonnage.inference.pieces import Token, pieces_of, text_after
from tonnage.inference.tokens import write_tokens
from tonnage.serving.requests import ChatRequest, CompletionRequest, Refused

IN_ITSELF = "send it as data:image/png;base64,..."
LOOK_SECONDS = 0.2
"""Between two looks whether somebody still waits for an answer."""


@dataclass(frozen=True)
class AnswerPart:
    text: str = ""
    tokens: tuple[Token, ...] = ()
    """From which it came."""


@dataclass(frozen=True)
class Begun:
    prompt_tokens: int


@dataclass(frozen=True)
class Ended:
    reason: Literal["stop", "length"]
    tokens: int
    """That were written, without the one that ends a turn."""
    text: str
    """The whole answer: where a decoder changes what it said, its pieces are another text."""


class Engine:
    """A model, and a line of those who wait for it."""

    def __init__(self, loaded: Loaded, *, max_tokens: int, most_waiting: int, images: Path | None = None) -> None:
        """``max_tokens``: longest answer where nobody says; ``most_waiting``: how many may wait, the one that is
        answered among them; ``images``: the folder of those that requests may name, besides those they hold."""
        self.loaded = loaded
        self._max_tokens = max_tokens
        self._most_waiting = most_waiting
        self._images = images
        self._waiting = 0
        self._letter: list[int] = loaded.tokenizer("a", add_special_tokens=False)["input_ids"]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._closing = Event()

    def close(self) -> None:
        """End the answer that is being written, and all that wait."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def text_of(self, token: int) -> str:
        """The text of a token after other text, with the space that it begins with."""
        return text_after(lambda tokens: str(self.loaded.tokenizer.decode(list(tokens))), self._letter, [token])

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
        looked = loop.time()
        try:
            while True:
                event = None
                with suppress(TimeoutError):
                    event = await asyncio.wait_for(queue.get(), LOOK_SECONDS)
                if loop.time() - looked >= LOOK_SECONDS:  # a fast model always has an event
                    if await left() or self._closing.is_set():
                        return
                    looked = loop.time()
                if isinstance(event, BaseException):
                    raise event
                if event is not None:
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
            decoding = self._decoding(request, len(prompt.ids))
            tell(Begun(len(prompt.ids)))
            self._write(request, prompt, decoding, tell, enough)
        except BaseException as error:
            tell(error)

    def _write(
        self,
        request: ChatRequest | CompletionRequest,
        prompt: EncodedPrompt,
        decoding: Decoding,
        tell: Callable[[AnswerPart | Ended], None],
        enough: Event,
    ) -> None:
        after = prompt.ids if isinstance(request, CompletionRequest) else ()
        pieces = pieces_of(self.loaded.tokenizer, request.stops, after)
        reached_end = False

        def take(token: Token) -> bool:
            nonlocal reached_end
            if token.id in self.loaded.stop_tokens:
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
        tell(Ended("stop" if reached_end or pieces.stopped else "length", len(pieces.tokens), pieces.whole))

    def _prompt(self, request: ChatRequest | CompletionRequest) -> EncodedPrompt:
        if isinstance(request, ChatRequest):
            try:
                prompt = encode(self.loaded, self._conversation(request))
            except UserError as error:
                raise Refused(error.problems[0].found, param="messages") from error
            if not prompt.ids:
                raise Refused("messages have no tokens, and one at least is needed: write some text", param="messages")
            return prompt
        if isinstance(request.prompt, str):
            ids: list[int] = self.loaded.tokenizer(request.prompt)["input_ids"]
            if not ids:
                raise Refused("prompt has no tokens, and one at least is needed: write some text", param="prompt")
            return EncodedPrompt(ids, [])
        num_tokens = int(self.loaded.model.get_input_embeddings().weight.shape[0])
        if unknown := [token for token in request.prompt if token >= num_tokens]:
            raise Refused(f"the model has no token {unknown[0]}: it knows {num_tokens:,}", param="prompt")
        return EncodedPrompt(request.prompt, [])

    def _conversation(self, request: ChatRequest) -> Conversation | list[dict[str, Any]]:
        """What is to be answered. Its images are in the request, or in the folder that is for that: whoever asks reads
        no other file of this machine, and makes it fetch none. Raises ``Refused``."""
        messages = [message.as_ours() for message in request.messages]
        if not any(message.images for message in request.messages):
            return messages
        if self.loaded.sight is None:
            raise Refused("an image, and a model that takes none", param="messages")
        try:
            conversation = conversation_of(messages)
            conversation.images = [self._located(image) for image in conversation.images]
        except RowError as error:
            raise Refused(error.reason, param="messages") from error
        return conversation

    def _located(self, image: Image) -> Image:
        if not image.path:
            return image
        if self._images is None:
            raise RowError("image", f"{image.path[:100]!r} is no image in the request itself; {IN_ITSELF}")
        return Image(str(located(image.path, self._images)))

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
