"""What the demo measures in each case, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.table import Table

from kvist.cli import screen

TIERS = ("hbm", "dram", "ssd")


class Case(Enum):
    """The question is asked; in which situation. In the order of the table."""

    COLD = "cold"
    REPEAT = "repeat"
    RESTART = "restart"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer: `token_ids` up to the end token, `ttft_s` to the first of them.

    `tokens_by_tier`: prompt tokens whose KV was not computed, by the tier it came from.
    """

    ttft_s: float
    prompt_tokens: int
    tokens_by_tier: Mapping[str, int]
    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    case: Case
    engine: str
    answer: Answer
    speedup: float
    identical: bool

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return max(0, self.answer.prompt_tokens - sum(self.answer.tokens_by_tier.values()))


def rows_of(answers: Mapping[Case, tuple[str, Answer]]) -> list[Row]:
    """Rows in the table's order, each compared with the cold one.

    Args:
        answers: engine's name and answer of each case; the cold one must be there.
    """
    cold = answers[Case.COLD][1]
    return [
        Row(
            case,
            engine,
            answer,
            speedup=cold.ttft_s / max(answer.ttft_s, 1e-9),
            identical=bool(answer.token_ids) and answer.token_ids == cold.token_ids,
        )
        for case in Case
        if case in answers
        for engine, answer in [answers[case]]
    ]


def as_json(rows: Sequence[Row], extra: Mapping[str, object]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "rows": [
            {
                "case": row.case.value,
                "engine": row.engine,
                "ttft_s": round(row.answer.ttft_s, 4),
                "prompt_tokens": row.answer.prompt_tokens,
                "tokens_by_tier": {
                    **{tier: row.answer.tokens_by_tier.get(tier, 0) for tier in TIERS},
                    "computed": row.computed_tokens,
                },
                "speedup": round(row.speedup, 2),
                "identical": row.identical,
            }
            for row in rows
        ],
        **extra,
    }


def as_table(rows: Sequence[Row]) -> Table:
    """What a person reads."""
    numbers = ("TTFT", "prompt", *TIERS, "computed", "speed-up")
    grid = screen.table("case", *numbers, "same answer", right=frozenset(numbers))
    for row in rows:
        tiers = [f"{row.answer.tokens_by_tier.get(tier, 0):,}" for tier in TIERS]
        grid.add_row(
            _LABELS[row.case],
            f"{row.answer.ttft_s:.2f} s",
            f"{row.answer.prompt_tokens:,}",
            *("·" if cell == "0" else cell for cell in tiers),
            f"{row.computed_tokens:,}",
            "1×" if row.case is Case.COLD else f"{row.speedup:.1f}×",
            "yes" if row.identical else "NO",
        )
    return grid


def summary(rows: Sequence[Row]) -> str:
    """One sentence on what the table shows."""
    wrong = [row.case.value for row in rows if not row.identical]
    if wrong:
        return f"The answer changed in {', '.join(wrong)}: this must not happen; please report it."
    restart = next(row for row in rows if row.case is Case.RESTART)
    reused = sum(restart.answer.tokens_by_tier.values())
    if not reused:
        return "After the restart nothing came from Kvist: look at the log named below."
    return (
        f"After a restart the first token came in {restart.answer.ttft_s:.2f} s in place of "
        f"{rows[0].answer.ttft_s:.2f} s, because {reused:,} of "
        f"{restart.answer.prompt_tokens:,} prompt tokens came from Kvist; the answer is the same, "
        "token for token."
    )


_LABELS = {
    Case.COLD: "cold: computed",
    Case.REPEAT: "asked again",
    Case.RESTART: "after a restart",
    Case.TRANSFORMERS: "in Transformers, from the same blocks",
}
