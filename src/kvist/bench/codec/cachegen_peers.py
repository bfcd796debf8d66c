"""`python -m kvist.bench.codec.cachegen_peers`: size at equal KL, of `cachegen` beside its peers.

On the demo model: contexts of 512 tokens are read, their KV (as bfloat16) goes through each codec,
and the model goes on over 128 tokens more, once from the KV as it was and once from what came back.
KL is that of the next-token distributions, in nats, averaged over tokens. The table is profiled on
the first half of the text and the contexts come from the second, or the table on another text.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvist.bench.codec.lmcache_format import CHUNK_TOKENS, lmcache_cachegen
from kvist.bench.codec.real_kv import default_text
from kvist.bench.codec.tables import demo_table, load_model
from kvist.bench.samples import write
from kvist.bench.screen import screen
from kvist.bench.smollm2 import ensure_smollm2
from kvist.codec.chain import CODECS, TABLED, bind_codec
from kvist.codec.payload import BlockCodec
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout
from kvist.native.cachegen_twin import from_float, to_float

_EXAMPLE = "example: python -m kvist.bench.codec.cachegen_peers --contexts 2 --json peers.json"
CONTEXT_TOKENS, ANSWER_TOKENS = 512, 128
_BLOCK_TOKENS = 128

Words = npt.NDArray[np.uint16]
Through = Callable[[Words], tuple[Words, int]]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One codec: bits a value, KL in nats a token, and how far K and V came back, relative."""

    name: str
    bits: float
    kl: float
    kl_p95: float
    k_error: float
    v_error: float


class Equal(msgspec.Struct, frozen=True, kw_only=True):
    """A peer, and the bits that `cachegen` takes for the peer's KL (between two of its levels)."""

    peer: str
    kl: float
    peer_bits: float
    cachegen_bits: float
    times_smaller: float


class PeersResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one run found, as it is written with `--json`."""

    model: str
    contexts: int
    rows: list[Row]
    equal: list[Equal]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows, and writes what was asked for; 2 if there is nothing to measure with."""
    parser = argparse.ArgumentParser(
        "kvist.bench.codec.cachegen_peers", description=__doc__, epilog=_EXAMPLE
    )
    parser.add_argument("--texts", type=Path, metavar="FILE", help="plain text to read")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="profile on this text, not on the first half"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--contexts", type=int, default=8, help="contexts (8)")
    args = parser.parse_args(argv)
    try:
        text = args.texts.read_text(errors="replace") if args.texts else default_text()
        half = len(text) // 2
        known = args.profile.read_text(errors="replace") if args.profile else text[:half]
        result = run(known, text[half:], contexts=args.contexts, say=_say)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    show(result, screen())
    if args.json:
        write(result, args.json)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def run(profiled: str, text: str, *, contexts: int, say: Callable[[str], None]) -> PeersResult:
    """Measures every codec over `text`, with the table of a model that read `profiled`.

    Raises:
        ConfigError: an extra is missing, or the text is too short.
    """
    say("profiling the model, once for a text")
    table = demo_table(profiled)
    judge = Judge(text, contexts)
    peers: list[tuple[str, Through]] = [
        ("LMCache's CacheGen", _lmcache(CHUNK_TOKENS)),
        ("LMCache's, chunks of 512", _lmcache(CONTEXT_TOKENS)),
    ]
    for word in (*CODECS, *TABLED):
        peers.append((word, _blocks(bind_codec(word, judge.layout, table), judge.layout)))
    rows = []
    for name, through in peers:
        rows.append(judge.row(name, through))
        say(f"{name}: {rows[-1].bits:.2f} bits, KL {rows[-1].kl:.3g}")
    curve = [r for r in rows if r.name.startswith("cachegen-") and "paper" not in r.name]
    return PeersResult(
        model="SmolLM2-135M-Instruct",
        contexts=contexts,
        rows=rows,
        equal=list(at_equal_kl([r for r in rows if r not in curve], curve)),
    )


def at_equal_kl(peers: Sequence[Row], curve: Sequence[Row]) -> Iterator[Equal]:
    """For each peer within the curve's reach, the curve's bits at its KL: straight lines between
    levels in bits over the logarithm of KL.
    """
    points = sorted((math.log(row.kl), row.bits) for row in curve if row.kl > 0)
    at, known = ([point[i] for point in points] for i in range(2))
    for peer in peers:
        if peer.kl <= 0 or not at[0] <= math.log(peer.kl) <= at[-1]:
            continue
        bits = float(np.interp(math.log(peer.kl), at, known))
        yield Equal(
            peer=peer.name,
            kl=peer.kl,
            peer_bits=peer.bits,
            cachegen_bits=bits,
            times_smaller=peer.bits / bits,
        )


