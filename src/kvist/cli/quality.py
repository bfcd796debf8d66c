"""`kvist quality`: what codecs and blended KV do to a model's answers, measured on the model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from kvist.cli import screen
from kvist.core.errors import ConfigError
from kvist.sim.plots import check_plot

if TYPE_CHECKING:
    from kvist.bench.quality.samples import Result, Settings
    from kvist.bench.quality.texts import Texts
    from kvist.codec.cachegen.table import ProfileTable

_INTERRUPTED = 130
ANSWER_TOKENS = 16  # of an answer at most


def add_parser(subparsers: Any) -> None:
    """Adds `quality`."""
    parser = screen.add_command(
        subparsers,
        "quality",
        summary="measure what codecs and blending do to a model's answers",
        details="Computes the KV of texts, puts it through each codec, and has the model go on "
        "from the result: KL of the next token, perplexity, greedy answers, answers to questions, "
        "size and speed; with --blend, of prompts whose passages were each cached alone too. "
        "Ctrl-C keeps what was measured. Needs the extra `demo`.",
        example="kvist quality --codecs raw,cast-fp8 --contexts 2 --questions 2",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        type=Path,
        help="folder of a Hugging Face model (default: SmolLM2-135M-Instruct, fetched once)",
    )
    parser.add_argument(
        "--texts",
        metavar="FILE",
        nargs="+",
        type=Path,
        default=[],
        help="texts: plain, MuSiQue, NQ-open or recordings of an agent, also .gz "
        "(default: a generated text)",
    )
    parser.add_argument(
        "--codecs",
        metavar="NAMES",
        default="all",
        help="codecs, separated by commas, or none (default: all)",
    )
    parser.add_argument(
        "--table",
        metavar="FILE",
        type=Path,
        help="the model's table, with which cachegen is measured (kvist codec profile; for the "
        "demo model it is made at the first use)",
    )
    parser.add_argument(
        "--blend",
        action="store_true",
        help="measure blended KV too: passages that were cached each alone",
    )
    parser.add_argument(
        "--ratios",
        metavar="RATIOS",
        default="0,0.05,0.15,0.3,0.6,1",
        help="shares of blended tokens that are computed again (default: 0,0.05,0.15,0.3,0.6,1)",
    )
    _add_effort(parser)
    _add_files(parser)


def _add_effort(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("effort")
    group.add_argument(
        "--contexts", type=int, default=8, metavar="N", help="texts to go on from (default: 8)"
    )
    group.add_argument(
        "--questions", type=int, default=8, metavar="N", help="questions to ask (default: 8)"
    )
    group.add_argument(
        "--prompts", type=int, default=8, metavar="N", help="prompts to blend (default: 8)"
    )
    group.add_argument(
        "--context-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a text whose KV is changed (default: 512)",
    )
    group.add_argument(
        "--block-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens in a block (default: 128)",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument("--json", metavar="FILE", type=Path, help="write the rows as JSON")
    group.add_argument("--plot", metavar="FILE", type=Path, help="draw into a .png or .svg")
    group.add_argument("--page", metavar="FILE", type=Path, help="write the rows as Markdown")
    group.add_argument(
        "--samples",
        metavar="FILE",
        type=Path,
        help="keep every sample here, and go on from those that are there",
    )
    group.add_argument(
        "--show", metavar="FILE", type=Path, help="measure nothing: show what --json wrote"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, and prints one row a codec.

    Raises:
        ConfigError: an option cannot be used, or a package or the model is missing.
        FormatError: a text cannot be read.
        OSError: a file cannot be read or written.
    """
    _check(args)
    result = _shown(args.show) if args.show is not None else _measured(args)
    if args.json is not None:
        from kvist.bench.samples import write

        write(result, args.json)
    if args.page is not None:
        from kvist.bench.quality.page import page

        args.page.write_text(page(result, str(args.show or args.json or "no file")))
    if args.plot is not None:
        from kvist.bench.quality.plot import draw

        draw(result, args.plot)
    _print(result, screen.console())
    return 0 if result.complete or args.show is not None else _INTERRUPTED


