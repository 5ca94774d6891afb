"""A mirror of the Hugging Face hub on loopback: what `huggingface_hub` 2.4 asks for to copy a data set.
It was written from what that client sends."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = ".jsonl"
"""Files kept outside git, as the hub keeps large ones: with a sha256."""


@dataclass
class Mirror:
    """Its data sets: name → revision → files; branches name commits."""

    files: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    damaged: bool = False
    url: str = ""

    def publish(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Put files under a new commit that ``branch`` points to; its hash."""
        commit = hashlib.sha1(json.dumps(sorted((k, v.hex()) for k, v in files.items())).encode()).hexdigest()
        self.files.setdefault(name, {})[commit] = files
        self.branches[f"{name}@{branch}"] = commit
        return commit

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        kind, _, rest = path.strip("/").partition("datasets/")
        name = next((name for name in self.files if rest.startswith(f"{name}/")), None)
        if name is None:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"{}"
        verb, _, more = rest.removeprefix(f"{name}/").partition("/")
        revision, _, file = more.partition("/")
        commit = self.branches.get(f"{name}@{revision}", revision)
        if commit not in self.files[name]:
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"no {revision}"}, b"{}"
        files = self.files[name][commit]
        if kind == "api/" and verb == "revision":
            body: Any = {
                "id": name,
                "sha": commit,
                "siblings": [self._entry("rfilename", *pair) for pair in files.items()],
            }
        elif kind == "api/" and verb == "tree":
            body = [{"type": "file", **self._entry("path", *pair)} for pair in files.items()]
        elif verb == "resolve" and file in files:
            data = files[file][:-1] + b"!" if self.damaged and file.endswith(LARGE) else files[file]
            return 200, {"X-Repo-Commit": commit, "ETag": f'"{_blob(files[file])}"'}, data
        else:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def _entry(self, key: str, name: str, data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {key: name, "size": len(data), "oid": _blob(data), "blobId": _blob(data)}
        if name.endswith(LARGE):
            sha256 = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": 130}
        return found


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def mirror() -> Iterator[Mirror]:
    """A running mirror."""
    served = Mirror()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            served.asked.append(path)
            status, headers, body = served.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
