"""Engines' events become keys that mean the same for all replicas; what cannot is left out."""

from __future__ import annotations

import logging

import pytest
from publishers import WIDTH, Engine, new_index, prompt

from kvist.cluster.directory import Holder
from kvist.core.outcome import Tier
from kvist.router.index import Prefix, PrefixIndex

WHOLE = Prefix(5, 5, 5, 5)


def heard(
    engine: Engine, *events: dict[str, object], index: PrefixIndex | None = None
) -> PrefixIndex:
    index = new_index() if index is None else index
    index.attach(engine.name)
    for event in events:
        index.take(engine.says(event), 0.0)
    return index


def test_engines_with_hashes_of_their_own_match_the_same_tokens() -> None:
    one, two, tokens = Engine("one"), Engine("two"), prompt(1, 5)
    assert not set(one.hashes(tokens)) & set(two.hashes(tokens))
    index = heard(one, one.stored(tokens))
    heard(two, two.stored(tokens, last=2), two.stored(tokens, first=2, last=3), index=index)
    found = index.match(index.keys([*tokens, 7, 7]))
    assert found == {"one": WHOLE, "two": Prefix(3, 3, 3, 3)}


def test_numbers_of_64_bits_are_names_too() -> None:
    engine, tokens = Engine("e"), prompt(1, 3)
    index = heard(
        engine,
        engine.stored(tokens, last=2, block_hashes=[3, -4]),
        engine.stored(tokens, first=2, block_hashes=[5], parent_block_hash=-4),
    )
    keys = index.keys(tokens)
    assert index.match(keys) == {"e": Prefix(3, 3, 3, 3)}
    index.take(engine.says(engine.removed([-4])), 0.0)  # type: ignore[list-item]
    assert index.match(keys) == {"e": Prefix(1, 1, 1, 1)}


def test_offloaded_block_is_found_by_the_same_hash_without_its_tokens() -> None:
    """vLLM's offloading says nothing of a block but its hash."""
    engine, tokens = Engine("e"), prompt(1, 5)
    names = engine.hashes(tokens)
    bare = {"token_ids": [], "block_size": 0, "parent_block_hash": None}
    index = heard(
        engine,
        engine.stored(tokens),
        engine.stored(tokens, **bare, medium="CPU"),
        engine.stored(tokens, **bare, medium="STORAGE", locality="LOCAL"),
        engine.removed(names),
        engine.removed(names[3:], "CPU"),
    )
    assert index.match(index.keys(tokens)) == {"e": Prefix(0, 3, 5, 5)}


def test_keys_of_the_connector_need_no_names() -> None:
    """Kvist inside vLLM publishes its own keys on vLLM's channel, with the tokens."""
    engine, tokens = Engine("e"), prompt(1, 5)
    index = new_index()
    keys = index.keys(tokens)
    said = engine.stored(tokens, block_hashes=keys, medium="CPU")
    bare = said | {"medium": "STORAGE", "token_ids": [], "block_hashes": keys[:2]}
    heard(engine, said, bare, index=index)
    assert index.match(keys) == {"e": Prefix(0, 5, 5, 5)}
    assert index.holders(keys[0]) == [Holder("e", Tier.DRAM)]
    index.take(engine.says(engine.removed(keys, "CPU")), 0.0)
    assert index.match(keys) == {"e": Prefix(0, 0, 2, 2)}


def test_duplicates_change_nothing() -> None:
    engine, tokens = Engine("e"), prompt(1, 5)
    index = heard(engine, engine.stored(tokens), engine.stored(tokens), engine.stored(tokens))
    assert index.match(index.keys(tokens)) == {"e": WHOLE}
    assert len(index) == 5


def test_blocks_without_a_known_parent_are_counted_and_left_out() -> None:
    engine, tokens = Engine("e"), prompt(1, 5)
    index = heard(engine, engine.stored(tokens, first=2))
    assert len(index) == 0
    assert index.feed.counts.orphans == 3


def test_everything_cleared_leaves_nothing_but_what_comes_after() -> None:
    engine, tokens, other = Engine("e"), prompt(1, 5), prompt(2, 5)
    index = heard(engine, engine.stored(tokens), {"type": "AllBlocksCleared"}, engine.stored(other))
    assert index.match(index.keys(tokens)) == {}
    assert index.match(index.keys(other)) == {"e": WHOLE}


