"""`python -m kvist.bench`: measures Kvist's store, and Kvist against recomputing and its peers."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvist.bench import samples
from kvist.bench.engine import EngineError
from kvist.bench.environments import SETUP_SCRIPT, lmcache_server, peer_python
from kvist.bench.machine import describe_machine, engine_cores, load
from kvist.bench.pages import page, print_result, print_tables
from kvist.bench.participants import (
    LMCACHE,
    MAX_MODEL_TOKENS,
    OFFLOADING,
    SLOW_ALWAYS,
    SLOW_PLANNED,
    Participant,
    vllm_alone,
    vllm_with_kvist,
    vllm_with_lmcache,
    vllm_with_offloading,
    vllm_with_slow_disk,
)
from kvist.bench.report import ENOUGH_ROUNDS
from kvist.bench.runner import DISK, HARM, PARTS, Runner, process_starter
from kvist.bench.samples import Result, Settings
from kvist.bench.screen import screen
from kvist.bench.smollm2 import cache_folder, ensure_smollm2
from kvist.bench.store import report as store_report
from kvist.bench.store import samples as store_samples
from kvist.bench.store.contender import ContenderError
from kvist.bench.store.disk import medium_of
from kvist.bench.store.run import StoreRun
from kvist.bench.store.samples import StoreResult, StoreSettings
from kvist.core.errors import ConfigError

FULL_FILE = Path("bench/results/latest.json")
QUICK_FILE = Path(".cache/bench/quick.json")
STORE = "store"
STORE_FILE = "store.json"  # beside the engines' result
# A few tokens more than whole blocks: every way of serving a prompt then computes the same rest.
FULL_LENGTHS = "1032,4104,8072"
QUICK_LENGTHS = "8072"

_DTYPE = "bfloat16"
_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvist.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, help="repetitions of everything (5; quick: 3)")
    parser.add_argument(
        "--lengths", metavar="TOKENS,...", help=f"prompt lengths ({FULL_LENGTHS}; quick: 8072)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=(*PARTS, STORE),
        help="measure only this; may be repeated",
    )
    parser.add_argument(
        "--without", action="append", default=[], choices=(OFFLOADING,), help="leave a peer out"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help=f"with LMCache, Redis and Mooncake as well (first: {SETUP_SCRIPT})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one length, few rounds, no peers, no cold disk"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help=f"result file ({FULL_FILE})")
    parser.add_argument("--show", type=Path, metavar="PATH", help="show this result, run nothing")
    parser.add_argument("--page", type=Path, metavar="PATH", help="write the result as Markdown")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--keep", action="store_true", help="keep the engines' logs and files")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and reports; 0 if a result was shown, 2 if it could not run, 130 if interrupted."""
    args = build_parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False, markup=False)
    try:
        reports = _shown(args.show) if args.show is not None else _measured(args, errors)
    except (ConfigError, ContenderError, EngineError) as e:
        errors.print(f"bench: {e}")
        return 2
    console = screen()
    if reports.store is not None:
        print_tables(store_report.tables(reports.store[0]), console)
    if reports.engines is not None:
        print_result(reports.engines[0], console)
    if args.page is not None:
        args.page.write_text(page(*reports.completed()))
    if args.show is None:
        for _, path in filter(None, (reports.store, reports.engines)):
            errors.print(f"every sample: {path}")
    return 0 if args.show is not None or reports.complete() else _INTERRUPTED


@dataclass(slots=True)
class _Reports:
    """What was measured or is shown, each with its file."""

    engines: tuple[Result, str] | None = None
    store: tuple[StoreResult, str] | None = None

    def complete(self) -> bool:
        """Whether nothing was interrupted."""
        return all(part[0].complete for part in (self.engines, self.store) if part is not None)

    def completed(self) -> tuple[tuple[Result, str] | None, tuple[StoreResult, str] | None]:
        """Both parts for the page: one that was not measured is what was kept beside the other."""
        engines, store = self.engines, self.store
        if engines is None and store is not None:
            path = Path(store[1]).with_name(FULL_FILE.name)
            engines = (samples.read(path), str(path)) if path.exists() else None
        elif store is None and engines is not None:
            path = Path(engines[1]).with_name(STORE_FILE)
            store = (store_samples.read(path), str(path)) if path.exists() else None
        return engines, store


def _shown(path: Path) -> _Reports:
    if store_samples.is_store(path):
        return _Reports(store=(store_samples.read(path), str(path)))
    return _Reports(engines=(samples.read(path), str(path)))


def _measured(args: argparse.Namespace, errors: Console) -> _Reports:
    _settings(args)  # refused before anything was measured
    path = args.json or (QUICK_FILE if args.quick else FULL_FILE)
    parts = set(args.only or [*PARTS, STORE])
    out = _Reports()
    if STORE in parts:
        file = args.json if args.json and parts == {STORE} else path.with_name(STORE_FILE)
        out.store = _measure_store(args, file, errors), str(file)
    if parts != {STORE} and out.complete():
        out.engines = _measure(args, path, errors), str(path)
    return out


