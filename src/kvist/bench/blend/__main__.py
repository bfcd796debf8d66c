"""`python -m kvist.bench.blend`: what blend costs and gives, on SmolLM2-135M."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvist.bench.blend.prompts import passage_prompts
from kvist.bench.blend.quality import measure
from kvist.bench.blend.report import Curve, curve, table
from kvist.bench.blend.speed import SpeedResult, measure_ttft, ttft_text
from kvist.bench.machine import describe_machine
from kvist.bench.samples import Machine, write
from kvist.bench.smollm2 import ensure_smollm2
from kvist.core.errors import ConfigError

_SPEED_PASSAGES, _SPEED_TOKENS = 10, 180
_ROWS = Path(".cache/bench/blend-rows.jsonl")


class BlendResult(msgspec.Struct, frozen=True):
    """A whole run."""

    machine: Machine
    texts: str
    quality: Curve | None
    speed: SpeedResult | None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.blend", description=__doc__)
    parser.add_argument("--prompts", type=int, default=100, help="prompts to measure KL on (100)")
    parser.add_argument("--passages", type=int, default=5, help="passages in each (5)")
    parser.add_argument(
        "--passage-tokens", type=int, default=120, help="tokens of a passage at most (120)"
    )
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help='.json.gz or .jsonl.gz of {"question", "ctxs": [{"text"}]} (a made-up gazetteer)',
    )
    parser.add_argument(
        "--rows", type=Path, default=_ROWS, help=f"a line for each prompt, to go on from ({_ROWS})"
    )
    parser.add_argument("--only", choices=("quality", "speed"), help="measure only this")
    parser.add_argument("--rounds", type=int, default=7, help="prompts to measure TTFT on (7)")
    parser.add_argument(
        "--ratio", type=float, default=0.15, help="part computed again in the TTFT (0.15)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--threads", type=int, help="of torch (as many as it wants)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if it could not."""
    options = build_parser().parse_args(arguments)
    quality, speed = None, None
    try:
        model, tokenizer = load_model(options.threads)
        if options.only != "quality":
            speed = _speed(options, model, tokenizer)
            print(ttft_text(speed), flush=True)
        if options.only != "speed":
            quality = _quality(options, model, tokenizer)
            print(table(quality))
    except ConfigError as e:
        print(f"kvist.bench.blend: {e}", file=sys.stderr)
        return 1
    if options.json:
        texts = options.texts.name if options.texts else "gazetteer"
        result = BlendResult(describe_machine(), texts, quality, speed)
        write(result, options.json)
    return 0


def load_model(threads: int | None) -> tuple[Any, Any]:
    """SmolLM2-135M in float32, and its tokenizer.

    Raises:
        ConfigError: the model cannot be had.
    """
    folder = ensure_smollm2("float32", lambda text: print(text, file=sys.stderr))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if threads:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(str(folder))


def _quality(options: argparse.Namespace, model: Any, tokenizer: Any) -> Curve:
    from kvist.accel.blend.transformers_model import TransformersBlendModel

    prompts = passage_prompts(
        tokenizer,
        count=options.prompts,
        passages=options.passages,
        passage_tokens=options.passage_tokens,
        texts=options.texts,
    )

    blend_model = TransformersBlendModel(model)
    return curve(measure(blend_model, prompts, options.rows, said=_said))


def _speed(options: argparse.Namespace, model: Any, tokenizer: Any) -> SpeedResult:
    prompt = passage_prompts(
        tokenizer,
        count=1,
        passages=_SPEED_PASSAGES,
        passage_tokens=_SPEED_TOKENS,
        texts=options.texts,
    )[0]
    folder = ensure_smollm2("float32")
    return measure_ttft(
        model, folder, prompt, rounds=options.rounds, floor_ratio=options.ratio, said=_said
    )


def _said(done: int, of: int) -> None:
    if done % 5 == 0 or done == of:
        print(f"{done} of {of} prompts", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
