"""``--serve``: the pages of all runs of this user, on 127.0.0.1 only. Read only; the pages are made when asked for.

Runs in the process that the user started. Everything is below a token in the address, without which nothing is told:
other users of this machine can connect, too. A name in an address is only compared with those of known runs, never
joined to a path. The Host header is checked, so that a web page cannot reach the server by a name of its own. The port
in it is not: ``ssh -L`` may forward another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
import re
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.features.come_back import past_runs
from ddplaunch.features.page import output, render
from ddplaunch.features.page.reading import last_part
from ddplaunch.features.runs import run_folders

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.cli.commands import Request

_ADDRESS = "127.0.0.1"
_HOSTS = (_ADDRESS, "localhost")
_REQUEST_S, _ANSWER_S = 10.0, 60.0
"""Seconds for a client to send its request, and to take the answer."""

_MAX_CLIENTS = 16
_FREED_S = 1.0
"""Within this time, a thread whose client was cut off has ended."""

_MAX_LISTED = 1000
_FRESH_S = 5.0
"""A page is made at most so often; meanwhile the last one is shown."""

_NOTHING = "default-src 'none'; "
_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_MAX_FILE_BYTES = 4 << 20

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def serve(request: Request) -> None:
    """Serve at the port that is the request's value, 0: any free one, until Ctrl-C.

    Raises:
        LaunchError: the port cannot be used.
    """
    try:
        server = _Server(request.value, request.log_dir)
    except OSError as error:
        raise LaunchError(
            f"--serve {request.value}: {error.strerror}", "Another port may be free.", NODE_NOT_READY
        ) from None
    # Whoever has read the address may press Ctrl-C at once.
    with server, contextlib.suppress(KeyboardInterrupt):
        request.show(server.url)
        request.report("the pages of your runs are at this address, on this machine only; Ctrl-C ends it")
        server.serve_forever()


class _Server(ThreadingHTTPServer):
    """Listens on the loopback address; ``url`` is the address of the index."""

    request_queue_size = 32

    def __init__(self, port: int, log_dir: str | None) -> None:
        super().__init__((_ADDRESS, port), _Handler)
        self.log_dir, self.token = log_dir, secrets.token_urlsafe(24)
        self.asking: dict[socket.socket, float] = {}
        self.url = f"http://{_ADDRESS}:{self.server_port}/{self.token}/"
        self._places = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._making = threading.Lock()
        self._made: dict[Path, tuple[float, str]] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread, if there are not too many (overrides ``ThreadingMixIn``).

        Whoever has not yet shown the token gives up the place to a new one: any process of the machine can connect.
        """
        if not self._places.acquire(blocking=False):
            for oldest in list(self.asking)[:1]:
                _cut_off(oldest)
            if not self._places.acquire(timeout=_FREED_S):
                self.shutdown_request(request)
                return
        self.asking[request] = time.monotonic() + _REQUEST_S
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # The limit of threads.
            self._end(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client (overrides ``ThreadingMixIn``)."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def _end(self, request: Any) -> None:
        self.asking.pop(request, None)
        self._places.release()

    def service_actions(self) -> None:
        """Cut off clients that have not sent their request in time; each byte of it would be in time (overrides)."""
        now = time.monotonic()
        for request in [request for request, deadline in list(self.asking.items()) if now > deadline]:
            _cut_off(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no problem (overrides ``BaseServer``)."""

    def answer(self, name: str) -> tuple[str, bytes] | None:
        """Type and content at this part of an address: the index, a run's page, a file that it names; None: nothing."""
        if not name:
            return _HTML, _bytes(self._index())
        key, _, file = name.partition("/")
        # Reports are not read here: those of a thousand runs take seconds.
        folders = (run_folders.run_of(launchers[0]) for launchers in past_runs.all_folders(self.log_dir))
        folder = next((folder for folder in folders if _key(folder) == key), None)
        if folder is None:
            return None
        text = self._page_of(folder)
        if not file:
            return _HTML, _bytes(text)
        # No other name is ever joined to a path. The page may be older than what is there now.
        path = folder / _file_name(file) if file in _links(text) else None
        return (_TEXT, _last_part(path)) if path and output.is_file_in(folder, path) else None

    def _index(self) -> str:
        runs = past_runs.found(self.log_dir)[:_MAX_LISTED]
        listed = sorted(runs, key=lambda found: found[0].result != past_runs.RUNNING)
        return index([(f"{_key(run_folders.run_of(folders[0]))}/", *past_runs.cells(run)) for run, folders in listed])

    def _page_of(self, folder: Path) -> str:
        with self._making:  # One at a time: a page takes up to some seconds of CPU.
            made_at, text = self._made.get(folder, (0.0, ""))
            if time.monotonic() - made_at > _FRESH_S or not text:
                text = render.page(folder)
                self._made = {folder: (time.monotonic(), text)}
            return text


def _cut_off(request: socket.socket) -> None:
    """The thread that serves it then ends."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _links(page: str) -> set[str]:
    """The addresses of files to which a page leads, as they stand there."""
    return {html.unescape(address) for address in re.findall(r' href="([^"#]+)"', page)}


def _file_name(address: str) -> str:
    return os.fsdecode(urllib.parse.unquote_to_bytes(address))


def _last_part(path: Path) -> bytes:
    """A file, or of a long one its last lines."""
    data = last_part(path, _MAX_FILE_BYTES)
    is_cut = os.path.isfile(path) and path.stat().st_size > _MAX_FILE_BYTES
    return (
        f"... only the last {_MAX_FILE_BYTES >> 20} MB of {path.name} are here\n".encode() if is_cut else b""
    ) + data


def _key(folder: Path) -> str:
    """The folder of a run in an address: a name may have any characters, and several runs one name."""
    return hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()


def index(runs: Sequence[tuple[str, ...]]) -> str:
    """The list, in this order. Each run: the address of its page, and what ``past_runs.cells`` says of it."""
    style, script = render.source("page.css"), render.source("index.js")
    template = render.environment().get_template("index.html.j2")
    policy = render.policy(style, script)
    return template.render(runs=runs, policy=policy, style=Markup(style), script=Markup(script))


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    timeout = _ANSWER_S
    server_version, sys_version = "ddplaunch", ""

    def do_GET(self) -> None:
        """Answer with a page, or 404."""
        self._send(*self._found(), with_body=True)

    def do_HEAD(self) -> None:
        """As GET, without the page."""
        self._send(*self._found(), with_body=False)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request, without a text (overrides ``BaseHTTPRequestHandler``)."""
        self.close_connection = True
        self._send(code, _TEXT, b"", with_body=False)

    def _send(self, status: int, kind: str, body: bytes, *, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header(
            "Content-Security-Policy", f"{'' if body and kind == _HTML else _NOTHING}frame-ancestors 'none'"
        )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _found(self) -> tuple[HTTPStatus, str, bytes]:
        if self.headers.get("Host", "").partition(":")[0].lower() not in _HOSTS:
            return HTTPStatus.MISDIRECTED_REQUEST, _TEXT, b""
        _, _, rest = self.path.partition("/")
        token, slash, name = rest.partition("?")[0].partition("/")
        if not slash or not secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            return HTTPStatus.NOT_FOUND, _TEXT, b""
        self.server.asking.pop(self.request, None)
        found = self.server.answer(name)
        return (HTTPStatus.OK, *found) if found else (HTTPStatus.NOT_FOUND, _TEXT, b"")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged (overrides ``BaseHTTPRequestHandler``): addresses have the token."""
