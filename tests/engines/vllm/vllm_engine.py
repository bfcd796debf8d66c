"""The parent's side of `vllm_driver.py`: starts an engine, talks to it, kills it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
START_S = 420.0  # 25 s on a quiet machine
REPLY_S = 240.0
QUIT_S = 60.0
MAX_MODEL_TOKENS = 1024
# Tests that run side by side bind their engines to different cores.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
CORE = str(_WORKER % (os.cpu_count() or 1))

_BASE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": MAX_MODEL_TOKENS,
    "disable_log_stats": False,
    "seed": 0,
    "skip_tokenizer_init": True,
}
_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What `generate` gave, one item a prompt."""

    tokens: list[list[int]]
    cached: list[int]
    finish: list[str]


class EngineError(RuntimeError):
    """The engine's process failed; the text ends with the end of its log."""


def kvist(
    ssd: Path | None,
    *,
    dram: str = "256MiB",
    capacity: str = "512MiB",
    block_tokens: int = 32,
    connector: str = "KvistConnector",
    module: str = "kvist.connectors.vllm",
    restore: float = 0.0,
    load_policy: str = "always",
) -> dict[str, Any]:
    """`kv_transfer_config` for an engine with Kvist.

    With nothing restored ahead, what comes from the disk comes when a request asks for it; with
    nothing planned, whatever the machine's speed is that day.
    """
    below = {"path": str(ssd), "capacity": capacity} if ssd else {"enabled": False}
    return {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "block_tokens": block_tokens,
            "connector": {"load_policy": load_policy},
            "store": {"dram": {"capacity": dram, "restore": restore}, "ssd": below},
        },
    }