class Judge:
    """The demo model, and contexts whose KV it has read."""

    def __init__(self, text: str, contexts: int) -> None:
        """Raises ConfigError if the text is too short for so many contexts."""
        self._model, tokenizer = load_model(ensure_smollm2("float32"), "float32")
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        length = CONTEXT_TOKENS + ANSWER_TOKENS
        if contexts < 1 or len(ids) < contexts * length:
            raise ConfigError(f"a text of {len(ids)} tokens does not give {contexts} contexts")
        every = (len(ids) - length) // max(1, contexts - 1)
        self._ids = [ids[i * every : i * every + length] for i in range(contexts)]
        self._kv = [self._read(part[:CONTEXT_TOKENS]) for part in self._ids]
        layers, _, heads, _, dim = self._kv[0].shape
        self.layout = BlockLayout(layers, heads, dim, _BLOCK_TOKENS, "bfloat16")
        self._known = [self._go_on(*pair) for pair in zip(self._kv, self._ids, strict=True)]

    def row(self, name: str, through: Through) -> Row:
        """Puts every context through a codec. `through`: KV → KV as it comes back, and bytes."""
        size_bytes, found = 0, []
        errors = np.zeros((2, 2))
        for kv, ids, known in zip(self._kv, self._ids, self._known, strict=True):
            back, stored = through(kv)
            size_bytes += stored
            found.append(_divergence(known, self._go_on(back, ids)))
            x, y = (to_float(part, "bfloat16").reshape(kv.shape) for part in (kv, back))
            for kind in range(2):
                errors[kind] += [
                    np.square(x[:, kind] - y[:, kind], dtype=np.float64).sum(),
                    np.square(x[:, kind], dtype=np.float64).sum(),
                ]
        divergence = np.concatenate(found)
        relative = np.sqrt(errors[:, 0] / errors[:, 1])
        return Row(
            name=name,
            bits=8 * size_bytes / sum(kv.size for kv in self._kv),
            kl=float(divergence.mean()),
            kl_p95=float(np.quantile(divergence, 0.95)),
            k_error=float(relative[0]),
            v_error=float(relative[1]),
        )

    def _read(self, ids: Sequence[int]) -> Words:
        import torch
        from transformers import DynamicCache

        with torch.no_grad():
            cache = DynamicCache(config=self._model.config)
            self._model(torch.tensor([ids]), past_key_values=cache)
            kv = torch.stack([torch.stack((la.keys[0], la.values[0])) for la in cache.layers])
        return np.asarray(from_float(kv.numpy(), "bfloat16"), np.uint16)

    def _go_on(self, kv: Words, ids: Sequence[int]) -> Any:
        """Logarithms of the distributions after each token of the answer: `[tokens, words]`."""
        import torch
        from transformers import DynamicCache

        values = torch.from_numpy(to_float(kv, "bfloat16").reshape(kv.shape))
        with torch.no_grad():
            cache = DynamicCache(config=self._model.config)
            for layer in range(len(values)):
                cache.update(values[layer, 0][None], values[layer, 1][None], layer)
            answer = torch.tensor([ids[CONTEXT_TOKENS:]])
            logits = self._model(answer, past_key_values=cache).logits[0]
            return torch.log_softmax(logits.float(), -1)


def _divergence(known: Any, other: Any) -> npt.NDArray[np.float64]:
    """KL(known ‖ other) of each row, in nats."""
    return np.asarray((known.exp() * (known - other)).sum(-1).double().numpy(), np.float64)


def _blocks(codec: BlockCodec, layout: BlockLayout) -> Through:
    def through(kv: Words) -> tuple[Words, int]:
        back, size_bytes = np.empty_like(kv), 0
        for start in range(0, kv.shape[3], layout.block_tokens):
            span = slice(start, start + layout.block_tokens)
            stored = codec.encode(memoryview(kv[:, :, :, span].tobytes()))
            out = bytearray(layout.block_bytes)
            codec.decode(memoryview(stored), memoryview(out))
            back[:, :, :, span] = np.frombuffer(out, np.uint16).reshape(kv[:, :, :, span].shape)
            size_bytes += len(stored)
        return back, size_bytes

    return through


def _lmcache(chunk_tokens: int) -> Through:
    def through(kv: Words) -> tuple[Words, int]:
        values = to_float(kv, "bfloat16").reshape(kv.shape)
        coded = lmcache_cachegen(values, chunk_tokens=chunk_tokens)
        return np.asarray(from_float(coded.kv, "bfloat16"), np.uint16), coded.stored_bytes

    return through


def show(result: PeersResult, console: Console) -> None:
    """Prints both tables."""
    grid = Table(title=f"{result.contexts} contexts of {CONTEXT_TOKENS} tokens, {result.model}")
    for name in ("codec", "bits a value", "raw ÷ stored", "KL", "KL p95", "K error", "V error"):
        grid.add_column(name, justify="left" if name == "codec" else "right")
    for row in result.rows:
        grid.add_row(
            row.name,
            f"{row.bits:.2f}",
            f"{16 / row.bits:.2f}×",
            f"{row.kl:.2g}",
            f"{row.kl_p95:.2g}",
            f"{row.k_error:.2%}",
            f"{row.v_error:.2%}",
        )
    console.print(grid)
    grid = Table(title="cachegen at the same KL")
    for name in ("peer", "KL", "peer's bits", "cachegen's bits", "times smaller"):
        grid.add_column(name, justify="left" if name == "peer" else "right")
    for e in result.equal:
        grid.add_row(
            e.peer, f"{e.kl:.2g}", f"{e.peer_bits:.2f}", f"{e.cachegen_bits:.2f}",
            f"{e.times_smaller:.2f}×",
        )  # fmt: skip
    console.print(grid)


if __name__ == "__main__":
    sys.exit(main())
