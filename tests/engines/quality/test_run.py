"""A run over a tiny model: every way a codec can turn out, going on after a stop, and Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvist.bench.quality.codecs import CastCodec, RawCodec, codec_names, codecs  # noqa: E402
from kvist.bench.quality.run import Subject, subject_of  # noqa: E402
from kvist.bench.quality.samples import CodecSample, Result, SampleLog, Settings  # noqa: E402
from kvist.bench.quality.session import measure  # noqa: E402
from kvist.bench.quality.texts import Texts, generated_texts  # noqa: E402
from kvist.codec.chain import CODECS  # noqa: E402
from kvist.core.errors import ConfigError, FormatError  # noqa: E402

pytestmark = pytest.mark.engines

SETTINGS = Settings(
    model="tiny",
    texts=["generated"],
    contexts=2,
    context_tokens=64,
    follow_tokens=24,
    greedy_tokens=8,
    block_tokens=32,
    questions=2,
    answer_tokens=6,
)


class Quiet:
    """Counts steps; raises `KeyboardInterrupt` at one of them."""

    def __init__(self, interrupt_at: int = -1) -> None:
        self.expected, self.steps, self.said = 0, 0, list[str]()
        self._interrupt_at = interrupt_at

    def expect(self, steps: int) -> None:
        self.expected = steps

    def step(self, text: str) -> None:
        if self.steps == self._interrupt_at:
            raise KeyboardInterrupt
        self.steps += 1

    def say(self, text: str) -> None:
        self.said.append(text)


class Refusing(RawCodec):
    """Refuses what it wrote."""

    name = "refusing"

    def decode(self, stored: memoryview, out: memoryview) -> None:
        raise FormatError("made for this test")


class Forgetting(RawCodec):
    """Gives back zeros."""

    name = "forgetting"

    def decode(self, stored: memoryview, out: memoryview) -> None:
        out[:] = bytes(len(out))


class NotANumber(RawCodec):
    """Loses everything."""

    name = "not-a-number"

    def decode(self, stored: memoryview, out: memoryview) -> None:
        out[:] = b"\xff" * len(out)


@pytest.fixture(scope="module")
def subject(tiny_model: Any, tiny_tokenizer: Any) -> Subject:
    return subject_of(tiny_model, tiny_tokenizer, SETTINGS.block_tokens)


@pytest.fixture(scope="module")
def texts(tiny_tokenizer: Any) -> Texts:
    return generated_texts(tiny_tokenizer, 2, 89, 2)


@pytest.fixture(scope="module")
def result(subject: Subject, texts: Texts) -> Result:
    screen = Quiet()
    ways = [RawCodec(), CastCodec(), Refusing(), NotANumber()]
    found = measure(subject, ways, texts, SETTINGS, screen)
    assert screen.steps == screen.expected == 4 * (2 + 2)
    return found


def test_raw_kv_loses_nothing_and_says_how_able_the_model_is(result: Result) -> None:
    raw = result.codecs[0]
    assert (raw.codec, raw.contexts, raw.positions) == ("raw", 2, 48)
    assert raw.kl_nats_mean == raw.kl_nats_p95 == 0
    assert raw.top1_ratio == raw.greedy_ratio == 1
    assert raw.stored_bytes == raw.raw_bytes == 2 * 2 * (4 * 2 * 2 * 32 * 16 * 2)
    assert raw.questions == 2
    assert raw.f1 is not None
    assert raw.perplexity is not None
    assert result.complete


def test_cast_to_fp8_halves_the_size_and_loses_a_little(result: Result) -> None:
    cast = result.codecs[1]
    assert 2 * cast.stored_bytes == cast.raw_bytes
    assert cast.kl_nats_mean is not None
    assert 0 < cast.kl_nats_mean < 1
    assert cast.encode_mb_s is not None
    assert cast.fault == ""


def test_codec_that_refuses_or_breaks_kv_has_a_fault_and_no_figures(result: Result) -> None:
    refusing, broken = result.codecs[2:]
    assert refusing.fault == "text 1: made for this test"
    assert refusing.kl_nats_mean is refusing.f1 is None
    assert "no prediction" in broken.fault
    assert broken.kl_nats_mean is None


def test_answer_from_changed_kv_is_that_of_decoding_freely(subject: Subject, texts: Texts) -> None:
    from kvist.bench.quality.asking import Asker, FirstLine
    from kvist.bench.quality.codecs import through
    from kvist.bench.quality.forward import cache_of, greedy_after

    line = FirstLine(subject.model, subject.tokenizer)
    asker = Asker(subject.model, subject.tokenizer, subject.layout, answer_tokens=12)
    asked = asker.ask(texts.questions[0], asker.prompt(texts.questions[0]))
    with pytest.raises(ValueError, match="32 tokens are no block and a token"):
        asker.ask(texts.questions[0], range(32))
    freely = []
    for codec in (RawCodec(), CastCodec(), Forgetting()):
        blocks = through(codec, asked.blocks).blocks
        cache = cache_of(subject.model, blocks, subject.layout)
        tokens = greedy_after(subject.model, cache, asked.tail, 12, ends=line.ends)
        freely.append(line.text(tokens))
        assert asker.answer(asked, blocks) == freely[-1]
    assert len(set(freely)) > 1, "no answer changed: the test shows nothing"


def test_interrupted_run_shows_what_it_measured_and_the_next_goes_on(
    subject: Subject, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, screen = tmp_path / "samples.jsonl", Quiet(interrupt_at=3)
    ways = [RawCodec(), CastCodec()]
    stopped = measure(subject, ways, texts, SETTINGS, screen, samples=file)
    assert not stopped.complete
    assert screen.said == ["interrupted: this is what was measured"]
    assert [row.contexts for row in stopped.codecs] == [2, 1]
    with file.open("ab") as cut:  # and the last line was cut off by a crash
        cut.write(b'{"type":"codec","codec":"ra')
    counted = []
    from kvist.bench.quality import run

    real = run.diverge
    monkeypatch.setattr(run, "diverge", lambda c, b: counted.append(b) or real(c, b))
    whole = measure(subject, ways, texts, SETTINGS, Quiet(), samples=file)
    assert whole.complete
    assert [row.contexts for row in whole.codecs] == [2, 2]
    assert len(counted) == 1, "what was measured before was measured again"
    assert SampleLog(SETTINGS, file).has(CodecSample, "cast-fp8", 1)


def test_texts_that_are_too_few_are_refused_before_anything_is_measured(
    subject: Subject, tiny_tokenizer: Any
) -> None:
    few = generated_texts(tiny_tokenizer, 1, 89, 2)
    with pytest.raises(ConfigError, match="there are 1 texts of 89 tokens, not 2"):
        measure(subject, [RawCodec()], few, SETTINGS, Quiet())


def test_unknown_codec_is_refused_with_those_that_are_known(subject: Subject) -> None:
    with pytest.raises(ConfigError, match="there is no codec 'zip'; take raw, cast-fp8, lossless"):
        codecs(["raw", "zip"], subject.layout)


def test_every_codec_gives_back_as_many_bytes_as_it_took(subject: Subject) -> None:
    names = codec_names(subject.layout)
    assert {"raw", "cast-fp8", "lossless", "int8", "fp8", "int4"} <= set(names)
    block = np.random.default_rng(1).normal(0, 1, subject.layout.block_bytes // 2)
    raw = (block.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    for codec in codecs(names, subject.layout):
        out = bytearray(len(raw))
        codec.decode(memoryview(codec.encode(memoryview(bytearray(raw)))), memoryview(out))
        decoded = (np.frombuffer(out, np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert np.abs(decoded - block).max() < 0.5, codec.name
        if codec.name == "raw" or (codec.name in CODECS and CODECS[codec.name].exact):
            assert out == raw, codec.name
