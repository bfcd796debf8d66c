"""The demo with vLLM: cold, again, in Transformers, and after a restart of the server.

Transformers runs while no server does, because the SSD folder has one owner at a time; the restart
comes last, so that `--keep` can leave that server running.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvist.cli import serve_checks
from kvist.cli.demo import client
from kvist.cli.demo.places import Places
from kvist.cli.demo.progress import Step, step
from kvist.cli.demo.prompt import ANSWER_TOKENS, Prompt
from kvist.cli.demo.rows import Answer, Case
from kvist.cli.demo.transformers_cases import continue_in_transformers
from kvist.cli.serve import cpu_kv_gib
from kvist.cli.vllm_child import VllmServer, phase_of

SERVED_NAME = "smollm2"
_ENGINE = "vllm"
_READY_DEADLINE_S = 600.0
_SETTLE_S = 0.3
_MAX_MODEL_TOKENS = 8192
_HOST = "127.0.0.1"


@dataclass(slots=True)
class Kept:
    """The server that `--keep` leaves running."""

    url: str = ""
    pid: int = 0


@dataclass(slots=True)
class VllmDemo:
    """One run with a real server; `kept` is filled when it stays."""

    places: Places
    model: Path
    prompt: Prompt
    package: str
    keep: bool
    kept: Kept = field(default_factory=Kept)

    def run(self) -> dict[Case, tuple[str, Answer]]:
        """Engine and answer of each case.

        Raises:
            ServerFailed: vLLM did not start.
            RequestFailed: it did not answer.
        """
        answers: dict[Case, tuple[str, Answer]] = {}
        with self._server(1, "starting vLLM with Kvist", tied=True) as server:
            answers[Case.COLD] = self._ask(server, "asking, cold")
            answers[Case.REPEAT] = self._ask(server, "asking again")
            with step("stopping vLLM"):
                server.stop()
        answers[Case.TRANSFORMERS] = continue_in_transformers(self.places, self.model, self.prompt)
        with self._server(2, "starting vLLM again", tied=not self.keep) as server:
            answers[Case.RESTART] = self._ask(server, "asking after the restart")
            if self.keep:
                server.keep()
                self.kept = Kept(server.url, server.pid)
            else:
                with step("stopping vLLM"):
                    server.stop()
        return answers

    @contextmanager
    def _server(self, number: int, text: str, *, tied: bool) -> Iterator[VllmServer]:
        """A server that answers; stopped at the end unless it is kept."""
        port = serve_checks.free_port()
        args = [
            *("--model", str(self.model)),
            *("--served-model-name", SERVED_NAME),
            *("--host", _HOST),
            *("--port", str(port)),
            *("--dtype", "float32"),  # so that "the same answer" can be exact
            *("--max-model-len", str(_MAX_MODEL_TOKENS)),
            "--enforce-eager",
            *("--kv-transfer-config", serve_checks.transfer_config(self.places.loaded)),
        ]
        env = serve_checks.server_env(self.package, cpu_kv_gib())
        env["HF_HUB_OFFLINE"] = "1"
        current: list[Step] = []

        def on_line(line: str) -> None:
            phase = phase_of(line)
            if phase and current:
                current[0].detail(phase)

        with VllmServer(
            args,
            env=env,
            host=_HOST,
            port=port,
            on_line=on_line,
            log=self.places.log(number),
            tied=tied,
        ) as server:
            with step(text) as shown:
                current.append(shown)
                server.wait_ready(_READY_DEADLINE_S)
                current.clear()
                # The first request of a server pays for lazy initialisation; a prompt shorter
                # than a block leaves nothing in any cache.
                warm_up = self.prompt.token_ids[-16:]
                client.complete(server.url, SERVED_NAME, warm_up, max_tokens=2)
            yield server

    def _ask(self, server: VllmServer, text: str) -> tuple[str, Answer]:
        with step(text) as shown:
            before = _settled(server.url)
            ttft_s, generated = client.complete(
                server.url, SERVED_NAME, self.prompt.token_ids, max_tokens=ANSWER_TOKENS
            )
            after = _settled(server.url)
            token_ids = self.prompt.answer_ids(generated)
            answer = Answer(
                ttft_s=ttft_s,
                prompt_tokens=len(self.prompt.token_ids),
                tokens_by_tier={t: n - before.get(t, 0) for t, n in after.items()},
                token_ids=token_ids,
                text=self.prompt.text(token_ids),
            )
            shown.result = f"first token after {ttft_s:.2f} s"
        return _ENGINE, answer


def _settled(url: str) -> dict[str, int]:
    """The counters, a moment after the answer that moved them."""
    threading.Event().wait(_SETTLE_S)
    return client.reused_tokens(url)