def _measure_store(args: argparse.Namespace, path: Path, errors: Console) -> StoreResult:
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_signals_interrupt())
        work = stack.enter_context(_work_folder(keep=args.keep, errors=errors))
        rounds = args.rounds if args.rounds is not None else ENOUGH_ROUNDS
        result = StoreResult(
            time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            describe_machine(),
            StoreSettings(rounds=rounds, medium=medium_of(work)),
        )
        screen = stack.enter_context(_BarScreen(errors))
        run = StoreRun(result, work, screen, peers=args.peers, seed=args.seed)
        screen.expect(run.steps())
        try:
            run.run()
            result.complete = True
        except KeyboardInterrupt:
            screen.say("interrupted")
        finally:
            result.took_s = round(time.monotonic() - began, 1)
            result.machine = samples.after(result.machine, load())
            samples.write(result, path)
    return result


def _settings(args: argparse.Namespace) -> Settings:
    try:
        text = args.lengths or (QUICK_LENGTHS if args.quick else FULL_LENGTHS)
        lengths = sorted({int(t) for t in text.split(",")})
    except ValueError as e:
        raise ConfigError(f"--lengths: {e}") from e
    rounds = args.rounds if args.rounds is not None else 3 if args.quick else 5
    if rounds < 1 or not all(256 < n < MAX_MODEL_TOKENS for n in lengths):
        raise ConfigError(f"rounds must be positive, lengths between 257 and {MAX_MODEL_TOKENS}")
    return Settings(
        rounds=rounds,
        lengths_tokens=lengths,
        model="SmolLM2-135M-Instruct",
        dtype=_DTYPE,
        engine_cores=engine_cores(),
        flow_prompts=4 if args.quick else 8,
        flow_prompt_tokens=512,
        flow_output_tokens=32,
        seed=args.seed,
        flow_starts=1 if args.quick else 3,
        restart_each_round=True,
        flow_batches=0 if args.quick else 2 * rounds,  # single batches vary by a third
        flow_singles=1 if args.quick else 2,
    )


def _measure(args: argparse.Namespace, path: Path, errors: Console) -> Result:
    settings = _settings(args)
    model = ensure_smollm2(_DTYPE, progress=errors.print)
    result = Result(
        time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), describe_machine(), settings
    )
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_signals_interrupt())
        work = stack.enter_context(_work_folder(keep=args.keep, errors=errors))
        participants = _participants(args, work, result, stack)
        screen = stack.enter_context(_BarScreen(errors))
        start = process_starter(result, model, work)
        asked = [p for p in args.only or [] if p != STORE]
        parts = asked or [p for p in PARTS if not (args.quick and p in (DISK, HARM))]
        runner = Runner(result, participants, parts, start, screen)
        screen.expect(runner.steps())
        try:
            runner.run()
            result.complete = True
        except KeyboardInterrupt:
            screen.say("interrupted: ending the engines")
        finally:
            result.took_s = round(time.monotonic() - began, 1)
            result.machine = samples.after(result.machine, load())
            samples.write(result, path)
    return result


def _participants(
    args: argparse.Namespace, work: Path, result: Result, stack: ExitStack
) -> list[Participant]:
    found = [vllm_alone(), vllm_with_kvist(work)]
    found += [vllm_with_slow_disk(work, name) for name in (SLOW_PLANNED, SLOW_ALWAYS)]
    if args.quick or OFFLOADING in args.without:
        result.absent[OFFLOADING] = "not asked for"
    else:
        found.append(vllm_with_offloading(work))
    python = peer_python(LMCACHE)
    if not args.peers:
        result.absent[LMCACHE] = "not asked for (--peers)"
    elif python is None:
        result.absent[LMCACHE] = f"no environment; {SETUP_SCRIPT} makes it"
    else:
        try:
            port = stack.enter_context(lmcache_server(python, work))
            found.append(vllm_with_lmcache(python, port))
        except EngineError as e:
            result.absent[LMCACHE] = str(e)
    return found


@contextmanager
def _work_folder(*, keep: bool, errors: Console) -> Iterator[Path]:
    """A folder on the disk that caches of models are on: `/tmp` may be memory."""
    root = cache_folder().parent / "bench"
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        yield folder
    finally:
        for left in Path("/dev/shm").glob(f"vllm_offload_kvist-bench-{os.getpid()}-*"):
            left.unlink(missing_ok=True)
        if keep:
            errors.print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP interrupts; later ones must not disturb the cleaning up.

    Ending the engines is bounded in time, so nobody has to interrupt that.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _BarScreen:
    """Progress on stderr: a bar in a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._done = -1
        self._began = time.monotonic()

    def __enter__(self) -> _BarScreen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def expect(self, steps: int) -> None:
        """How many requests there will be."""
        self._progress.update(self._task, total=steps)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(f"[{time.monotonic() - self._began:5.0f} s] {text}")

    def step(self, text: str) -> None:
        """One request is about to be measured."""
        self._done += 1
        self._progress.update(self._task, completed=self._done, description=text)


if __name__ == "__main__":
    sys.exit(main())
