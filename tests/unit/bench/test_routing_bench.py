"""The benchmark of routing: its stream, its figures, and a run on engines without a model."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from kvist.bench.gateway.processes import BenchError, engine
from kvist.bench.routing.__main__ import main
from kvist.bench.routing.play import Answer, Logged, Sent, answers
from kvist.bench.routing.replicas import Shape, shared_cores
from kvist.bench.routing.report import MARK, rows, section, with_section
from kvist.bench.routing.run import Outcomes, Play, Settings, measure
from kvist.bench.routing.stream import Kind, Mix, make_stream
from kvist.bench.routing.texts import (
    AGENT_FOLDER,
    GENERATED,
    RAG_FILE,
    Texts,
    find_texts,
    generated_texts,
)
from kvist.bench.samples import Machine
from kvist.core.errors import FormatError

SHARED = Path("../shared/traces")
MACHINE = Machine("cpu", 2, 1 << 30, "6", "3.11", {}, "abc", 0.0)
MIX = Mix(sessions=5, turns=4, questions=40, documents=4, prompt_chars=9000)


def _write_texts(folder: Path) -> None:
    agents = folder / AGENT_FOLDER
    agents.mkdir(parents=True)
    calls = [(3, "task, seen, done"), (1, "task"), (2, "task, seen"), (4, "another task")]
    lines = [json.dumps({"timestamp": at, "input": text}) for at, text in calls]
    (agents / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    row = {"question": "where?", "ctxs": [{"text": "here"}, {"text": "there"}], "answers": []}
    (folder / RAG_FILE).parent.mkdir()
    (folder / RAG_FILE).write_bytes(gzip.compress(json.dumps([row]).encode()))


@pytest.fixture(scope="module")
def texts() -> Texts:
    """The generated ones."""
    return generated_texts()


def test_a_seed_makes_the_same_stream_again(texts: Texts) -> None:
    assert make_stream(texts, MIX, 3) == make_stream(generated_texts(), MIX, 3)
    assert make_stream(texts, MIX, 3) != make_stream(texts, MIX, 4)


def test_a_session_grows_and_no_prompt_is_too_long(texts: Texts) -> None:
    stream = make_stream(texts, MIX, 1)
    agents = [session for session in stream if session.kind is Kind.AGENT]
    assert len(agents) == MIX.sessions
    beginnings = {session.turns[0].prompt[:1000] for session in agents}
    assert len(beginnings) == len(agents)  # nobody else's prompt is the beginning of one's own
    for session in agents:
        assert 2 <= len(session.turns) <= MIX.turns
        for before, turn in pairwise(session.turns):
            assert turn.prompt.startswith(before.prompt)
            assert turn.at > before.at
    longest = max(len(t.prompt) for session in stream for t in session.turns)
    assert longest <= MIX.prompt_chars + len("Task 0.\n")


def test_few_documents_are_asked_about_most(texts: Texts) -> None:
    stream = make_stream(texts, Mix(questions=400, documents=4, sessions=0), 1)
    asked = Counter(session.turns[0].prompt[:2000] for session in stream)
    counts = sorted(asked.values(), reverse=True)
    assert len(counts) == 4
    assert counts[0] > 2 * counts[-1]
    assert len({session.turns[0].prompt for session in stream}) > 40  # the questions differ


def test_a_unit_of_time_brings_one_request(texts: Texts) -> None:
    stream = make_stream(texts, Mix(questions=600, sessions=20), 1)
    times = sorted(turn.at for session in stream for turn in session.turns)
    assert times[0] >= 0.0
    assert 0.8 < len(times) / times[-1] < 1.2


def test_texts_that_serve_twice_are_told_apart(texts: Texts) -> None:
    mix = Mix(sessions=len(texts.agents) + 3, turns=1, questions=0)
    stream = make_stream(texts, mix, 1)
    assert len({session.turns[0].prompt for session in stream}) == mix.sessions


def test_recorded_texts_are_read(tmp_path: Path) -> None:
    assert find_texts(tmp_path).name == GENERATED
    _write_texts(tmp_path)
    texts = find_texts(tmp_path)
    assert texts.agents == (("task", "task, seen", "task, seen, done"),)
    assert (texts.documents, texts.questions) == (("here\n\nthere",), ("where?",))
    assert len(make_stream(texts, MIX, 1)) == MIX.sessions + MIX.questions


@pytest.mark.parametrize("damaged", ["agents", "rag"])
def test_a_damaged_file_is_named(tmp_path: Path, damaged: str) -> None:
    _write_texts(tmp_path)
    file = tmp_path / (AGENT_FOLDER / "a.jsonl.gz" if damaged == "agents" else RAG_FILE)
    for text in (b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[1]"), gzip.compress(b"{")):
        file.write_bytes(text)
        with pytest.raises(FormatError, match=file.name):
            find_texts(tmp_path)


@pytest.mark.skipif(not (SHARED / RAG_FILE).is_file(), reason="no shared traces beside the tree")
def test_the_shared_texts_make_a_stream_of_both_kinds() -> None:
    stream = make_stream(find_texts(SHARED), Settings().mix, 1)
    kinds = Counter(session.kind for session in stream)
    assert kinds == {Kind.AGENT: 12, Kind.RAG: 48}
    assert sum(len(s.turns) for s in stream if s.kind is Kind.AGENT) >= 36


def test_replicas_get_cores_of_their_own_while_there_are_enough() -> None:
    assert shared_cores(2, [3, 4]) == [[3], [4]]
    assert shared_cores(2, [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert shared_cores(4, [0, 1]) == [[0], [1], [0], [1]]


def test_a_replica_s_cache_is_as_small_as_was_asked() -> None:
    arguments = Shape(Path("m"), block_tokens=32, kv_tokens=16_384).arguments(8000)
    assert arguments[arguments.index("--num-gpu-blocks-override") + 1] == "512"


def _answer(ttft_s: float, replica: int, kind: Kind = Kind.RAG) -> Answer:
    return Answer(kind, 0.0, ttft_s, ttft_s + 1, replica, 100, 25, 30, ttft_s)


def _outcomes() -> Outcomes:
    def play(number: int, policy: str, slower: float, share: int) -> Play:
        both = [_answer(slower * (1 + n), n % share) for n in range(10)]
        return Play(number, policy, [*both, _answer(slower, 0, Kind.AGENT)])

    plays = [play(n, "kvist", 1.0 + n, 2) for n in range(3)]
    plays += [play(n, "dynamo", (1.0 + n) * (2 + n), 1) for n in range(3)]
    settings = Settings(rounds=3, policies=("kvist", "dynamo", "round-robin"))
    return Outcomes(MACHINE, settings, "texts", "stubs", 1.0, 100.0, plays)


def test_a_policy_is_held_against_kvist_in_the_same_round() -> None:
    ours, theirs = rows(_outcomes())
    assert (ours.policy, theirs.policy) == ("kvist", "dynamo")  # the third was not played
    assert (ours.mean.low, ours.mean.value, ours.mean.high) == (1, 1, 1)
    for ratio in (theirs.mean, theirs.p90, theirs.agents, theirs.rag):
        assert ratio is not None
        assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2, 3, 4))
    assert ours.cached_ratio == 0.25
    assert ours.times.p90_s == pytest.approx(2 * 9.0)  # of the second round: 1, 1, 2 … 10


def test_a_starved_replica_is_seen() -> None:
    ours, theirs = rows(_outcomes())
    assert theirs.least_ratio == 0
    assert ours.least_ratio == pytest.approx(5 * 2 / 11)
    assert "0% of its share" in section(_outcomes())


def test_the_page_says_where_the_figures_belong() -> None:
    page = with_section(f"# Text\n\n{MARK}\n\nold figures\n", _outcomes())
    assert page.startswith(f"# Text\n\n{MARK}\n\n2 replicas of stubs")
    assert "old figures" not in page
    assert "3.00× (2.00–4.00)" in page
    with pytest.raises(ValueError, match="does not say where"):
        with_section("# Text\n", _outcomes())


def test_a_request_that_went_to_two_replicas_ends_the_run() -> None:
    sent = [Sent("a", Kind.RAG, 0.0, 0.1, 0.2)]
    fine = Logged("a", 200, 10, 5, ["http://y"], [])
    assert answers(sent, {"a": fine}, ["http://x", "http://y"])[0].replica == 1
    broke = msgspec.structs.replace(fine, replicas=["http://x", "http://y"], broke=["it hung"])
    with pytest.raises(BenchError, match="did not go to one replica"):
        answers(sent, {"a": broke}, ["http://x", "http://y"])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_all_of_it_runs_against_engines_without_a_model(tmp_path: Path, texts: Texts) -> None:
    settings = Settings(
        rounds=2, policies=("kvist", "round-robin"), sessions=3, turns=3, questions=9,
        prompt_chars=2000, answer_tokens=2,
    )  # fmt: skip
    lines: list[str] = []
    with engine("--prefill-s=0.02") as one, engine("--prefill-s=0.02") as other:
        urls = [one.url, other.url]
        found = measure(settings, texts, urls, tmp_path, lines.append, model="stub", engine="stubs")
    assert [(p.round, p.policy) for p in found.plays] == [
        *((0, "kvist"), (0, "round-robin"), (1, "round-robin"), (1, "kvist"))
    ]
    for play in found.plays:
        assert len(play.answers) >= settings.questions
        assert all(a.ttft_s >= 0.02 and a.prompt_tokens for a in play.answers)
    in_turn = [a.replica for p in found.plays if p.policy == "round-robin" for a in p.answers]
    assert abs(in_turn.count(0) - in_turn.count(1)) <= 2
    assert found.cold_s >= 0.02
    assert any("mean TTFT" in line for line in lines)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Outcomes) == found


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--policy", "magic"], "unknown policy 'magic'"),
        (["--replicas", "0"], "--replicas: must be at least 1"),
        (["--load-ratio", "0"], "--load-ratio: must be above 0"),
        (["--questions", "0", "--sessions", "0"], "nothing to ask"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    err = capsys.readouterr().err
    assert fault in err
    assert err.count("\n") == 1
