"""How a broken stream goes on is decided without I/O, and what comes twice is compared."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvist.gateway.ask import Asked, Endpoint, read_body
from kvist.gateway.delivered import Chunk, Delivered
from kvist.gateway.faults import Fault
from kvist.gateway.handing import Handing
from kvist.gateway.resume import Plan, Way, plan_next, tracks, with_ids
from kvist.gateway.splice import Splice, without_ids
from kvist.gateway.sse import EventCutter, payload_of

PROMPT = [7, 8, 9]


def asked(endpoint: Endpoint = Endpoint.COMPLETIONS, **more: Any) -> Asked:
    """A greedy stream."""
    said: dict[str, Any] = {"prompt": "p"}
    if endpoint is Endpoint.CHAT:
        said = {"messages": [{"role": "user", "content": "p"}]}
    fields = {"temperature": 0, "max_tokens": 10, "stream": True}
    return read_body(endpoint, json.dumps(said | fields | more).encode())


def delivered(*events: tuple[list[int], str], chat: bool = False) -> Delivered:
    """What a client has got: token ids and text of each event."""
    found = Delivered()
    for ids, text in events:
        choice: dict[str, Any] = {"token_ids": ids, "prompt_token_ids": PROMPT}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        found.note(msgspec.convert({"id": "first", "choices": [choice]}, Chunk))
    return found


def plan(request: Asked, got: Delivered, migrate: Any = "exact") -> Any:
    """The next attempt."""
    return plan_next(request, with_ids(request), got, migrate, 100)


def test_nothing_delivered_is_sent_again_as_it_came() -> None:
    for request in (asked(), asked(temperature=1.0), asked(n=2)):
        assert plan(request, Delivered()).way is Way.AGAIN


def test_plain_greedy_stream_continues_from_its_last_anchor() -> None:
    got = delivered(([1], "a"), ([2], ""), ([3, 4], "bc"))
    found = plan(asked(), got)
    body = json.loads(found.body)
    assert (found.way, found.path) == (Way.CONTINUED, "/v1/completions")
    assert body["prompt"] == [*PROMPT, 1]  # behind 3 and 4 a character may be half said
    assert body["max_tokens"] == 9
    assert (list(found.known), found.known_chars) == ([2, 3, 4], {"text": 2})


def test_chat_continues_as_a_completion() -> None:
    found = plan(asked(Endpoint.CHAT), delivered(([1], "a"), chat=True))
    body = json.loads(found.body)
    assert (found.way, found.as_chat, found.path) == (Way.CONTINUED, True, "/v1/completions")
    assert "messages" not in body


@pytest.mark.parametrize(
    "more",
    [
        {"frequency_penalty": 1},
        {"stop": "x"},
        {"logprobs": 1},
        {"min_tokens": 4},
        {"structured_outputs": {"regex": "a"}},
        {"a_field_of_next_year": 1},
    ],
    ids=str,
)
def test_what_depends_on_more_than_tokens_is_replayed(more: dict[str, Any]) -> None:
    found = plan(asked(**more), delivered(([1], "a")))
    assert (found.way, list(found.known)) == (Way.REPLAYED, [1])


@pytest.mark.parametrize(
    "more",
    [{"stop": None}, {"frequency_penalty": 0}, {"logprobs": None}, {"logit_bias": {}}],
    ids=str,
)
def test_fields_that_say_nothing_do_not_matter(more: dict[str, Any]) -> None:
    assert plan(asked(**more), delivered(([1], "a"))).way is Way.CONTINUED


def test_chat_without_a_limit_is_replayed_since_the_engine_has_its_own() -> None:
    request = asked(Endpoint.CHAT, max_tokens=None)
    assert plan(request, delivered(([1], "a"), chat=True)).way is Way.REPLAYED


def test_images_are_no_tokens_to_continue_from() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    request = asked(Endpoint.CHAT, messages=[{"role": "user", "content": parts}])
    assert plan(request, delivered(([1], "a"), chat=True)).way is Way.REPLAYED


def test_drawn_tokens_are_lost_unless_a_seed_or_the_operator_says_otherwise() -> None:
    got = delivered(([1], "a"))
    with pytest.raises(Fault, match="at random"):
        plan(asked(temperature=1), got)
    assert plan(asked(temperature=1, seed=3), got).way is Way.REPLAYED
    assert plan(asked(temperature=1), got, "sampled").way is Way.CONTINUED
    with pytest.raises(Fault, match="at random"):  # it would have to compute the second again
        plan(asked(temperature=1), delivered(([1], "a"), ([2], "")), "sampled")


def test_several_answers_and_calls_of_tools_are_lost() -> None:
    got = delivered(([1], "a"))
    assert not tracks(asked(n=2), "exact")
    with pytest.raises(Fault, match="this kind"):
        plan(asked(n=2), got)
    calls = {"index": 0, "token_ids": [2], "delta": {"tool_calls": [{"index": 0}]}}
    got.note(msgspec.convert({"choices": [calls]}, Chunk))
    with pytest.raises(Fault, match="tool"):
        plan(asked(Endpoint.CHAT), got)


def test_reasoning_is_replayed_and_cut_by_its_own_length() -> None:
    got = delivered(([1], "a"), chat=True)
    choice = {"token_ids": [2], "delta": {"reasoning": "hm"}}
    got.note(msgspec.convert({"choices": [choice]}, Chunk))
    found = plan(asked(Endpoint.CHAT), got)
    assert (found.way, found.known_chars) == (Way.REPLAYED, {"content": 1, "reasoning": 2})


def event(ids: list[int], text: str, finish: str | None = None) -> dict[str, Any]:
    """An event of a completion."""
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}
    return {"id": "second", "created": 5, "model": "m", "choices": [choice]}


def test_known_tokens_and_their_text_are_dropped_wherever_events_end() -> None:
    got = delivered(([1], "ab"), ([2], "c"), ([3], ""))
    splice = Splice(plan(asked(stop="x"), got), got)
    assert splice.fit(event([1], "ab")) == (None, False)
    fitted, is_whole = splice.fit(event([2, 3, 4], "cde"))
    assert fitted is not None
    assert (fitted["choices"][0]["text"], fitted["choices"][0]["token_ids"]) == ("de", [4])
    assert (fitted["id"], is_whole) == ("first", False)
    assert splice.fit(event([5], "f"))[1]


def test_token_that_comes_out_differently_is_a_fault() -> None:
    got = delivered(([1], "a"), ([2], "b"))
    splice = Splice(plan(asked(stop="x"), got), got)
    with pytest.raises(Fault, match="other tokens"):
        splice.fit(event([1, 3], "ac"))
    with pytest.raises(Fault, match="sooner"):
        Splice(plan(asked(stop="x"), got), got).fit(event([1], "a", "stop"))


def test_usage_counts_continued_tokens_as_the_answers() -> None:
    got = delivered(([1], "a"), ([2], "b"))
    splice = Splice(plan(asked(), got), got)
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    fitted, _ = splice.fit({"choices": [], "usage": usage})
    assert fitted is not None
    assert fitted["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_what_came_before_an_engine_gave_up_is_the_clients() -> None:
    got, request = Delivered(), asked()
    handing = Handing(request, Plan(Way.AGAIN, "", b""), got, tracked=True)
    good = b"data: " + json.dumps(event([1], "a")).encode() + b"\n\n"
    for last in ({"error": {"code": 500}}, event([], "", "abort")):
        out = handing.take([good, b"data: " + json.dumps(last).encode() + b"\n\n", good])
        assert out.count(b"data:") == 1
        assert handing.broken is not None
    assert list(got.tokens) == [1, 1]


def test_ids_become_nulls_and_text_that_looks_like_them_stays() -> None:
    said = json.dumps({"text": '"token_ids":[1,2]', "token_ids": [3, 4], "prompt_token_ids": []})
    expected = json.dumps({"text": '"token_ids":[1,2]', "token_ids": 0, "prompt_token_ids": 0})
    found = json.loads(without_ids(said.replace(", ", ",").replace(": ", ":").encode()))
    assert found == json.loads(expected.replace(": 0", ": null"))


def test_events_are_cut_wherever_the_bytes_end() -> None:
    stream = b'data: {"a":1}\n\n: alive\n\ndata: x\r\n\r\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream) + 1):
        cutter, found = EventCutter(), []
        for start in range(0, len(stream), size):
            found += cutter.feed(stream[start : start + size])
        assert b"".join(found) == stream
        payloads = [payload_of(e) for e in found]
        assert payloads == [b'{"a":1}', None, b"x", b"one\ntwo", b"[DONE]"]
        assert cutter.is_empty
