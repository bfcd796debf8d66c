"""`python -m kvist.bench.blend.engine`: TTFT of permuted passages in real vLLM, and the answers.

Each round has ten passages of its own. An earlier prompt holds them in one order, behind an
introduction; every engine computes it and its own prefix cache is emptied. Then the passages come
in another order, with a question: vLLM alone computes all of it, Kvist without blend finds the
introduction, with blend the passages. Engines live side by side, one computes at a time, and who
goes first changes from round to round. The answers are those of the same requests, continued.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from kvist.bench.blend.prompts import PassagePrompt, passage_prompts
from kvist.bench.engine import Engine, EngineError
from kvist.bench.machine import describe_machine, engine_cores
from kvist.bench.participants import KVIST, VLLM, engine_environment
from kvist.bench.samples import Machine, write
from kvist.bench.smollm2 import ensure_smollm2
from kvist.core.errors import ConfigError

BLEND = "kvist-blend"
ENGINES = (VLLM, KVIST, BLEND)
_SEED = 77
_HOST_BYTES = 1 << 30
_PAGE_TOKENS = 32
_MAX_MODEL_TOKENS = 4096


class BlendSample(msgspec.Struct, frozen=True):
    """One timed prompt in one engine. `answer` are the greedy tokens that follow it."""

    round: int
    engine: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    answer: list[int]


class BlendRun(msgspec.Struct):
    """A whole run. `blended_tokens` and `repaired_tokens` are sums over the timed prompts."""

    machine: Machine
    dtype: str
    texts: str
    ratio: float
    passages: int
    passage_tokens: int
    samples: list[BlendSample] = []
    blended_tokens: float = 0.0
    repaired_tokens: float = 0.0

    def of(self, engine: str) -> list[BlendSample]:
        """The samples of one engine, by round."""
        return sorted((s for s in self.samples if s.engine == engine), key=lambda s: s.round)

    def ttft_s(self, engine: str) -> float:
        """Median over the rounds."""
        return median(s.ttft_s for s in self.of(engine))

    def agreement_ratio(self, engine: str) -> float:
        """Mean part of an answer that equals the one of vLLM alone, up to the first difference."""
        pairs = zip(self.of(engine), self.of(VLLM), strict=True)
        return sum(_same(a.answer, b.answer) / len(b.answer) for a, b in pairs) / len(self.of(VLLM))

    def first_tokens(self, engine: str) -> int:
        """Rounds in which the first token is that of vLLM alone."""
        pairs = zip(self.of(engine), self.of(VLLM), strict=True)
        return sum(a.answer[0] == b.answer[0] for a, b in pairs)


def _same(answer: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(answer, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.blend.engine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="prompts to measure (9)")
    parser.add_argument("--passages", type=int, default=10, help="passages in each (10)")
    parser.add_argument("--passage-tokens", type=int, default=200, help="of each at most (200)")
    parser.add_argument("--answer-tokens", type=int, default=24, help="to compare (24)")
    parser.add_argument("--ratio", type=float, default=0.15, help="`blend.ratio` (0.15)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--texts", type=Path, metavar="FILE", help="questions and passages")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if it could not."""
    options = build_parser().parse_args(arguments)
    try:
        run = measure(options)
    except (ConfigError, EngineError) as e:
        print(f"kvist.bench.blend.engine: {e}", file=sys.stderr)
        return 1
    print(table(run))
    if options.json:
        write(run, options.json)
    return 0


def measure(options: argparse.Namespace) -> BlendRun:
    """Starts the engines, serves every round, and ends them.

    Raises:
        ConfigError: the model or the texts cannot be had.
        EngineError: an engine failed.
    """
    from transformers import AutoTokenizer

    folder = ensure_smollm2(options.dtype, lambda text: print(text, file=sys.stderr))
    prompts = passage_prompts(
        AutoTokenizer.from_pretrained(str(folder)),
        count=options.rounds + 1,
        passages=options.passages,
        passage_tokens=options.passage_tokens,
        texts=options.texts,
    )
    run = BlendRun(
        describe_machine(),
        options.dtype,
        options.texts.name if options.texts else "gazetteer",
        options.ratio,
        options.passages,
        options.passage_tokens,
    )
    with tempfile.TemporaryDirectory(prefix="kvist-blend-") as work:
        engines = _start(options, folder, Path(work))
        try:
            for number, prompt in enumerate(prompts):
                _round(run, engines, prompt, number, options.answer_tokens)
            run.blended_tokens = engines[BLEND].metric("kvist_blended_tokens_total") or 0.0
            run.repaired_tokens = engines[BLEND].metric("kvist_repaired_tokens_total") or 0.0
        finally:
            for engine in engines.values():
                engine.stop()
    return run