def test_other_block_size_is_said_loudly_and_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, tokens = Engine("e", width=WIDTH * 2), prompt(1, 6)
    with caplog.at_level(logging.ERROR):
        index = heard(engine, engine.stored(tokens), engine.stored(tokens))
    (said,) = caplog.records
    assert said.getMessage().startswith(
        "e has blocks of 8 tokens, requests are cut into blocks of 4"
    )
    assert index.feed.mismatches == {"e": 8}
    assert index.feed.counts.mismatched == 6
    assert len(index) == 0


def test_part_of_a_block_is_left_out_quietly(caplog: pytest.LogCaptureFixture) -> None:
    engine, tokens = Engine("e"), prompt(1, 3)
    part = engine.stored(tokens, first=2) | {"token_ids": tokens[8:10], "block_size": 2}
    index = heard(engine, engine.stored(tokens, last=2), part)
    assert index.feed.counts.partial == 1
    assert index.feed.mismatches == {}
    assert caplog.records == []
    assert index.match(index.keys(tokens)) == {"e": Prefix(2, 2, 2, 2)}


def test_salt_and_adapter_separate_equal_tokens() -> None:
    engine, tokens = Engine("e"), prompt(1, 5)
    index = new_index(adapters={"french": "digest of french"})
    salted = [["pepper"], *[None] * 4]
    heard(engine, engine.stored(tokens, extra_keys=salted), index=index)
    assert index.match(index.keys(tokens)) == {}
    assert index.match(index.keys(tokens, salt="pepper")) == {"e": WHOLE}
    adapted = Engine("adapted")
    both = [["french", "pepper"], *[["french"]] * 4]
    heard(adapted, adapted.stored(tokens, lora_name="french", extra_keys=both), index=index)
    assert index.match(index.keys(tokens, lora="french", salt="pepper")) == {"adapted": WHOLE}


def test_unknown_adapter_matches_nothing() -> None:
    engine, tokens = Engine("e"), prompt(1, 5)
    extras = [["unheard"]] * 5
    index = heard(engine, engine.stored(tokens, lora_name="unheard", extra_keys=extras))
    assert (len(index), index.feed.counts.unnamed) == (0, 5)
    assert index.keys(tokens, lora="unheard") == []


def test_prefix_ends_where_an_image_begins() -> None:
    engine, tokens = Engine("e"), prompt(1, 5)
    extras = [None, None, [["image", 1]], None, None]
    index = heard(engine, engine.stored(tokens, extra_keys=extras))
    assert index.match(index.keys(tokens)) == {"e": Prefix(2, 2, 2, 2)}
    assert index.feed.counts.unnamed == 3


def test_blocks_left_out_of_the_middle_are_not_guessed() -> None:
    engine, tokens = Engine("e"), prompt(1, 5)
    event = engine.stored(tokens)
    event["block_hashes"] = event["block_hashes"][:2] + event["block_hashes"][3:]
    index = heard(engine, event)
    assert (len(index), index.feed.counts.unnamed) == (0, 4)


def test_only_the_group_that_keeps_whole_prefixes_counts() -> None:
    engine, tokens = Engine("e"), prompt(1, 5)
    names = engine.hashes(tokens)
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    whole = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    second = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    index = heard(
        engine,
        engine.stored(tokens, **window),
        engine.stored(tokens, **whole),
        engine.stored(tokens, **second),
        engine.removed(names, group_idx=0),
        engine.removed(names[4:], group_idx=1),
    )
    assert index.match(index.keys(tokens)) == {"e": Prefix(4, 4, 4, 4)}
    assert index.feed.counts.other_groups == 10


def test_restarted_engine_may_count_its_groups_anew() -> None:
    engine, tokens = Engine("e"), prompt(1, 5)
    one = engine.stored(tokens, group_idx=1, kv_cache_spec_kind="full_attention")
    index = heard(engine, one, one)
    engine.restart()
    heard(engine, engine.stored(tokens, last=3), index=index)
    assert index.match(index.keys(tokens)) == {"e": Prefix(3, 3, 3, 3)}
