"""Writes a result as `docs/quality.md`."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.bench.quality.blend_report import grids
from kvist.bench.quality.report import Grid, notes
from kvist.bench.quality.samples import Result

_NOTE = "<!-- Written by `kvist quality --page` from the file that is named below. -->\n"

_METHOD = """
# Quality

What [codecs](codecs.md), [CacheGen](cachegen.md) among them, and [blended KV](blend.md) do to a
model's answers, measured on the model. `kvist quality` computes the KV of a text, rounds it to
bfloat16 as an engine keeps it, cuts it into canonical blocks, puts every block through a codec's
encode and decode, and has the model, in float32, go on from the result:

* over the text that truly follows: **KL** (raw KV ‖ decoded KV) of the next token's distribution,
  as mean and 95th percentile over all positions, in nats; **perplexity**; **same top**, the share
  of positions whose most probable token stays;
* over its own greedy answer: **same greedy**, the share of it that stays before the first change;
* over questions about passages: **F1** and **exact** match of short answers, judged as SQuAD does.
  The row `raw` says how able the model is at all. With few questions, one that goes the other way
  moves them by per cents: what a codec loses shows in KL long before.

**Size** is of the payload to the raw block. Speeds are of raw bytes, in MB (1,000,000 bytes) a
second of CPU time, so of one core. `cast-fp8` is no codec of Kvist: it rounds every value to float8
without a scale, as engines do for an `fp8` cache, and shows what the others are worth.

**Blend** (`--blend`) serves prompts of examples, passages that were each cached alone, and a
question. A way is the share of the passages' tokens that is computed again: 0 is naive
concatenation; `prefix-only` reuses the examples alone and says what a `full` prefill says.
KL(full ‖ blended) is over the tokens of the question; **KL at answer** is at the last of them;
**removed** is the share of naive concatenation's KL that is gone. [blend.md](blend.md) has a curve
over more prompts.
"""

_REPEAT = """
```sh
kvist quality --json quality.json --plot quality.svg     # on the generated text: minutes
kvist quality MODEL --texts mine.txt --codecs raw,int8   # on a model and a text of yours
kvist quality --codecs none --blend --ratios 0,0.15,1    # blended KV
kvist quality --show quality.json                        # the table again
```

Another transform of KV is measured by `kvist.bench.quality.divergence`:

```python no-run
from kvist.bench.quality.divergence import demo_contexts, kl_of

result = kl_of(lambda block: my_decode(my_encode(block)), demo_contexts(8))
print(result.kl_nats_mean, result.greedy_ratio)
```
"""


def page(result: Result, source: str) -> str:
    """The page: how it was measured, the tables, how to repeat it.

    Args:
        result: a run.
        source: the file that holds it, as the page names it.
    """
    machine = result.machine
    versions = ", ".join(f"{k} {v}" for k, v in sorted(machine.versions.items()))
    where = (
        f"Run on {result.started}, {result.took_s / 60:.0f} minutes, commit `{machine.commit}`; "
        f"the rows are in `{source}`. {machine.cores} cores of {machine.cpu}, "
        f"{machine.memory_bytes / 2**30:.0f} GiB, Linux {machine.kernel}, "
        f"Python {machine.python}, {versions}. Load average {machine.load_before} before, "
        f"{machine.load_after} after."
    )
    parts = [_NOTE, _METHOD.strip(), "", "# Measured", "", where, ""]
    parts += [f"* {note}" for note in notes(result)]
    for grid in grids(result):
        parts += ["", f"## {grid.title}", "", *_markdown(grid)]
    return "\n".join(parts) + "\n\n# Repeat it\n" + _REPEAT


def _markdown(grid: Grid) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [
        line(grid.columns),
        "|---|" + "---:|" * (len(grid.columns) - 1),
        *map(line, grid.rows),
    ]
