"""A Hub server on the loopback interface, with the protocol that loading and pushing need."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """Files by path, for each branch or tag; clients need `token` if it is not None."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None

    def commit(self, revision: str) -> str:
        digest = hashlib.sha1(revision.encode())
        for path, content in sorted(self.revisions[revision].items()):
            digest.update(path.encode() + b"\0" + content)
        return digest.hexdigest()

    def resolve(self, revision: str) -> str | None:
        """The branch that `revision`, a branch or a commit, stands for."""
        matches = (name for name in self.revisions if revision in (name, self.commit(name)))
        return next(matches, None)


@dataclass
class Hub:
    """The server's repositories, and the requests that it got.

    Of the paths in `breaks_off` only the first half ever arrives.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    breaks_off: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)

    def add(self, name: str, folder: Path, revision: str = "main", prefix: str = "", token: str | None = None) -> Repo:
        repo = self.repos.setdefault(name, Repo())
        repo.token = token
        files = {
            prefix + str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        repo.revisions.setdefault(revision, {}).update(files)
        return repo


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a Hub until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args) -> None:
        """Log nothing: the tests read `hub.requests`."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/.*)?", path):
            self._tree(match[1], match[2])
        else:
            self._fail(404, "EntryNotFound")

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            self.hub.repos.setdefault(name, Repo({"main": {}}))
            self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": name})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._json({"files": [file | {"shouldIgnore": False} for file in files]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            self._commit(match[1], match[2], body)
        elif path == "/api/validate-yaml":
            self._json({"warnings": [], "errors": []})
        else:
            self._fail(404, "EntryNotFound")

    def _find(self, name: str, revision: str) -> tuple[Repo, str] | None:
        repo = self.hub.repos.get(name)
        allowed = repo is not None and repo.token in (None, self.headers.get("Authorization", "")[len("Bearer ") :])
        if not allowed:
            self._fail(401, "RepoNotFound")
            return None
        branch = repo.resolve(revision)
        if branch is None:
            self._fail(404, "RevisionNotFound")
            return None
        return repo, branch

    def _resolve(self, name: str, revision: str, path: str) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        repo, branch = found
        content = repo.revisions[branch].get(path)
        if content is None:
            return self._fail(404, "EntryNotFound", repo.commit(branch))
        start = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", repo.commit(branch))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            end = len(content) // 2 if path in self.hub.breaks_off else len(content)
            self.wfile.write(content[start:end])

    def _info(self, name: str, revision: str) -> None:
        if (found := self._find(name, revision)) is not None:
            repo, branch = found
            files = [{"rfilename": path} for path in repo.revisions[branch]]
            self._json({"id": name, "sha": repo.commit(branch), "siblings": files, "tags": [], "private": False})

    def _tree(self, name: str, revision: str) -> None:
        if (found := self._find(name, revision)) is not None:
            repo, branch = found
            files = repo.revisions[branch].items()
            self._json([{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files])

    def _commit(self, name: str, revision: str, body: bytes) -> None:
        if (found := self._find(name, revision)) is None:
            return
        repo, branch = found
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                repo.revisions[branch][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = repo.commit(branch)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit, "hookOutput": ""})

    def _json(self, content) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, status: int, code: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()
