"""A run's report as a live page: a server for this machine only, read only, protected by a token in the address.

It answers ``GET /TOKEN/`` (the page), ``/TOKEN/state`` (JSON, which the page asks for) and nothing else. A request whose
``Host`` is another name is refused, so that a page elsewhere cannot reach it through a name of its own.
"""

from __future__ import annotations

import errno
import json
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from algorist.errors import ConfigError
from algorist.report.build import render
from algorist.report.collect import collect
from algorist.store.redact import with_texts
from algorist.store.run_folder import RunFolder
from algorist.store.safe_text import printable

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
GROWING = ("metrics.jsonl", "stages.json", "trackers.json", "eval", "rollouts")
"""What a run adds to; the page is made again when one of these changes."""


def version_of(folder: RunFolder) -> str:
    """Return a text that changes when the run has grown."""
    files = [file for name in GROWING for file in [folder.path / name, *(folder.path / name).glob("*")]]
    newest = [stat for file in files if (stat := _stat(file))]
    return f"{sum(size for size, _ in newest)}-{max((time for _, time in newest), default=0)}-{len(newest)}"


def _stat(file: Any) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except OSError:  # a temporary file that was renamed
        return None
    return stat.st_size, stat.st_mtime_ns


class LivePage:
    """The page and the state of one run; the page is made once for each version of the run."""

    def __init__(self, folder: RunFolder, state: Callable[[], dict[str, Any]], every: float) -> None:
        self.folder, self._state, self.every = folder, state, every
        self._made: tuple[str, str] = ("", "")
        self._lock = threading.Lock()

    def page(self) -> str:
        """Return the report of now, with what makes it live."""
        with self._lock:
            version = version_of(self.folder)
            if version != self._made[0]:
                live = {"every": self.every, "version": version}
                self._made = version, render(collect(self.folder), live=live)
            return self._made[1]

    def state(self) -> str:
        """Return where the run is as JSON."""
        state = with_texts({**self._state(), "version": version_of(self.folder)}, printable)
        return json.dumps(state, default=str)


def make_server(live: LivePage, port: int = 0, token: str | None = None) -> tuple[ThreadingHTTPServer, str]:
    """Return a server that is bound but does not serve yet, and the address to open.

    Args:
        live: The page.
        port: 0 takes any that is free.
        token: The secret in the address; a new one when left out.

    Raises:
        ConfigError: The port cannot be taken.
    """
    secret = token or secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "algorist", ""
        timeout = 30

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            parts = self.path.partition("?")[0].split("/")
            known = len(parts) == 3 and secrets.compare_digest(parts[1].encode(), secret.encode())
            if host not in (HOST, "localhost") or not known or parts[2] not in ("", "state"):
                self.answer(404, "text/plain", "not found\n")
                return
            try:
                kind, text = (
                    ("text/html", live.page()) if not parts[2] else ("application/json", live.state())
                )
            except Exception as error:  # the run continues, and so does the page
                self.answer(503, "text/plain", printable(f"{type(error).__name__}: {error}\n"))
                return
            self.answer(200, kind, text)

        do_HEAD = do_GET

        def answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "replace")
            self.send_response(code)
            for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing: the address holds the token."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A browser that went away is no news."""

    try:
        server = Server((HOST, port), Handler)
    except OSError as error:
        taken = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise ConfigError(
            f"port {port} of {HOST} {taken}; take another, --port {port + 1}, or leave it out"
        ) from None
    except OverflowError:
        raise ConfigError(f"--port is {port}; expected a number from 1 to 65535, or 0 for any") from None
    return server, f"http://{HOST}:{server.server_address[1]}/{secret}/"
