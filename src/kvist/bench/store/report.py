"""Turns a run of the store benchmark into tables. Ratios are the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from kvist.bench.report import ENOUGH_ROUNDS, Ratio, ratio
from kvist.bench.store.run import DISK, DRAM, absent_key
from kvist.bench.store.samples import KVIST, LIMIT, PEERS, Row, StoreResult

Table = tuple[str, list[str], list[list[str]]]


@dataclass(frozen=True, slots=True)
class Limit:
    """A row that is judged by its ratio to a limit; `least` is `None` where it is context."""

    title: str
    row: Row
    limit: Row
    least: float | None


@dataclass(frozen=True, slots=True)
class Bound:
    """A row that is judged by its value, at most `most` in `unit`s of `scale`."""

    title: str
    row: Row
    most: float
    scale: float
    unit: str


LIMITS = (
    Limit("DRAM write: gather from pages", Row.DRAM_WRITE, Row.DRAM_WRITE, 0.85),
    Limit("DRAM read: scatter to pages", Row.DRAM_READ, Row.DRAM_READ, 0.85),
    Limit("... write with the checksum", Row.DRAM_WRITE_SUMMED, Row.DRAM_WRITE, 0.75),
    Limit("... read with the checksum", Row.DRAM_READ_SUMMED, Row.DRAM_READ, 0.75),
    Limit("... write, pages with tokens apart", Row.TOKENS_APART_WRITE, Row.DRAM_WRITE, None),
    Limit("... read, pages with tokens apart", Row.TOKENS_APART_READ, Row.DRAM_READ, None),
    Limit("... write, pages with keys transposed", Row.TRANSPOSED_WRITE, Row.DRAM_WRITE, None),
    Limit("... read, pages with keys transposed", Row.TRANSPOSED_READ, Row.DRAM_READ, None),
    Limit("SSD write", Row.DISK_WRITE, Row.DISK_WRITE, 0.90),
    Limit("SSD read", Row.DISK_READ, Row.DISK_READ, 0.90),
)
BOUNDS = (
    Bound("match of {match_keys} keys", Row.MATCH, 1e-3, 1e-3, "ms"),
    Bound("index memory a block", Row.INDEX, 200, 1, "bytes"),
    Bound("open after a clean close, {indexed_blocks} blocks", Row.OPEN, 5, 1, "s"),
)
BESIDE = (
    ("write to DRAM", Row.DRAM_WRITE, DRAM),
    ("read from DRAM", Row.DRAM_READ, DRAM),
    ("write to disk", Row.DISK_WRITE, DISK),
    ("read from disk", Row.DISK_READ, DISK),
)
_NAMES: Mapping[str, str] = {
    "files": "plain files",
    "redis": "Redis",
    "lmcache": "LMCache",
    "mooncake": "Mooncake Store",
}


def _rate(values: Mapping[int, float]) -> str:
    return f"{median(values.values()) / 1e9:.2f} GB/s" if values else "–"


def _span(found: Ratio | None) -> str:
    if found is None:
        return "–"
    return f"{found.value:.2f} ({found.low:.2f}–{found.high:.2f}, {found.rounds} rounds)"


def _verdict(rounds: int, *, met: bool) -> str:
    if rounds < ENOUGH_ROUNDS:
        return "too few rounds" if rounds else "not measured"
    return "met" if met else "NOT met"


def limit_rows(result: StoreResult) -> list[list[str]]:
    """What Kvist moves beside what the machine can."""
    rows = []
    for line in LIMITS:
        ours, most = result.values(line.row, KVIST), result.values(line.limit, LIMIT)
        found = ratio(ours, most)
        rounds = found.rounds if found else 0
        word = "–"
        if line.least is not None:
            word = _verdict(rounds, met=found is not None and found.value >= line.least)
        target = "–" if line.least is None else f"≥ {line.least:.2f}"
        rows.append([line.title, _rate(ours), _rate(most), _span(found), target, word])
    return rows


def bound_rows(result: StoreResult) -> list[list[str]]:
    """What look-ups take."""
    rows = []
    numbers = {
        "match_keys": f"{result.settings.match_keys:,}",
        "indexed_blocks": f"{result.settings.indexed_blocks:,}",
    }
    for line in BOUNDS:
        values = sorted(v / line.scale for v in result.values(line.row, KVIST).values())
        found = "–"
        if values:
            span = f"{values[0]:.3g}–{values[-1]:.3g}, {len(values)} rounds"
            found = f"{median(values):.3g} {line.unit} ({span})"
        met = bool(values) and median(values) <= line.most / line.scale
        target = f"≤ {line.most / line.scale:g} {line.unit}"
        rows.append([line.title.format(**numbers), found, target, _verdict(len(values), met=met)])
    return rows


def peer_rows(result: StoreResult) -> list[list[str]]:
    """Kvist beside each peer on each medium; where it is behind, the row says so."""
    rows = []
    for title, row, medium in BESIDE:
        ours = result.values(row, KVIST)
        for who in PEERS:
            theirs = result.values(row, who)
            found = ratio(ours, theirs)
            if found is None:
                why = result.absent.get(absent_key(who, medium), "keeps no blocks there")
                rows.append([title, _NAMES[who], "–", "–", "–", f"not measured: {why}"])
                continue
            word = "ahead" if found.value > 1 else "BEHIND"
            rows.append([title, _NAMES[who], _rate(theirs), _rate(ours), _span(found), word])
    return rows


def tables(result: StoreResult) -> list[Table]:
    """Title, column heads and rows of every table."""
    moves = ["what", "Kvist", "limit", "ratio", "target", ""]
    lookups = ["what", "measured", "target", ""]
    beside = ["what", "peer", "peer", "Kvist", "Kvist ÷ peer", ""]
    return [
        ("The store beside the machine's limits", moves, limit_rows(result)),
        ("Look-ups", lookups, bound_rows(result)),
        ("The store beside other stores", beside, peer_rows(result)),
    ]


def method(result: StoreResult) -> str:
    """What was done, for the page."""
    s = result.settings
    size = s.block_bytes / 2**20
    return (
        f"Blocks of {size:g} MiB (16 tokens of Llama-3-8B), {s.dram_blocks} in memory and "
        f"{s.disk_blocks} on disk ({s.medium}); medians of {s.rounds} rounds, in each of which all "
        "are asked in turn, in an order drawn anew each round; a first round is not counted. In "
        "brackets are the least and the greatest ratio of a single round. Memory: the limit is "
        f"memcpy of the same blocks, each contiguous, with {s.threads} threads; Kvist, with as "
        "many, reserves, gathers 64 KiB pages of 32 layers in random order, and commits; or "
        "leases, scatters, and releases. Disk: the limit is O_DIRECT of whole blocks, "
        f"{s.write_depth} write or {s.read_depth} reads at a time, into reserved space; all that "
        "write to the disk sync every 32 blocks (LMCache, which does not, once at the end; Redis "
        "every block), and all reads come from the disk. Peers are handed contiguous blocks, which "
        "spares them the gather. What came back was compared each time."
    )