class VllmEngine:
    """A running engine in a session of its own; leaving the context ends all its processes."""

    def __init__(self, model: Path, log: Path, *, cores: str = CORE, **arguments: Any) -> None:
        spec = {"model": str(model), **_BASE, **arguments}
        env = {**os.environ, **_ENV, "VLLM_CPU_OMP_THREADS_BIND": cores, "PYTHONPATH": str(HERE)}
        self._log = log
        reader, writer = os.pipe()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "vllm_driver.py"), str(writer), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env=env,
                start_new_session=True,
            )
        os.close(writer)
        self._replies = os.fdopen(reader, "rb", buffering=0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)
        self._buffer = b""
        try:
            self._reply(START_S)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, op: str, *, limit_s: float = REPLY_S, **command: Any) -> dict[str, Any]:
        """Sends one command and waits for its answer."""
        self.send(op, **command)
        return self._reply(limit_s)

    def send(self, op: str, **command: Any) -> None:
        """Sends one command without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **command}).encode() + b"\n")
        self._process.stdin.flush()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 6,
        salt: str = "",
        lora: str | None = None,
    ) -> Answer:
        """Greedy tokens of the prompts, which run together."""
        found = self.ask(
            "generate", prompts=list(prompts), max_tokens=max_tokens, salt=salt, lora=lora
        )
        return Answer(found["tokens"], found["cached"], found["finish"])

    def reset(self) -> None:
        """Empties vLLM's own prefix cache, so that the next hits can only be Kvist's."""
        self.ask("reset")

    def metrics(self) -> dict[str, float]:
        """Counters by name (without `_total`), with the label's value after a dot."""
        return self.ask("metrics")

    def loaded_tokens(self, tier: str | None = None) -> float:
        """Tokens that Kvist has loaded so far, from one tier or all."""
        return loaded_in(self.metrics(), tier)

    def log_text(self) -> str:
        """All that the engine's processes printed."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to every process of the engine at once, as the kernel or an operator would."""
        with_group = self._process.poll() is None
        if with_group or _session(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._end()

    def close(self) -> None:
        """An orderly end, with a limit; whatever is left is killed."""
        if self._process.poll() is None:
            try:
                self.ask("quit", limit_s=QUIT_S)
                self._process.wait(QUIT_S)
            except (EngineError, BrokenPipeError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def _end(self) -> None:
        self._process.wait(30)
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if not self._replies.closed:
            self._selector.close()
            self._replies.close()
        deadline = time.monotonic() + 30
        while _session(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _session(self._process.pid), "processes of the engine outlived it"

    def _reply(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                raise EngineError(f"no answer within {limit_s:g} s\n{self._tail()}")
            chunk = os.read(self._replies.fileno(), 1 << 16)
            if not chunk:
                raise EngineError(f"the engine's process ended\n{self._tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise EngineError(f"{found['error']}\n{self._tail()}")
        return found

    def _tail(self) -> str:
        return self.log_text()[-4000:]


def loaded_in(metrics: Mapping[str, float], tier: str | None = None) -> float:
    """Tokens that Kvist had loaded when `metrics` were taken, from one tier or all."""
    name = "kvist_tokens_loaded"
    if tier is not None:
        return metrics.get(f"{name}.{tier}", 0.0)
    return sum(v for k, v in metrics.items() if k.startswith(name))


def _session(leader: int) -> list[int]:
    """Living processes of the session that `leader` began."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def random_tokens(seed: int, count: int, vocabulary: int = 40_000) -> list[int]:
    """`count` token ids, the same for the same seed."""
    chosen = random.Random(seed)
    return [chosen.randrange(100, vocabulary) for _ in range(count)]


def tree_prompts() -> list[list[int]]:
    """16 prompts that share a root of 4 blocks; each 4 share a branch of 3 more."""
    root = random_tokens(1, 128)
    return [
        root + random_tokens(10 + branch, 96) + random_tokens(100 + 4 * branch + leaf, 40)
        for branch in range(4)
        for leaf in range(4)
    ]


SHORT = random_tokens(2, 20)  # less than a block
EXACT = random_tokens(3, 64)  # two blocks of 32, one of 64, and nothing more
EXACT_AND_ONE = random_tokens(4, 65)
MEDIUM = [random_tokens(20 + i, 300) for i in range(8)]
LONG = random_tokens(5, 900)
TREE = tree_prompts()
CHAT = random_tokens(6, 100)
CHAT_TOKENS = 40
REPLY_TEXT = random_tokens(7, 30)
FEW = [*MEDIUM[:3], LONG]
EDGES = [SHORT, EXACT, EXACT_AND_ONE]


class Reference:
    """What an engine without Kvist and without any prefix cache says."""

    def __init__(self, known: Mapping[tuple[tuple[int, ...], int], list[int]]) -> None:
        self._known = dict(known)

    @classmethod
    def load(cls, path: Path) -> Self:
        """What `save` wrote."""
        items = json.loads(path.read_text())
        return cls({(tuple(prompt), count): tokens for prompt, count, tokens in items})

    def save(self, path: Path) -> None:
        """Writes it for another process of the same run."""
        items = [[prompt, count, tokens] for (prompt, count), tokens in self._known.items()]
        path.write_text(json.dumps(items))

    def of(self, prompts: Sequence[Sequence[int]], max_tokens: int = 6) -> list[list[int]]:
        """The right tokens of each prompt."""
        return [self._known[tuple(p), max_tokens] for p in prompts]


def make_reference(engine: VllmEngine) -> Reference:
    """Asks for every prompt of this module."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def ask(prompts: Sequence[list[int]], max_tokens: int) -> None:
        found = engine.generate(prompts, max_tokens=max_tokens)
        for prompt, tokens in zip(prompts, found.tokens, strict=True):
            known[tuple(prompt), max_tokens] = tokens

    ask([*EDGES, *TREE, *MEDIUM, LONG], 6)
    ask([*MEDIUM, CHAT], CHAT_TOKENS)
    ask([CHAT + known[tuple(CHAT), CHAT_TOKENS] + REPLY_TEXT], 6)
    return Reference(known)
