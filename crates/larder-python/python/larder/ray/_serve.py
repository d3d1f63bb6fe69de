"""A Ray Serve application whose replicas are servers of larder.

Each replica starts ``larder serve`` as a child process on a port of 127.0.0.1 and passes requests on to it. So all its routes are there,
requests of a replica share steps, and a failure of the engine ends the child and not the Ray worker: the health check sees that, and
Serve starts another replica.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from typing import Any, AsyncIterator, Dict, List, Optional

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .._larder import Error
from ..lab import flags_of

# Headers of a connection, and those that the two servers set by themselves.
_OF_CONNECTION = frozenset(
    ("connection", "content-length", "date", "host", "keep-alive", "server", "te", "trailer", "transfer-encoding", "upgrade")
)
_SERVING = re.compile(r"^serving .* on (http://[^/\s]+)")


class ServerProcess:
    """``larder serve`` as a child process."""

    def __init__(self, model: str, flags: Dict[str, Any]) -> None:
        line = [sys.executable, "-m", "larder.ray._child", "serve", "--model", model, "--port", "0", *flags_of(flags)]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._said: List[str] = []
        self.url = self._wait_for_address()
        threading.Thread(target=self._read_on, daemon=True).start()

    def _wait_for_address(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = _SERVING.match(line)
            if found:
                return found[1]
            self._said = [*self._said[-20:], line.strip()]
        self._process.wait()
        raise Error("the server has not started: " + (self._said or ["it said nothing"])[-1].replace("error: ", "", 1))

    def _read_on(self) -> None:
        """Passes on what the server says, so that it never waits for a full pipe."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(line, end="", file=sys.stderr)

    def check(self) -> None:
        """Raises an error if the server has ended."""
        if self._process.poll() is not None:
            raise Error(f"larder serve ended with {self._process.returncode}")

    def stop(self) -> None:
        """Ends the server."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Replica:
    """A server of larder, to which a Serve replica passes its requests on."""

    def __init__(self, model: str, flags: Dict[str, Any]) -> None:
        self._server = ServerProcess(model, flags)
        self._session: Optional[aiohttp.ClientSession] = None

    def check_health(self) -> None:
        """Serve replaces the replica if this raises."""
        self._server.check()

    async def __call__(self, request: Request) -> Response:
        """Passes a request on, and its answer back as it comes."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        url = self._server.url + request.url.path
        headers = _passed_on(request.headers.items())
        body = await request.body()
        try:
            answer = await self._session.request(
                request.method, url, params=request.query_params, data=body, headers=headers, allow_redirects=False
            )
        except aiohttp.ClientError as failed:
            return JSONResponse({"error": {"message": f"the replica's server cannot be reached: {failed}"}}, 503)
        return StreamingResponse(_chunks(answer), answer.status, _passed_on(answer.headers.items()))

    def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.stop()


def _passed_on(headers: Any) -> Dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _OF_CONNECTION}


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it comes. A client that goes away ends this, and with the connection the generation."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    finally:
        answer.close()


def app(
    model: str,
    *,
    name: str = "larder",
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_ongoing_requests: float = 4,
    max_ongoing_requests: int = 32,
    num_cpus: float = 1,
    ray_actor_options: Optional[Dict[str, Any]] = None,
    autoscaling: Optional[Dict[str, Any]] = None,
    **flags: Any,
) -> serve.Application:
    """A Serve application of one model, for ``ray.serve.run``: the routes of ``larder serve``, OpenAI's among them.

    ``model`` is a store or a name, as for the command, on each node that has a replica. Between ``min_replicas`` and ``max_replicas``
    Serve keeps as many as the queue calls for: one for each ``target_ongoing_requests`` requests that run or wait; ``autoscaling`` has
    further fields of its ``AutoscalingConfig``. ``num_cpus`` and ``ray_actor_options`` are what a replica takes of a node, and ``flags`` are
    those of ``larder serve`` with underscores, such as ``cache="4G"``, ``parallel=4`` and ``threads=8``.
    """
    scaling = {
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "target_ongoing_requests": target_ongoing_requests,
        **(autoscaling or {}),
    }
    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=max_ongoing_requests,
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": num_cpus, **(ray_actor_options or {})},
        health_check_period_s=2,
        health_check_timeout_s=10,
    )
    return deployment(Replica).bind(str(model), flags)