def _start(options: argparse.Namespace, model: Path, work: Path) -> dict[str, Engine]:
    env = engine_environment(engine_cores())
    base = {
        "model": str(model),
        "dtype": options.dtype,
        "max_model_len": _MAX_MODEL_TOKENS,
        "block_size": _PAGE_TOKENS,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    engines = {}
    for name in ENGINES:
        settings = (
            dict(base) if name == VLLM else {**base, "kv_transfer_config": _cache(options, name)}
        )
        engines[name] = Engine.start(name, settings, folder=work, env=env)
    try:
        for name, engine in engines.items():
            print(f"{name}: started in {engine.wait_ready():.0f} s", file=sys.stderr, flush=True)
    except EngineError:
        for engine in engines.values():
            engine.kill()
        raise
    return engines


def _cache(options: argparse.Namespace, name: str) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "block_tokens": _PAGE_TOKENS,
        "store.dram.capacity": _HOST_BYTES,
        "store.ssd.enabled": False,
    }
    if name == BLEND:
        knobs |= {"blend.enabled": True, "blend.ratio": options.ratio, "blend.max_deviation": 1e9}
    return {
        "kv_connector": "KvistConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": knobs,
    }


def _round(
    run: BlendRun, engines: dict[str, Engine], prompt: PassagePrompt, number: int, answer: int
) -> None:
    """Round 0 warms the engines up and does not count."""
    rng = random.Random(_SEED + number)
    earlier = [*prompt.intro, *(t for p in prompt.passages for t in p), *prompt.question]
    order = rng.sample(prompt.passages, len(prompt.passages))
    if order[0] == prompt.passages[0]:
        order.append(order.pop(0))
    tokens = [*prompt.intro, *(t for p in order for t in p), *prompt.question]
    shift = number % len(ENGINES)
    for name in ENGINES[shift:] + ENGINES[:shift]:
        engine = engines[name]
        engine.ask([earlier], max_tokens=1)
        engine.rest(0.3)
        engine.forget()  # once nothing is held for a save any more
        first = engine.ask([tokens], max_tokens=1)
        engine.forget()
        whole = engine.ask([tokens], max_tokens=answer)
        engine.forget()
        if number:
            run.samples.append(
                BlendSample(
                    round=number,
                    engine=name,
                    prompt_tokens=len(tokens),
                    cached_tokens=first.cached_tokens[0],
                    ttft_s=first.took_s,
                    answer=list(whole.tokens[0]),
                )
            )
    print(f"round {number} of {len(tokens)} tokens", file=sys.stderr, flush=True)


def table(run: BlendRun) -> str:
    """What the run says, for people."""
    rounds = len(run.of(VLLM))
    lines = [
        f"{rounds} prompts of {run.passages} passages in another order, "
        f"{median(s.prompt_tokens for s in run.samples):.0f} tokens, {run.dtype}, "
        f"ratio {run.ratio:g}",
        "",
        f"{'':12} {'TTFT s':>8} {'vllm / it':>10} {'cached':>8} {'first token':>12} {'answer':>8}",
    ]
    for name in ENGINES:
        cached = median(s.cached_tokens for s in run.of(name))
        lines.append(
            f"{name:12} {run.ttft_s(name):8.3f} {run.ttft_s(VLLM) / run.ttft_s(name):9.2f}x "
            f"{cached:8.0f} {run.first_tokens(name):6}/{rounds:<5} {run.agreement_ratio(name):8.2f}"
        )
    lines += [
        "",
        "first token: rounds in which it is that of vLLM alone; answer: mean part of the answer",
        "that is, up to the first difference. "
        f"Blended in all: {run.blended_tokens:.0f} tokens, {run.repaired_tokens:.0f} repaired.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