def _check(args: argparse.Namespace) -> None:
    for option in ("contexts", "context_tokens", "block_tokens", "prompts"):
        if getattr(args, option) < 1:
            raise ConfigError("must be at least 1", path=f"--{option.replace('_', '-')}")
    if args.questions < 0:
        raise ConfigError("must not be negative", path="--questions")
    _ratios(args)
    if args.context_tokens < args.block_tokens:
        raise ConfigError("fewer than --block-tokens: no whole block", path="--context-tokens")
    for option in ("json", "plot", "page", "samples"):
        path = getattr(args, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path.absolute().parent} is not a folder", path=f"--{option}")
    if args.plot is not None:
        check_plot(args.plot)


def _shown(path: Path) -> Result:
    from kvist.bench.quality import samples

    return samples.read(path)


def _measured(args: argparse.Namespace) -> Result:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as e:
        raise ConfigError(f"this needs {e.name}", remedy="pip install 'kvist[demo]'") from e
    from kvist.bench.quality.codecs import codec_names, codecs
    from kvist.bench.quality.session import measure, open_subject

    transformers.utils.logging.disable_progress_bar()
    errors = screen.progress_console()
    table = _table(args, errors.print)
    subject, name = open_subject(args.model, args.block_tokens, errors.print)
    words = [word.strip() for word in args.codecs.split(",")]
    known = {"all": codec_names(subject.layout, table), "none": ()}
    chosen = codecs(known.get(args.codecs, words), subject.layout, table)
    texts = _texts(args, subject.tokenizer)
    with screen.progress_bars() as bars:
        return measure(
            subject,
            chosen,
            texts,
            _settings(args, name, texts),
            _Bar(bars),
            ratios=_ratios(args) if args.blend else (),
            table=table.id.hex() if table is not None else "",
            samples=args.samples,
        )


def _table(args: argparse.Namespace, say: Callable[[str], None]) -> ProfileTable | None:
    """The table for cachegen; for the demo model it is made at the first use and kept."""
    from kvist.bench.codec.tables import default_texts, demo_table
    from kvist.codec.cachegen.table import read_table

    if args.table is not None:
        return read_table(args.table)
    if args.model is not None or not ("cachegen" in args.codecs or args.codecs == "all"):
        return None
    say("cachegen's table of the demo model: profiled once, some minutes")
    return demo_table(default_texts())


def _ratios(args: argparse.Namespace) -> list[float]:
    try:
        found = [float(text) for text in args.ratios.split(",")]
    except ValueError as error:
        raise ConfigError(f"{args.ratios!r} are no numbers", path="--ratios") from error
    if not all(0 <= ratio <= 1 for ratio in found):
        raise ConfigError("a ratio lies between 0 and 1", path="--ratios")
    return sorted(found)


def _texts(args: argparse.Namespace, tokenizer: Any) -> Texts:
    from kvist.bench.quality.divergence import FOLLOW_TOKENS
    from kvist.bench.quality.texts import generated_texts, read_texts

    if args.texts:
        return read_texts(args.texts)
    tokens = args.context_tokens + FOLLOW_TOKENS + 1
    return generated_texts(tokenizer, args.contexts, tokens, max(args.questions, args.prompts))


def _settings(args: argparse.Namespace, name: str, texts: Texts) -> Settings:
    from kvist.bench.quality.divergence import FOLLOW_TOKENS, GREEDY_TOKENS
    from kvist.bench.quality.samples import Settings

    return Settings(
        model=name,
        texts=list(texts.names),
        contexts=args.contexts,
        context_tokens=args.context_tokens,
        follow_tokens=FOLLOW_TOKENS,
        greedy_tokens=GREEDY_TOKENS,
        block_tokens=args.block_tokens,
        questions=args.questions,
        answer_tokens=ANSWER_TOKENS,
        prompts=args.prompts,
    )


class _Bar:
    """A run's progress on standard error."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task = bars.add_task("measure", total=None)
        self._done = -1

    def expect(self, steps: int) -> None:
        """How many steps there will be."""
        self._bars.update(self._task, total=steps)

    def step(self, text: str) -> None:
        """A step is about to be made."""
        self._done += 1
        self._bars.update(self._task, completed=self._done, description=text)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._bars.console.print(f"kvist: {text}")


def _print(result: Result, out: Console) -> None:
    from kvist.bench.quality.blend_report import grids
    from kvist.bench.quality.report import notes

    for note in notes(result):
        out.print(note)
    for grid in grids(result):
        out.print()
        out.print(grid.title, style="bold")
        shown = screen.table(*grid.columns, right=frozenset(grid.columns[1:]))
        for row in grid.rows:
            shown.add_row(*row)
        out.print(shown)
