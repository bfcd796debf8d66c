"""The demo with Transformers: on vLLM's blocks, or alone where there is no vLLM."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.assemble import open_embedded_store
from kvist.cli.demo.places import BLOCK_TOKENS, Places
from kvist.cli.demo.progress import step
from kvist.cli.demo.prompt import ANSWER_TOKENS, Prompt
from kvist.cli.demo.rows import Answer, Case
from kvist.connectors.identity import fingerprint
from kvist.core.errors import ConfigError

if TYPE_CHECKING:
    from kvist.connectors.transformers import TransformersKvist

_ENGINE = "transformers"
_READ_DEADLINE_S = 30.0


def continue_in_transformers(
    places: Places, model_folder: Path, prompt: Prompt
) -> tuple[str, Answer]:
    """Answers the prompt in Transformers from the blocks that vLLM left on the SSD."""
    with step("loading the model in Transformers"):
        model = _load(model_folder)
    with _session(places, model_folder, model) as session:
        found = _ask(session, prompt, "asking in Transformers")
    del model
    gc.collect()  # the memory is vLLM's again
    return found


def run_alone(places: Places, model_folder: Path, prompt: Prompt) -> dict[Case, tuple[str, Answer]]:
    """Engine and answer of each case, without vLLM: a restart closes the store and opens it."""
    answers: dict[Case, tuple[str, Answer]] = {}
    with step("loading the model in Transformers"):
        model = _load(model_folder)
    with _session(places, model_folder, model) as session:
        answers[Case.COLD] = _ask(session, prompt, "asking, cold")
        answers[Case.REPEAT] = _ask(session, prompt, "asking again")
    with _session(places, model_folder, model) as session:
        answers[Case.RESTART] = _ask(session, prompt, "asking a store that was reopened")
    return answers


def _load(folder: Path) -> Any:
    """The model in float32, warmed up.

    Raises:
        ConfigError: torch or transformers is missing.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as e:
        raise ConfigError(f"the demo needs {e.name}", remedy="pip install 'kvist[demo]'") from e
    # One core stays free, as with vLLM: threads that wait for a busy core are far slower than one
    # thread fewer.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    model.generate(torch.ones((1, 8), dtype=torch.long), max_new_tokens=2, do_sample=False)
    return model


@contextmanager
def _session(places: Places, folder: Path, model: Any) -> Iterator[TransformersKvist]:
    """A session over the demo's store, which is closed at the end."""
    from kvist.connectors.transformers import TransformersKvist, model_keyspace

    keyspace = model_keyspace(model, model_path=folder, block_tokens=BLOCK_TOKENS)
    store = open_embedded_store(
        places.loaded.config,
        block_bytes=keyspace.layout.block_bytes,
        fingerprint=fingerprint(keyspace),
        layout=keyspace.layout,
    )
    try:
        yield TransformersKvist(model, store, keyspace, read_deadline_s=_READ_DEADLINE_S)
    finally:
        store.close(deadline_s=_READ_DEADLINE_S)


class _FirstToken:
    """A streamer that notes when the first new token came; the prompt comes before it."""

    def __init__(self) -> None:
        self._puts = 0
        self.first_s = 0.0

    def put(self, _token_ids: object) -> None:
        """Called with the prompt, then with each token."""
        self._puts += 1
        if self._puts == 2:
            self.first_s = time.perf_counter()

    def end(self) -> None:
        """Called at the end."""


def _ask(session: TransformersKvist, prompt: Prompt, text: str) -> tuple[str, Answer]:
    import torch

    with step(text) as shown:
        streamer = _FirstToken()
        began = time.perf_counter()
        out = session.generate(
            torch.tensor([prompt.token_ids]),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            streamer=streamer,
        )
        ttft_s = streamer.first_s - began
        token_ids = prompt.answer_ids(out[0].tolist()[len(prompt.token_ids) :])
        shown.result = f"first token after {ttft_s:.2f} s"
    answer = Answer(
        ttft_s=ttft_s,
        prompt_tokens=len(prompt.token_ids),
        tokens_by_tier=dict(session.last.tokens_by_tier),
        token_ids=token_ids,
        text=prompt.text(token_ids),
    )
    return _ENGINE, answer
