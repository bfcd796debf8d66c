"""An engine without a model: speaks vLLM's OpenAI dialect in a process of its own.

`python -m kvist.testing.stub_engine` listens on a port that it prints, behind the endpoints of its
KV events. What it says follows from
the tokens before (`stub_model.py`), so that two of them give one text, and a text that was spliced
from both is right or wrong, never alike. Events have the fields, and the nulls, of vLLM 0.32.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from kvist.testing.stub_cache import CacheSpec, StubCache
from kvist.testing.stub_model import Request, Step, chat_tokens, generate, token_bytes, tokens_of

MODEL = "stub"
CONTEXT_TOKENS = 4096
_MOST_TOKENS = 1 << 20
_START_S = 30.0
_CLOSE_S = 0.1
_REPLAY_S = 0.01
_DEFAULT_TOKENS = 16


@dataclass(slots=True)
class Pace:
    """Seconds to the first token, for each token of a prompt that is not cached, between tokens.

    `burst`: most tokens of one event.
    """

    prefill_s: float = 0.0
    prompt_token_s: float = 0.0
    token_s: float = 0.0
    burst: int = 1


@dataclass(slots=True)
class Served:
    """What an engine remembers, at `/stats`."""

    running: int = 0
    aborted: int = 0
    requests: int = 0
    last_body: Any = None
    last_headers: dict[str, str] = field(default_factory=dict)


class Engine:
    """The handler of an HTTP server."""

    def __init__(self, pace: Pace, cache: StubCache) -> None:
        self._pace, self._cache, self.served = pace, cache, Served()
        self._dice = random.Random()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request."""
        if request.path in ("/v1/completions", "/v1/chat/completions"):
            self.served.running += 1
            try:
                return await self._generate(request)
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                fault = {"message": str(error), "type": "BadRequestError", "code": 400}
                return _json({"error": fault}, 400)
            except asyncio.CancelledError:
                self.served.aborted += 1
                raise
            finally:
                self.served.running -= 1
        if request.path == "/v1/embeddings":
            body = await self._body(request)
            usage = {"prompt_tokens": len(str(body["input"])), "completion_tokens": 0}
            item = {"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}
            return _json({"object": "list", "data": [item], "model": MODEL, "usage": usage})
        if request.path == "/v1/models":
            card = {"id": MODEL, "object": "model", "max_model_len": CONTEXT_TOKENS}
            return _json({"object": "list", "data": [card]})
        if request.path == "/stats":
            return web.Response(
                body=msgspec.json.encode(self.served), content_type="application/json"
            )
        if request.path == "/reset_prefix_cache":
            self._cache.clear()
            return _json({})
        if request.path == "/lose":
            self._cache.lose(int(request.query["messages"]))
            return _json({})
        return _json({}, 200 if request.path == "/health" else 404)

    async def _body(self, request: web.BaseRequest) -> dict[str, Any]:
        body: dict[str, Any] = msgspec.json.decode(await request.content.read())
        self.served.requests += 1
        self.served.last_body, self.served.last_headers = body, dict(request.headers)
        return body

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._body(request)
        if body.get("model") not in (None, MODEL):
            fault = {"message": f"no model {body['model']}", "type": "NotFoundError", "code": 404}
            return _json({"error": fault}, 404)
        is_chat = request.path == "/v1/chat/completions"
        answer = _Answer(body, _read(body, is_chat=is_chat), is_chat=is_chat)
        prompt = answer.request.tokens
        answer.cached = self._cache.compute(prompt)
        computed = len(prompt) - answer.cached
        await asyncio.sleep(self._pace.prefill_s + self._pace.prompt_token_s * computed)
        if not body.get("stream"):
            steps = list(generate(answer.request))
            await asyncio.sleep(self._pace.token_s * len(steps))
            return _json(answer.whole(steps))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if is_chat:
            await response.write(_event(answer.role()))
        for steps in self._bursts(generate(answer.request)):
            await response.write(b"".join(_event(e) for e in answer.events(steps)))
            if steps[-1].finish is None:
                await asyncio.sleep(self._pace.token_s * len(steps))
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(_event(answer.usage_chunk()))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _bursts(self, steps: Iterator[Step]) -> Iterator[list[Step]]:
        while True:
            wanted = self._dice.randint(1, self._pace.burst)
            taken = list(itertools.islice(steps, wanted))
            if not taken:
                return
            yield taken


class _Answer:
    """One request's answer, as JSON-able values."""

    def __init__(self, body: dict[str, Any], request: Request, *, is_chat: bool) -> None:
        self.request, self.cached = request, 0
        self._body, self._is_chat = body, is_chat
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{random.getrandbits(64):016x}"
        self._created = int(time.time())
        self._count = int(body.get("n") or 1)
        self._said = self._offset = 0

    def role(self) -> dict[str, Any]:
        """A chat's first event."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        wants = self._body.get("return_token_ids")
        return self._chunk([choice | {"finish_reason": None}]) | {
            "prompt_token_ids": self.request.tokens if wants else None
        }

    def events(self, steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
        """An event of some tokens, for each choice."""
        for index in range(self._count):
            yield self._chunk([self._choice(index, steps)])
        self._said += len(steps)

    def usage_chunk(self) -> dict[str, Any]:
        """The event behind the last token."""
        return self._chunk([]) | {"usage": self._usage()}

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """An answer that is not streamed."""
        text, last = "".join(step.text for step in steps), steps[-1]
        said: dict[str, Any] = {"text": text}
        if self._is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        choices = [
            {"index": i, "finish_reason": last.finish, "stop_reason": last.stop, "logprobs": None}
            | said
            for i in range(self._count)
        ]
        self._said = len(steps)
        kind = "chat.completion" if self._is_chat else "text_completion"
        pages = {"kv_transfer_params": self._pages()}
        return self._chunk(choices) | {"object": kind, "usage": self._usage()} | pages

    def _pages(self) -> dict[str, Any] | None:
        """Where the KV is, as vLLM's NixlConnector tells an engine that is to fetch it."""
        if not (self._body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return None
        where = {"remote_engine_id": self._id, "remote_block_ids": [len(self.request.tokens)]}
        return {"do_remote_prefill": True, "do_remote_decode": False, "tp_size": 1} | where

    def _choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        text, last = "".join(step.text for step in steps), steps[-1]
        wants = self._body.get("return_token_ids")
        choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(steps)}
        choice |= {"finish_reason": last.finish, "stop_reason": last.stop}
        choice["token_ids"] = [step.token for step in steps] if wants else None
        if not self._is_chat:
            prompt = self.request.tokens if wants and not self._said else None
            return choice | {"text": text, "prompt_token_ids": prompt}
        delta: dict[str, Any] = {"content": text}
        if self._body.get("tools") and last.finish:
            function = {"name": "look_up", "arguments": "{}"}
            delta = {"tool_calls": [{"index": 0, "id": "call-1", "function": function}]}
            choice["finish_reason"] = "tool_calls"
        return choice | {"delta": delta}

    def _logprobs(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        if self._body.get("logprobs") in (None, False):
            return None
        names = [token_bytes(step.token).decode(errors="replace") for step in steps]
        values = [-(step.token % 7) / 8 for step in steps]
        if self._is_chat:
            pairs = zip(names, values, strict=True)
            return {"content": [{"token": n, "logprob": v, "top_logprobs": []} for n, v in pairs]}
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {"tokens": names, "token_logprobs": values, "text_offset": offsets}

    def _usage(self) -> dict[str, Any]:
        prompt = len(self.request.tokens)
        completion = self._said * self._count
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached} if self.cached else None,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = {"id": self._id, "object": kind, "created": self._created, "model": MODEL}
        return head | {"choices": choices}


def _read(body: dict[str, Any], *, is_chat: bool) -> Request:
    if is_chat:
        tokens = chat_tokens(body["messages"])
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        limit = limit or CONTEXT_TOKENS - len(tokens)
    else:
        prompt = body["prompt"]
        tokens = tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
        limit = body.get("max_tokens") or _DEFAULT_TOKENS
    stops = body.get("stop") or []
    temperature = body.get("temperature")
    return Request(
        tokens,
        min(int(limit), _MOST_TOKENS),
        temperature=1.0 if temperature is None else temperature,
        seed=body.get("seed"),
        penalised=bool(body.get("frequency_penalty") or body.get("presence_penalty")),
        ignores_eos=bool(body.get("ignore_eos")),
        stops=(stops,) if isinstance(stops, str) else tuple(stops),
    )


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class StubEngine:
    """An engine in a process of its own; killed when the context ends."""

    def __init__(
        self, pace: Pace | None = None, cache: CacheSpec | None = None, *, port: int = 0
    ) -> None:
        options = [*_options(pace or Pace()), *_options(cache or CacheSpec())]
        self._command = [sys.executable, "-m", "kvist.testing.stub_engine", f"--port={port}"]
        self._command += options
        self._spawn()

    def _spawn(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError("the engine did not start")
        self.events, self.replay, port = (word.strip("-") for word in line.split())
        self.port = int(port)
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(_START_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def start_again(self) -> None:
        """A new engine on the same ports."""
        self._command += [f"--port={self.port}", f"--events={self.events}"]
        self._command += [f"--replay={self.replay}"]
        self._spawn()

    def hang(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.kill()


def _options(spec: Pace | CacheSpec) -> list[str]:
    return [f"--{name.replace('_', '-')}={getattr(spec, name)}" for name in spec.__slots__]


async def _serve(port: int, pace: Pace, spec: CacheSpec) -> None:
    loop = asyncio.get_running_loop()
    stop = loop.create_future()
    loop.add_signal_handler(signal.SIGTERM, stop.set_result, None)
    cache = StubCache(spec)
    engine = Engine(pace, cache)
    http = web.Server(engine.handle, handler_cancellation=True, access_log=None)
    server = await loop.create_server(http, "127.0.0.1", port, backlog=4096, reuse_address=True)
    replays = loop.create_task(_replays(cache))
    events, replay = cache.events
    print(events or "-", replay or "-", server.sockets[0].getsockname()[1], flush=True)
    await stop
    replays.cancel()
    server.close()
    await http.shutdown(_CLOSE_S)
    cache.close()


async def _replays(cache: StubCache) -> None:
    while True:
        cache.answer()
        await asyncio.sleep(_REPLAY_S)


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m kvist.testing.stub_engine")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any")
    parser.add_argument("--prefill-s", type=float, default=0.0, help="seconds to the first token")
    parser.add_argument(
        "--prompt-token-s", type=float, default=0.0, help="more for each token not cached"
    )
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds between tokens")
    parser.add_argument("--burst", type=int, default=1, help="most tokens of one event")
    parser.add_argument("--block-tokens", type=int, default=0, help="of cached blocks; 0: no cache")
    parser.add_argument("--blocks", type=int, default=1 << 16, help="most cached blocks")
    parser.add_argument("--events", default="", help="where to publish KV events")
    parser.add_argument("--replay", default="", help="where to replay them")
    parser.add_argument("--buffer", type=int, default=1000, help="most messages to replay")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pace = Pace(args.prefill_s, args.prompt_token_s, args.token_s, args.burst)
    spec = CacheSpec(args.block_tokens, args.blocks, args.events, args.replay, args.buffer)
    asyncio.run(_serve(args.port, pace, spec))


if __name__ == "__main__":
    main()
