"""The benchmark of the gateway at its smallest: every part is measured."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvist.bench.gateway.__main__ import Kept, main
from kvist.bench.gateway.load import Stream, request_bytes
from kvist.bench.gateway.processes import BenchError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def heard(*parts: bytes) -> tuple[list[bool], Stream]:
    """After each part, whether the first token is there; and the stream."""

    async def main() -> tuple[list[bool], Stream]:
        stream, found = Stream(), []
        for part in parts:
            stream.data_received(part)
            found.append(stream.first.done())
        return found, stream

    return asyncio.run(main())


def test_the_first_token_is_the_first_text() -> None:
    found, stream = heard(HEAD[:5], HEAD[5:], ROLE, TEXT[:30], TEXT[30:], DONE)
    assert found == [False, False, False, False, True, True]
    assert stream.end.result() >= stream.first.result()


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    found, stream = heard(HEAD, ROLE, DONE)
    assert found == [False, False, True]
    assert stream.first.result() == stream.end.result()


def test_a_request_that_is_refused_ends_the_run_and_says_why() -> None:
    _, stream = heard(b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}")
    with pytest.raises(BenchError, match="429 Too Many"):
        stream.first.result()


def test_no_two_prompts_are_alike_and_a_seed_makes_the_same() -> None:
    made = [request_bytes(tokens=1, seed=seed) for seed in range(50)]
    assert len(set(made)) == 50
    assert made == [request_bytes(tokens=1, seed=seed) for seed in range(50)]
    assert {len(one) for one in made} == {len(made[0])}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_part_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kept.json"
    sizes = ["--rounds", "1", "--requests", "40", "--streams", "20"]
    assert main([*sizes, "--json", str(file)]) == 0
    found = msgspec.json.decode(file.read_bytes(), type=Kept).outcomes
    assert found.added[0].gateway_p50_s > 0
    assert found.idle is not None
    assert (found.idle.streams, found.idle.after_bytes > 0) == (20, True)
    assert found.slow is not None
    out = capsys.readouterr().out
    assert "200 requests a second" in out
    assert "20 idle streams" in out
