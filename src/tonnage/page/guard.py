"""Who may ask, and what the page may do.

The address that is printed holds a token behind ``#``, which browsers send to nobody; the page's script puts it into a
header of every question. So no other page can ask, not even if it knows the port: it cannot read the token, and a
browser lets it set no such header. Besides, a question must be for a name of this machine (against names that a
stranger points at it) and, where it says from which page it comes, from this page.
"""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tonnage.host.nodes import names_this_machine

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No script and no style sheet but our own, and no question to anybody else. Widths of bars are attributes."""
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}
OPEN = "/static/"
"""What holds nobody's data: the page itself, and what is below this."""


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Guard:
    """Passes on what may be asked, and refuses everything else before anybody reads it."""

    def __init__(self, app: ASGIApp, token: str, *, only_local: bool) -> None:
        self._app, self._token, self._only_local = app, token, only_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS.items()]
            await send(message)

        if why_not := self._why_not(scope):
            await JSONResponse({"error": why_not}, 403)(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)

    def _why_not(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._only_local and not names_this_machine(host):
            return "this page is for localhost alone"
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope.get('scheme', 'http')}://{host}":
            return "asked by another page"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            is_a_visit = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
            if not is_a_visit:
                return "asked by another page"
        if scope["path"] == "/" or scope["path"].startswith(OPEN):
            return "" if scope["method"] in ("GET", "HEAD") else "nothing is taken here"
        kind, _, word = headers.get("authorization", "").partition(" ")
        if kind != "Bearer" or not secrets.compare_digest(word.encode(), self._token.encode()):
            return "no token, or another one: open the address that tonnage page printed"
        return ""
