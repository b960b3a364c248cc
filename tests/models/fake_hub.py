"""A hub of folders on this machine, for what is loaded by name: `with serving(folder) as address`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Each OWNER/NAME in `folder` as a model of a hub, for HF_ENDPOINT."""

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            words = self.path.partition("?")[0].strip("/").split("/")
            if words[:2] == ["api", "models"]:
                model = folder / words[2] / words[3]
                if model.is_dir():
                    told = _tree(model) if words[4:5] == ["tree"] else _described(model)
                    self._send(200, json.dumps(told).encode(), with_body=with_body)
                    return
            elif len(words) > 4 and words[2] == "resolve":
                path = folder / words[0] / words[1] / "/".join(words[4:])
                if path.is_file():
                    self._send(200, path.read_bytes(), with_body=with_body)
                    return
                code = "EntryNotFound" if path.parent.is_dir() else "RepoNotFound"
                self._send(404, b"", with_body=with_body, **{"X-Error-Code": code})
                return
            self._send(404, b"", with_body=with_body)

        def _send(self, status: int, body: bytes, *, with_body: bool, **more: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{_digest(body)}"')
            for name, value in more.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tree(model: Path) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": path.name,
            "size": path.stat().st_size,
            "oid": _digest(path.read_bytes())[:40],
        }
        for path in model.iterdir()
    ]


def _described(model: Path) -> dict[str, Any]:
    names = [{"rfilename": path.name} for path in model.iterdir()]
    return {"id": f"{model.parent.name}/{model.name}", "sha": COMMIT, "siblings": names}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
