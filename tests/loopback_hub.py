"""A Hugging Face hub on loopback: enough of its API for datasets and huggingface_hub to read a repository.

    with LoopbackHub({"owner/name": folder}) as hub:      # hub.address goes into HF_ENDPOINT
        ...

`gated` repositories answer 401, and `broken` counts down downloads of data files that end half-way.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class LoopbackHub:
    """Serves dataset repositories from folders; `requests` lists what was asked."""

    def __init__(self, repositories: dict[str, Path], gated: tuple[str, ...] = (), broken: int = 0) -> None:
        self.repositories, self.gated, self.broken = repositories, gated, broken
        self.requests: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, name: str) -> dict[str, Path]:
        """Path in the repository → file."""
        folder = self.repositories[name]
        return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing on the screen."""

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(body)

        def _answer(self, body: bytes = b"") -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            hub.requests.append(f"{self.command} {self.path}")
            api = parts[:2] == ["api", "datasets"]
            rest = parts[2:] if api else parts[1:] if parts[0] == "datasets" else []
            name, rest = "/".join(rest[:2]), rest[2:]
            if name not in hub.repositories:
                return self._error(404, "RepoNotFound", "Repository not found")
            if name in hub.gated:
                return self._error(401, "GatedRepo", "Access to this dataset is restricted")
            files = hub.files(name)
            if not api and rest[:1] == ["resolve"]:
                return self._file(files.get("/".join(rest[2:])))
            if rest[:1] == ["tree"]:
                recursive = "recursive=true" in self.path.lower()
                return self._json(_tree(files, "/".join(rest[2:]), recursive=recursive))
            if rest[:1] == ["paths-info"]:
                text = body.decode()
                wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text)["paths"]
                return self._json([_entry(p, files[p]) for p in wanted if p in files])
            siblings = [{"rfilename": path} for path in files]
            self._json({"id": name, "sha": SHA, "private": False, "gated": False, "siblings": siblings, "tags": []})

        def _json(self, answer: Any) -> None:
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _error(self, status: int, code: str, words: str) -> None:
            self._send(status, json.dumps({"error": words}).encode(), {"X-Error-Code": code, "X-Error-Message": words})

        def _file(self, file: Path | None) -> None:
            if file is None:
                return self._error(404, "EntryNotFound", "Entry not found")
            content = file.read_bytes()
            headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            begin = 0
            if span := self.headers.get("Range"):
                first, _, last = span.removeprefix("bytes=").partition("-")
                begin, end = int(first), int(last) + 1 if last else len(content)
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
                content = content[begin:end]
            cut = hub.broken > 0 and self.command == "GET" and file.suffix not in (".md", ".yaml") and begin == 0
            if cut:
                hub.broken -= 1
            self._send(206 if span else 200, content, headers, cut=cut)

        def _send(self, status: int, content: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True

    return Handler


def _tree(files: dict[str, Path], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, file in files.items():
        if not path.startswith(prefix):
            continue
        steps = path.removeprefix(prefix).split("/")
        for depth in range(1, len(steps) if recursive else min(len(steps), 2)):
            name = prefix + "/".join(steps[:depth])
            entries[name] = {"type": "directory", "path": name, "size": 0, "oid": _digest(name.encode())}
        if recursive or len(steps) == 1:
            entries[path] = _entry(path, file)
    return list(entries.values())


def _entry(path: str, file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
