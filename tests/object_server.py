"""A local S3 server for tests (moto's), behind a proxy that injects faults.

    with object_server() as server:
        server.make_bucket("bucket")
        server.faults = lambda request: "500"  # of each request, or None

Faults: "500" and "503" are answers in place of the server's; "cut" sends half of a body; "hang" answers after the
client's timeout; "reset" closes the connection before the request reaches the server, "lost" after the server has done
it; "skew", "denied" and "key" are refusals.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import pytest

HOST = "127.0.0.1"
ACCESS_KEY, SECRET_KEY = "AKIAOFTHETESTS", "secret-of-the-tests"
HANG_S = 1.0
REFUSALS = {
    "500": (500, "InternalError"), "503": (503, "SlowDown"), "skew": (403, "RequestTimeTooSkewed"),
    "denied": (403, "AccessDenied"), "key": (403, "SignatureDoesNotMatch"),
}  # fmt: skip
FAULTS = ("500", "503", "cut", "hang", "reset", "lost")


class Proxy(BaseHTTPRequestHandler):
    """Forwards requests, and injects the fault that the server's `faults` names."""

    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server: ObjectServer = self.server.owner  # type: ignore[attr-defined]
        request = f"{self.command} {self.path}"
        server.requests.append(request)
        fault = server.faults(request)
        if fault in REFUSALS:
            status, code = REFUSALS[fault]
            # As the services do, with the key in the answer: it must not reach a message.
            text = f"<Error><Code>{code}</Code><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId></Error>".encode()
            self.answer(status, [], text)
            return
        if fault == "hang":
            time.sleep(HANG_S)
        if fault in ("reset", "hang"):
            self.close_connection = True
            return
        upstream = http.client.HTTPConnection("127.0.0.1", server.upstream, timeout=20)
        upstream.request(self.command, self.path, body, {**dict(self.headers.items()), "Connection": "close"})
        response = upstream.getresponse()
        content = response.read()
        upstream.close()
        if fault == "lost":
            self.close_connection = True
            return
        self.answer(response.status, response.getheaders(), content, is_cut=fault == "cut")

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, is_cut: bool = False) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # of HEAD, which has no body
            elif name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.wfile.flush()
        self.close_connection = self.close_connection or is_cut

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one  # noqa: N815  names of http.server

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class QuietServer(ThreadingHTTPServer):
    """A client that gives up on a request is no error of the tests."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing."""


class ObjectServer:
    """The running server.

    Attributes:
        faults: called with "METHOD PATH" of each request.
        requests: so far.
    """

    def __init__(self, upstream: int):
        self.upstream, self.requests = upstream, list[str]()
        self.faults: Callable[[str], str | None] = lambda request: None
        self._proxy = QuietServer((HOST, 0), Proxy)
        self._proxy.owner = self  # type: ignore[attr-defined]
        threading.Thread(target=self._proxy.serve_forever, args=(0.01,), daemon=True).start()
        port = self._proxy.server_address[1]
        self.environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        }  # fmt: skip

    def make_bucket(self, name: str) -> None:
        self.request("PUT", f"/{name}")

    def request(self, method: str, path: str, content: bytes = b"") -> None:
        """Send a request past the proxy, without obstore."""
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream)
        connection.request(method, path, content)
        assert connection.getresponse().status == 200
        connection.close()

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Start a server, with its address and its credentials in the environment. Skips without obstore or moto."""
    pytest.importorskip("obstore", reason="obstore is not installed (pip install -e '.[storage]')")
    moto = pytest.importorskip("moto.server", reason="moto is not installed (pip install 'moto[s3]' flask flask-cors)")
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    upstream = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    upstream.start()
    server = ObjectServer(upstream.get_host_and_port()[1])
    server.request("POST", "/moto-api/reset")  # all servers of a process have the same content
    try:
        with mock.patch.dict(os.environ, server.environment):
            yield server
    finally:
        server.close()
        upstream.stop()
