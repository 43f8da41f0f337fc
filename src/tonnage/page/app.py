"""The routes: the page itself, what it reads of runs, and the commands that it begins."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tonnage import __version__
from tonnage.config import as_overrides
from tonnage.errors import TonnageError, UserError, user_error
from tonnage.files.places import check_vacant
from tonnage.page.chats import Chats, served_at
from tonnage.page.commands import Command, Commands
from tonnage.page.events import Channel
from tonnage.page.folder import Folder
from tonnage.page.guard import Guard
from tonnage.page.looks import beside, first_look, further_looks, plain, saved
from tonnage.page.plans import hardware, inspected, planned
from tonnage.page.rows import Row
from tonnage.page.starts import Starts
from tonnage.page.tags import Tags, write_tags
from tonnage.page.watched import Watched
from tonnage.page.words import as_yaml, check_author, checked, checked_model, checked_name
from tonnage.report.gathered import gather
from tonnage.report.page import MOST_RUNS, render_sections
from tonnage.rundir.directory import RunDirectory

LIST_SECONDS, RUN_SECONDS = 3.0, 2.0
"""Between two looks at all runs, and at one that somebody watches."""
MOST_CHANNELS = 1000
"""Runs of which it is known what those who watched them were told last."""
MOST_BYTES = 1 << 20
"""Of a question."""
MOST_ROWS = 1000
"""That are shown of data at once."""
HARDWARE = re.compile(r"(|[A-Za-z0-9][A-Za-z0-9 x×*:._-]{0,99})")
TEMPLATE = re.compile(r"[a-z][a-z0-9_-]{0,40}")
JSON = "application/json"
STATIC = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
OF_THE_REPORT = ("page.css", "curves.js")
"""Files that the report has as well."""


class Page:
    """What answers: the runs below a folder, those who watch them, and the commands that were begun."""

    def __init__(self, folder: Path) -> None:
        self.folder = Folder(folder)
        self.watched = Watched(self.folder)
        self.commands = Commands(Path.cwd())
        self.starts = Starts(self.commands)
        self.chats = Chats(self.commands)
        self._list = Channel(self._changed_rows, LIST_SECONDS)
        self._rows: dict[str, Row] = {}
        """As those who watch the list were told last."""
        self._channels: dict[str, Channel] = {}

    async def runs(self, _: Request) -> Response:
        rows = await to_thread.run_sync(self.watched.rows)
        return answer({"folder": str(self.folder.path), "runs": [asdict(row) for row in rows]})

    async def runs_live(self, _: Request) -> Response:
        rows = await to_thread.run_sync(self.watched.rows)
        return stream(self._list.events(news_of([row.run for row in rows], rows)))

    async def run(self, request: Request) -> Response:
        """What a live view of a run begins with."""
        return answer(await to_thread.run_sync(first_look, self.watched, name_of(request)))

    async def run_live(self, request: Request) -> Response:
        """The same, and then what is new."""
        name = name_of(request)
        first = await to_thread.run_sync(first_look, self.watched, name)
        if name not in self._channels:  # from here on nobody waits, or who came at once would make a channel each
            if len(self._channels) > MOST_CHANNELS:
                self._channels = {run: channel for run, channel in self._channels.items() if channel.is_watched}
            self._channels[name] = Channel(further_looks(self.watched, name, first), RUN_SECONDS)
        return stream(self._channels[name].events(first))

    async def sections(self, request: Request) -> Response:
        """What the report says of a run, as HTML that its template has escaped."""
        run = self._run(request)
        gathered = await to_thread.run_sync(gather, run.path)
        return HTMLResponse(await to_thread.run_sync(render_sections, gathered))

    async def log(self, request: Request) -> Response:
        return answer({"text": await to_thread.run_sync(self.watched.log, name_of(request))})

    async def output(self, request: Request) -> Response:
        rank = request.query_params.get("rank", "0")
        if not (rank.isascii() and rank.isdecimal() and len(rank) < 7):
            raise user_error(f"rank {rank[:20]!r}", "the number of a worker")
        return answer({"text": await to_thread.run_sync(self.watched.output, name_of(request), int(rank))})

    async def saved(self, request: Request) -> Response:
        return answer({"saved": await to_thread.run_sync(saved, self._run(request), self.folder.path)})

    async def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 0 < len(names) <= MOST_RUNS:
            raise user_error(f"{len(names)} runs", f"one to {MOST_RUNS} of them")
        return answer(await to_thread.run_sync(beside, self.watched, names))

    async def tags(self, request: Request) -> Response:
        body = await body_of(request, run=str, tags=list, note=str)
        if not all(isinstance(tag, str) for tag in body["tags"]):
            raise user_error("a tag that is no text", "tags: a list of texts")
        run = self.folder.run(body["run"])
        return answer(asdict(await to_thread.run_sync(write_tags, run, Tags(body["tags"], body["note"]))))

    async def stop(self, request: Request) -> Response:
        """``tonnage stop RUN``."""
        return await self._of_a_run(request, "stop")

    async def resume(self, request: Request) -> Response:
        """``tonnage train --resume RUN``, of a run whose config no stranger has written."""
        return await self._of_a_run(request, "train", "--resume")

    async def verify(self, request: Request) -> Response:
        """``tonnage verify DIR``, of a run, a checkpoint or an export."""
        path = self.folder.inside((await body_of(request, path=str))["path"])
        if not path.is_dir():
            raise user_error("no such directory", "a checkpoint, an export or a run", where=str(path))
        return answer(self.commands.start(["verify", self.shown(path)]).tell())

    async def choices(self, _: Request) -> Response:
        """What a plan may be made for, and configs whose data may be shown."""
        configs = await to_thread.run_sync(lambda: list(self.folder.configs()))
        rows = await to_thread.run_sync(self.watched.rows)
        models = sorted({row.model.partition(",")[0] for row in rows if "/" in row.model})
        return answer({"hardware": hardware(), "configs": configs, "models": models})

    async def plan(self, request: Request) -> Response:
        """``tonnage plan MODEL KEY=VALUE ... --json``."""
        body = await body_of(request, model=str, words=list, hardware=str, in_place_of=str)
        model, words = self._asked(body)
        if not HARDWARE.fullmatch(body["hardware"]):
            raise user_error(f"hardware {body['hardware'][:60]!r}", "a name such as 8xH100", "8xH100")
        elsewhere = ["--hardware", body["hardware"]] if body["hardware"] else []
        line = ["plan", model, *words, *elsewhere, "--json"]
        return answer(self.commands.start(line, in_place_of=body["in_place_of"]).tell())

    async def planned(self, request: Request) -> Response:
        content = self.commands.result(command_of(request))
        return answer(await to_thread.run_sync(planned, content))

    async def config(self, request: Request) -> Response:
        model, words = self._asked(await body_of(request, model=str, words=list))
        return answer({"yaml": as_yaml(model, words)})

    async def start(self, request: Request) -> Response:
        """Write a config, and ``tonnage train`` it."""
        body = await body_of(request, model=str, words=list, name=str)
        model, words = self._asked(body)
        name = checked_name(body["name"])
        path, run = self.folder.inside(f"{name}.yaml"), self.folder.inside(name)
        check_vacant(run, "a name that is free", "choose another name")  # before there is a config of that name
        text = as_yaml(model, [*words, *as_overrides({"output": self.shown(run)})])
        return answer(self.starts.start(path, text, run, self.shown(path)).tell())

    async def inspect(self, request: Request) -> Response:
        """``tonnage inspect CONFIG KEY=VALUE ... --json``, of a run or of a config below the folder."""
        body = await body_of(request, config=str, words=list, rows=int, in_place_of=str)
        path = self.folder.inside(body["config"])
        config = path / "config.yaml" if path.is_dir() else path
        if not config.is_file() or not 0 < body["rows"] <= MOST_ROWS:
            raise user_error(f"{body['config'][:60]!r}, {body['rows']} rows", f"a config, and 1 to {MOST_ROWS:,} rows")
        words = checked(self.folder, self.commands.folder, body["words"])
        line = ["inspect", self.shown(config), *words, "--rows", str(body["rows"]), "--json"]
        check_author(config, line)
        return answer(self.commands.start(line, in_place_of=body["in_place_of"]).tell())

    async def inspected(self, request: Request) -> Response:
        content = self.commands.result(command_of(request))
        return answer(await to_thread.run_sync(inspected, content) if content.strip() else None)

    async def load(self, request: Request) -> Response:
        """``tonnage serve RUN|MODEL``, to talk to it."""
        body = await body_of(request, model=str, template=str)
        model, template = body["model"], body["template"]
        if not TEMPLATE.fullmatch(template):
            raise user_error(f"template {template[:60]!r}", "the name of a template, or auto", "auto")
        path = self.folder.inside(model)
        word = self.shown(path) if path.is_dir() else checked_model(self.folder, self.commands.folder, model)
        check_author(RunDirectory(path).config, ["serve", word])
        return answer(self.chats.open(word, template).tell())

    async def served(self, request: Request) -> Response:
        """Whether a model is loaded, and what it is called."""
        command = self.commands.get(command_of(request))
        at = served_at(command)
        return answer({**command.tell(), "model": at[0] if at else None})

    async def chat(self, request: Request) -> Response:
        """A question to a model, as its endpoint takes it; the answer as it comes."""
        body = await body_of(request, command=str, question=dict)
        pieces = self.chats.ask(body["command"], json.dumps(body["question"]).encode())
        status = int(await anext(pieces))
        return StreamingResponse(pieces, status, media_type="text/event-stream" if status == 200 else JSON)

    async def command(self, request: Request) -> Response:
        self.starts.remove_refused()
        return answer(self.commands.get(command_of(request)).tell())

    async def all_commands(self, _: Request) -> Response:
        return answer({"commands": self.commands.tell()})

    async def end_command(self, request: Request) -> Response:
        """End a command, as Ctrl-C does."""
        command: Command = self.commands.get((await body_of(request, command=str))["command"])
        command.end()
        return answer(command.tell())

    def shown(self, path: Path) -> str:
        """A path as a word of a command that is carried out here."""
        name = os.path.relpath(path, self.commands.folder)
        word = str(path) if name.startswith("..") else name
        return f"./{word}" if word.startswith("-") else word

    def _asked(self, body: dict[str, Any]) -> tuple[str, list[str]]:
        here = self.commands.folder
        return checked_model(self.folder, here, body["model"]), checked(self.folder, here, body["words"])

    async def _of_a_run(self, request: Request, *words: str) -> Response:
        """Carry out a command whose last word is the run that is asked for."""
        run = self.folder.run((await body_of(request, run=str))["run"])
        line = [*words, self.shown(run.path)]
        if words[0] == "train":
            check_author(run.config, line, runs_code=True)
        return answer(self.commands.start(line).tell())

    def _run(self, request: Request) -> RunDirectory:
        return self.folder.run(name_of(request))

    def _changed_rows(self) -> dict[str, Any] | None:
        """The names of all runs, and the rows that have changed since the last look."""
        before, self._rows = self._rows, {row.run: row for row in self.watched.rows()}
        changed = [row for name, row in self._rows.items() if row != before.get(name)]
        return news_of(list(self._rows), changed) if changed or self._rows.keys() != before.keys() else None


def create_app(folder: Path, token: str, *, only_local: bool) -> Starlette:
    """The page over the runs below ``folder``, for those who have the ``token``; ``only_local``: on this machine."""
    page = Page(folder)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        page.commands.close()

    get, post = Route, partial(Route, methods=["POST"])
    routes = [
        get("/", partial(static, "index.html")),
        get("/static/{name}", static_named),
        get("/api/runs", page.runs),
        get("/api/runs/live", page.runs_live),
        get("/api/run", page.run),
        get("/api/run/live", page.run_live),
        get("/api/run/sections", page.sections),
        get("/api/run/log", page.log),
        get("/api/run/output", page.output),
        get("/api/run/saved", page.saved),
        get("/api/compare", page.compare),
        post("/api/run/tags", page.tags),
        post("/api/run/stop", page.stop),
        post("/api/run/resume", page.resume),
        post("/api/verify", page.verify),
        get("/api/choices", page.choices),
        post("/api/plan", page.plan),
        get("/api/planned", page.planned),
        post("/api/config", page.config),
        post("/api/start", page.start),
        post("/api/inspect", page.inspect),
        get("/api/inspected", page.inspected),
        post("/api/chat/load", page.load),
        get("/api/chat/served", page.served),
        post("/api/chat", page.chat),
        get("/api/command", page.command),
        get("/api/commands", page.all_commands),
        post("/api/command/end", page.end_command),
    ]
    handlers: dict[Any, Any] = {TonnageError: refuse, HTTPException: refuse_route}
    guard = Middleware(Guard, token, only_local=only_local)
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan, middleware=[guard])
    app.state.page = page
    return app


def answer(value: Any) -> Response:
    """Plain values as JSON, with all text made safe to show."""
    return Response(json.dumps(plain(value), separators=(",", ":"), allow_nan=False), media_type=JSON)


def news_of(names: list[str], rows: Sequence[Row]) -> dict[str, Any]:
    """What those who watch the list are told: the names of all runs, and rows that are new to them."""
    return {"names": names, "rows": [plain(asdict(row)) for row in rows]}


def stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


def name_of(request: Request) -> str:
    return request.query_params.get("run", "")


def command_of(request: Request) -> str:
    return request.query_params.get("command", "")


async def body_of(request: Request, **fields: type) -> dict[str, Any]:
    """What was sent, a JSON object of these fields alone.

    Raises:
        UserError: it is something else.
    """
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MOST_BYTES:
            raise user_error(f"more than {MOST_BYTES:,} bytes", "a shorter question")
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    try:
        value = json.loads(content) if kind == "application/json" else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise user_error("another question", f"a JSON object of {', '.join(fields)}")
    for name, type_ in fields.items():
        if not isinstance(value[name], type_):
            raise user_error(f"{name} is a {type(value[name]).__name__}", f"a {type_.__name__}")
    return value


async def static(name: str, _: Request) -> Response:
    ending = name.rpartition(".")[2]
    package = "tonnage.report" if name in OF_THE_REPORT else "tonnage.page"
    content = files(package).joinpath(name if name in OF_THE_REPORT else f"static/{name}").read_bytes()
    if name == "index.html":
        return HTMLResponse(content.replace(b"VERSION", __version__.encode()))
    return Response(content, media_type=STATIC[ending])


async def static_named(request: Request) -> Response:
    name = request.path_params["name"]
    own = {entry.name for entry in files("tonnage.page").joinpath("static").iterdir()} - {"index.html"}
    if name not in own | set(OF_THE_REPORT):
        raise HTTPException(404)
    return await static(name, request)


async def refuse(_: Request, error: TonnageError) -> Response:
    status = 400 if isinstance(error, UserError) else 500
    return JSONResponse({"error": plain(str(error))}, status)


async def refuse_route(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)
