"""`bench/quality/texts.py`: files of several kinds become documents and questions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvist.bench.quality.texts import Document, Question, generated_texts, read_texts
from kvist.core.errors import FormatError

RECORD = {
    "question": "who?",
    "answers": ["me"],
    "ctxs": [{"title": "T", "text": "one"}, {"title": "", "text": "two"}],
}
ASKED = Question(("T: one", "two"), "who?", ("me",))


class Words:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_list_of_records_and_json_lines_are_the_same_questions(tmp_path: Path) -> None:
    whole, lines = tmp_path / "a.json.gz", tmp_path / "b.jsonl"
    whole.write_bytes(gzip.compress(json.dumps([RECORD, RECORD]).encode()))
    lines.write_text("\n".join([json.dumps(RECORD)] * 2) + "\n")
    for path in (whole, lines):
        found = read_texts([path])
        assert found.questions == (ASKED, ASKED)
        assert found.documents == (Document("T: one\n\ntwo"),) * 2
        assert found.names == (path.name,)


def test_session_of_an_agent_is_its_last_call(tmp_path: Path) -> None:
    calls = [
        {"session_id": "x", "input": "a", "output": "b"},
        {"session_id": "y", "input": "other", "output": ""},
        {"session_id": "x", "input": "ab", "output": "c"},
    ]
    path = tmp_path / "agent.jsonl"
    path.write_text("\n".join(map(json.dumps, calls)))
    found = read_texts([path]).documents
    assert found == (Document("abc", from_end=True), Document("other", from_end=True))


def test_files_take_turns_so_that_the_first_few_are_of_all(tmp_path: Path) -> None:
    plain, records = tmp_path / "p.txt", tmp_path / "r.jsonl"
    plain.write_text("[plain] text that begins with a bracket")
    records.write_text("\n".join([json.dumps(RECORD)] * 3))
    found = read_texts([records, plain])
    assert [d.text[:7] for d in found.documents] == ["T: one\n", "[plain]", "T: one\n", "T: one\n"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"question": 1}\n', "bad:1: a record with neither"),
        (b'{"input": "a"}\n{"inp', "bad:2: no JSON"),
        (b'{"question": "q", "ctxs": [{"title": "t"}], "answers": []}', "record 1: KeyError"),
        (b'{"question": "q", "ctxs": [], "answers": []}', "record 1: a question without passages"),
        (b'{"input": 7}', "record 1: its input is no text"),
        (b"\xff\xfe\x00", "no text"),
        (b"\x1f\x8b\x08\x00cut off", "no text"),
        (b"[]", "no records"),
    ],
)
def test_file_of_no_known_kind_is_named_with_its_line(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=said):
        read_texts([path])


def test_generated_texts_differ_and_their_questions_have_answers_in_the_passage() -> None:
    found = generated_texts(Words(), 4, 100, 9)
    assert len(set(found.documents)) == 4
    assert all(len(Words().encode(d.text)) >= 100 for d in found.documents)
    assert len(found.questions) == 9
    for asked in found.questions:
        assert asked.answers[0] in asked.passages[0]
    assert found == generated_texts(Words(), 4, 100, 9)


def test_public_texts_have_questions_and_documents() -> None:
    folder = Path(__file__).resolve().parents[5] / "shared" / "traces"
    paths = [
        *sorted((folder / "rag-text").glob("*.gz")),
        *sorted((folder / "lmcache-agent" / "miniswe").glob("ae5b*.gz")),
    ]
    if len(paths) < 3:
        pytest.skip("../shared/traces/rag-text is not there")
    found = read_texts(paths)
    assert len(found.questions) == 150 + 2655
    assert found.documents[2].from_end
