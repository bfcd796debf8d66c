"""Passages, requests for them, and a side whose store holds them: for the tests of blends."""

from __future__ import annotations

import random

from vllm_fakes import BLOCK, FakeRequest, Side

from kvist.connectors.vllm.blend_plan import BlendLimits
from kvist.connectors.vllm.blends import BlendKnobs
from kvist.connectors.vllm.messages import BlendJob, BlendNote, StepReport

PASSAGE = 20 * BLOCK
KNOBS = BlendKnobs(0.5, BlendLimits(min_tokens=8, max_tokens=10_000), deadline_s=1.0)
GOOD = BlendNote(blended=True, repaired_tokens=12, deviation_ratio=0.1, seconds=0.5)


def text(name: str, tokens: int = PASSAGE) -> list[int]:
    chosen = random.Random(name)
    return [chosen.randrange(1000) for _ in range(tokens)]


def ask(name: str, tokens: list[int], **fields: object) -> FakeRequest:
    """A request as vLLM names its pages: by all the tokens before their end."""
    hashes = [repr(tokens[: i + BLOCK]).encode() for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    return FakeRequest(name, list(tokens), len(tokens), block_hashes=hashes, **fields)  # type: ignore[arg-type]


def pages(tokens: list[int]) -> list[int]:
    return list(range(100, 100 + -(-len(tokens) // BLOCK)))


def serve(side: Side, name: str, tokens: list[int]) -> FakeRequest:
    """A request is computed to its end and all its blocks are saved."""
    req = ask(name, tokens)
    side.save_all(req, pages(tokens))
    return req


def blending_side() -> Side:
    """The worker can blend; passages a, b and c were each served alone."""
    side = Side(blend=KNOBS)
    side.side.heard(StepReport(can_blend=True), set())
    for name in "abc":
        serve(side, name, text(name))
    return side


def promised(side: Side, req: FakeRequest, computed: int = 0) -> tuple[int | None, bool]:
    side.side.arrive(req)
    return side.side.matched(req, computed)


def start(side: Side, req: FakeRequest, computed: int = 0) -> BlendJob:
    """Promised, given pages, ordered."""
    tokens, waits = promised(side, req, computed)
    assert tokens
    assert waits
    side.side.allocated(req, pages(req.tokens), computed, tokens)
    plan = side.idle()
    assert plan.loads == []
    (job,) = plan.blends
    return job


def end(side: Side, req: FakeRequest, job: BlendJob, note: BlendNote | None = GOOD) -> None:
    """The worker reports; without a note, that it failed."""
    blends = {job.job_id: note} if note is not None else {}
    failed = {job.job_id} if note is None else set()
    side.side.heard(StepReport({job.job_id: 1}, failed, blends=blends), {req.request_id})


def counted(side: Side, outcome: str) -> float:
    return side.side.tally.take().get(f"kvist_blend_requests_total.{outcome}", 0)


def saved_keys(side: Side) -> int:
    return len(side.store.blocks)


PERMUTED = text("c") + text("a") + text("b") + text("question", 10)
