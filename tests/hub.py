"""A stand-in for the Hugging Face hub on 127.0.0.1, with the faults that real networks have."""

import functools
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

REPO, COMMIT = "someone/small-gpt2", "c0ffee" * 6 + "cafe"


@functools.cache
def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Hub:
    """Serves the files of one data set; `faults` has a fault for each file name.

    A fault is a function of (handler, method, number of such requests before) that answers itself
    and returns True, or leaves it to the hub. As on the real hub, the name answers with a redirect
    to another host, which has the bytes.
    """

    def __init__(self, files: dict[str, bytes]):
        self.files, self.faults = files, {}
        self.requests: list[tuple[str, str]] = []  # (method, file name or "api")
        handler = type("Handler", (Handler,), {"hub": self})
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint, self.store = (
            f"http://127.0.0.1:{server.server_port}" for server in self.servers
        )

    def count(self, method: str, name: str) -> int:
        return self.requests.count((method, name))

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.respond("HEAD")

    def do_GET(self):
        self.respond("GET")

    def respond(self, method: str) -> None:
        path = urlparse(self.path).path
        name = "api" if path.startswith("/api/") else path.rsplit("/", 1)[-1]
        before = self.hub.count(method, name)
        self.hub.requests.append((method, name))
        fault = self.hub.faults.get(name)
        if fault and fault(self, method, before):
            return
        if name == "api":
            return self.send(200, json.dumps(self.listing()).encode(), "application/json")
        data = self.hub.files.get(name)
        if data is None:
            return self.send(404, b"", **{"X-Error-Code": "EntryNotFound"})
        sha256 = sha256_of(data)
        if "/resolve/" in path:
            return self.send(302, b"", Location=f"{self.hub.store}/{name}", **{
                "X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{sha256}"',
                "X-Linked-Size": str(len(data))})
        if span := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            first = int(span[1])
            return self.send(206, data[first:], **{
                "ETag": f'"{sha256}"',
                "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"})
        self.send(200, data, ETag=f'"{sha256}"')

    def listing(self) -> dict:
        """The answer of /api/datasets/REPO/revision/REVISION?blobs=true."""
        return {"id": REPO, "sha": COMMIT, "siblings": [
            {"rfilename": name, "size": len(data), "blobId": "0" * 40, "lfs": {
                "sha256": sha256_of(data), "size": len(data), "pointerSize": 134}}
            for name, data in self.hub.files.items()]}

    def send(self, status: int, body: bytes, kind: str = "application/octet-stream",
             length: int | None = None, **headers: str) -> None:
        """Answer; a `length` other than the body's is announced all the same, and then cut."""
        self.send_response(status)
        for key, value in {"Content-Type": kind, **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.close_connection = self.close_connection or length is not None


# faults; each is for the first `times` requests of its kind


def status(code: int, method: str, times: int = 99, **headers: str):
    def fault(handler, verb, before):
        if verb == method and before < times:
            handler.send(code, b"", **headers)
            return True
    return fault


def page(method: str = "", times: int = 99):
    """A web page in place of the answer: a captive portal's login."""
    def fault(handler, verb, before):
        if verb.startswith(method) and before < times and not is_redirect(handler):
            handler.send(200, b"<html>Welcome! Please log in.</html>", "text/html")
            return True
    return fault


def is_redirect(handler) -> bool:
    return "/resolve/" in handler.path


def altered(change, times: int = 99, length: int | None = None):
    """Other bytes in place of the file's: change(bytes, byte that the request begins with)."""
    def fault(handler, verb, before):
        if verb != "GET" or is_redirect(handler) or before >= times:
            return None
        data = handler.hub.files[handler.path.rsplit("/", 1)[-1]]
        first = int((re.findall(r"bytes=(\d+)-", handler.headers.get("Range", "")) or [0])[0])
        span = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        handler.send(206 if first else 200, change(data, first),
                     length=length and len(data) - first, **span)
        return True
    return fault


def half(data: bytes, first: int) -> bytes:
    """The first half of the file, and nothing after it however often it is asked for."""
    return data[first : len(data) // 2]


def one_wrong_byte(data: bytes, first: int) -> bytes:
    return (data[:-8] + bytes([data[-8] ^ 1]) + data[-7:])[first:]


def cut(times: int = 99):
    return altered(half, times, length=1)


def stalled(seconds: float, times: int = 99):
    """Half of the file, then silence."""
    def change(data, first):
        return half(data, first)
    begin = altered(change, times, length=1)

    def fault(handler, verb, before):
        if begin(handler, verb, before):
            handler.wfile.flush()
            time.sleep(seconds)
            return True
    return fault


def slow(seconds: float):
    """Half of the file, then the rest after a while."""
    def fault(handler, verb, before):
        if verb == "GET" and not is_redirect(handler):
            time.sleep(seconds)
    return fault
