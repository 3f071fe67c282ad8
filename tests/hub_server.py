"""A stand-in for the hub's HTTP API on this machine: what the real client calls to make, fill and read a repository.

Repositories live in memory. ``stop`` closes the socket as a lost network does; ``start`` opens it again on the same port.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


@dataclass
class Commit:
    """One commit of a repository."""

    oid: str
    message: str
    paths: list[str]


@dataclass
class Repository:
    """A model repository: files of each branch and its commits."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[Commit] = field(default_factory=list)
    lfs: set[str] = field(default_factory=set)

    @property
    def files(self) -> dict[str, bytes]:
        """Files of ``main``."""
        return self.branches["main"]

    @property
    def sha(self) -> str:
        """The last commit."""
        return self.commits[-1].oid if self.commits else "0" * 40


class HubServer:
    """The server and its state; use as a context manager."""

    def __init__(self, *, user: str = "me", token: str = "hf_" + "t" * 34) -> None:
        self.user, self.token = user, token
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.on_commit: Callable[[Commit], None] = lambda commit: None
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._port = 0
        self.is_up = False

    @property
    def endpoint(self) -> str:
        """Value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Open the socket."""
        self.is_up = True
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the socket and every connection: clients find nobody there."""
        self.is_up = False
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def __enter__(self) -> HubServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def environment(self) -> dict[str, str]:
        """Variables that lead the real client here, over plain HTTP uploads."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        """Read a repository or a file."""
        self._answer("GET")

    def do_HEAD(self) -> None:
        """Read what is known of a file."""
        self._answer("HEAD")

    def do_POST(self) -> None:
        """Make, prepare, commit."""
        self._answer("POST")

    def do_PUT(self) -> None:
        """Take the bytes of a large file."""
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        if not self.hub.is_up:  # a connection that was kept open
            self.close_connection = True
            return None
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{method} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for pattern, wanted, action, open_to_all in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method in wanted:
                if not open_to_all and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
                    return self._json({"error": "Invalid username or password."}, 401)
                return action(self, body, **found.groupdict())
        return self._json({"error": f"no route for {method} {path}"}, 501)

    def _json(self, content: Any, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json", **headers})

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None:
            self._json({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        return found

    def create(self, body: bytes) -> None:
        """POST /api/repos/create."""
        asked = json.loads(body)
        owner = asked.get("organization") or self.hub.user
        name = f"{owner}/{asked['name']}"
        if owner != self.hub.user:
            return self._json({"error": f"You don't have the rights to create {name}"}, 403)
        status = 409 if name in self.hub.repositories else 200
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.repositories.setdefault(name, Repository(private))
        url = f"{self.hub.endpoint}/{name}"
        return self._json({"url": url, "name": name, "error": "You already created this repo"}, status)

    def info(self, body: bytes, name: str, revision: str = "main") -> None:
        """GET /api/models/NAME."""
        repository = self._repository(name)
        if repository is not None:
            files = repository.branches.get(revision, repository.files)
            self._json(
                {
                    "_id": "1" * 24,
                    "id": name,
                    "modelId": name,
                    "sha": repository.sha,
                    "private": repository.private,
                    "siblings": [{"rfilename": path} for path in files],
                }
            )

    def tree(self, body: bytes, name: str, revision: str) -> None:
        """GET /api/models/NAME/tree/REVISION."""
        repository = self._repository(name)
        if repository is not None:
            files = repository.branches.get(revision, repository.files)
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": _git_oid(data)}
                    for path, data in files.items()
                ]
            )

    def branch(self, body: bytes, name: str, branch: str) -> None:
        """POST /api/models/NAME/branch/BRANCH."""
        repository = self._repository(name)
        if repository is not None:
            status = 409 if branch in repository.branches else 201
            repository.branches.setdefault(branch, dict(repository.files))
            self._json({"error": "Reference already exists"}, status)

    def validate(self, body: bytes) -> None:
        """POST /api/validate-yaml."""
        content = json.loads(body)["content"]
        problem = [] if content.startswith("---\n") else [{"message": "no metadata"}]
        self._json({"errors": problem, "warnings": []}, 400 if problem else 200)

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        """POST /api/models/NAME/preupload/REVISION: which files are large, which are there already."""
        repository = self._repository(name)
        if repository is None:
            return
        there = repository.branches[revision]
        files = [
            {
                "path": asked["path"],
                "uploadMode": "lfs" if asked["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": self._oid(there, asked["path"]),
            }
            for asked in json.loads(body)["files"]
        ]
        self._json({"files": files})

    @staticmethod
    def _oid(there: dict[str, bytes], path: str) -> str | None:
        if path not in there:
            return None
        large = path.endswith(LFS_SUFFIXES)
        return hashlib.sha256(there[path]).hexdigest() if large else _git_oid(there[path])

    def batch(self, body: bytes, name: str) -> None:
        """POST /NAME.git/info/lfs/objects/batch: where to put large files."""
        objects = []
        for asked in json.loads(body)["objects"]:
            oid = asked["oid"]
            found: dict[str, Any] = {"oid": oid, "size": asked["size"]}
            if oid not in self.hub.blobs:
                found["actions"] = {
                    "upload": {"href": f"{self.hub.endpoint}/lfs/{oid}"},
                    "verify": {"href": f"{self.hub.endpoint}/{name}.git/info/lfs/verify"},
                }
            objects.append(found)
        self._json({"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        """PUT /lfs/OID."""
        if hashlib.sha256(body).hexdigest() != oid:
            return self._json({"error": "the bytes have another hash"}, 400)
        self.hub.blobs[oid] = body
        return self._send(b"", 200, {})

    def verify(self, body: bytes, name: str) -> None:
        """POST /NAME.git/info/lfs/verify."""
        asked = json.loads(body)
        good = len(self.hub.blobs.get(asked["oid"], b"")) == asked["size"]
        self._json({}, 200 if good else 404)

    def commit(self, body: bytes, name: str, revision: str) -> None:
        """POST /api/models/NAME/commit/REVISION: newline-separated JSON."""
        repository = self._repository(name)
        if repository is None:
            return
        message, changed = "", {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                changed[value["path"]] = self.hub.blobs[value["oid"]]
                repository.lfs.add(value["path"])
            else:
                return self._json({"error": f"no operation {entry['key']}"}, 501)
        repository.branches[revision].update(changed)
        oid = hashlib.sha1(f"{len(repository.commits)}{name}".encode()).hexdigest()
        commit = Commit(oid, message, sorted(changed))
        repository.commits.append(commit)
        repository.branches[oid] = dict(
            repository.branches[revision]
        )  # a commit can be asked for by its name
        url = f"{self.hub.endpoint}/{name}/commit/{oid}"
        self._json({"success": True, "commitOid": oid, "commitUrl": url})
        self.hub.on_commit(commit)

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        """GET or HEAD /NAME/resolve/REVISION/PATH."""
        repository = self._repository(name)
        if repository is None:
            return
        data = repository.branches.get(revision, repository.files).get(path)
        if data is None:
            self._json({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": repository.sha, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        self._send(data, 200, headers)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_NAME = r"(?P<name>[^/]+/[^/]+?)"
_API = rf"/api/models/{_NAME}"
# (path, methods, action, without a token?)
ROUTES: list[tuple[str, tuple[str, ...], Callable[..., None], bool]] = [
    (r"/api/repos/create", ("POST",), _Handler.create, False),
    (r"/api/validate-yaml", ("POST",), _Handler.validate, True),
    (rf"{_API}/preupload/(?P<revision>.+)", ("POST",), _Handler.preupload, False),
    (rf"{_API}/commit/(?P<revision>.+)", ("POST",), _Handler.commit, False),
    (rf"{_API}/branch/(?P<branch>.+)", ("POST",), _Handler.branch, False),
    (rf"{_API}/tree/(?P<revision>[^/]+)", ("GET",), _Handler.tree, False),
    (rf"{_API}/revision/(?P<revision>.+)", ("GET",), _Handler.info, False),
    (_API, ("GET",), _Handler.info, False),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", ("POST",), _Handler.batch, False),
    (rf"/{_NAME}\.git/info/lfs/verify", ("POST",), _Handler.verify, False),
    (r"/lfs/(?P<oid>[0-9a-f]{64})", ("PUT",), _Handler.put, True),
    (rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", ("GET", "HEAD"), _Handler.resolve, False),
]
