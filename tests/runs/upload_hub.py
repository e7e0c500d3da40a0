"""A Hugging Face hub on loopback that takes uploads into memory; tests/loopback_hub.py is the one to read from."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
KINDS = {"models": "", "datasets": "datasets/", "spaces": "spaces/"}


class UploadHub:
    """Repositories by name ("owner/name", datasets as "datasets/owner/name"), and what was asked."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.commits: list[dict] = []
        self.url = ""

    def sha(self, repo: str) -> str:
        """The name of the present state of a repository."""
        digest = hashlib.sha1(repo.encode())
        for path, content in sorted(self.files[repo].items()):
            digest.update(path.encode() + hashlib.sha1(content).digest())
        return digest.hexdigest()


def handler_of(hub: UploadHub) -> type[BaseHTTPRequestHandler]:
    """The request handler that answers from `hub`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            """Tests read `hub.asked` instead."""

        def answer(self, body: bytes | dict | list, code: int = 200, headers: dict[str, str] | None = None) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def refuse(self, code: int, error: str) -> None:
            self.answer({"error": error}, code, {"X-Error-Code": error, "X-Error-Message": error})

        def do_POST(self) -> None:
            path, body = self.begin()
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.refuse(401, "Unauthorized")
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if path == "/api/repos/create":
                asked = json.loads(body)
                prefix = KINDS[f"{asked.get('type') or 'model'}s"]
                repo = (
                    f"{prefix}{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                )
                if repo in hub.files:
                    return self.answer({"url": f"{hub.url}/{repo}", "error": "exists"}, 409)
                hub.files[repo] = {}
                return self.answer({"url": f"{hub.url}/{repo}", "name": repo, "id": repo})
            repo, verb = self.repository(path)
            if repo not in hub.files:
                return self.refuse(404, "RepoNotFound")
            if verb[0] == "preupload":
                files = json.loads(body)["files"]
                regular = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
                return self.answer({"files": regular})
            if verb[0] == "commit":
                lines = [json.loads(line) for line in body.decode().splitlines()]
                for line in lines:
                    if line["key"] == "file":
                        hub.files[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    elif line["key"] == "deletedFile":
                        hub.files[repo].pop(line["value"]["path"], None)
                hub.commits.append({"repo": repo, **lines[0]["value"]})
                sha = hub.sha(repo)
                return self.answer({"commitUrl": f"{hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})
            return self.refuse(404, f"{path} is not part of the loopback hub")

        def begin(self) -> tuple[str, bytes]:
            """(the path, the body) of a request, noted."""
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            return path, self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def repository(self, path: str) -> tuple[str, list[str]]:
            """('owner/name', what follows) of /api/models/owner/name/…."""
            kind, owner, name, *rest = path.removeprefix("/api/").split("/")
            return f"{KINDS.get(kind, '')}{owner}/{name}", [*rest, ""]

    return Handler


@contextlib.contextmanager
def upload_hub() -> Iterator[UploadHub]:
    """A hub that listens on a free port of 127.0.0.1."""
    hub = UploadHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
