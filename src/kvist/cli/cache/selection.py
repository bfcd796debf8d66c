"""Which blocks a command is about: keys, a prompt, or all; batch by batch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvist.core.errors import ConfigError
from kvist.core.keys import RequestScope, seed_bytes
from kvist.native import chain_keys, digest
from kvist.node.cache import messages as m
from kvist.node.cache.client import CacheClient

Batch = list[tuple[str, str | None]]  # keys, and the key before each if it is known
_MOST_BYTES = 64 << 20  # of a prompt's file
_KEY_DIGITS = 64
_HEX = frozenset("0123456789abcdef")


def selected(
    client: CacheClient, args: argparse.Namespace, tier: m.Place | None
) -> Iterator[Batch]:
    """The keys that are meant, those of a list in `tier` only; a bounded number at a time.

    Raises:
        ConfigError: nothing, or two things, are named, or a prompt's file cannot be used.
        DeniedError: the node knows no such block.
    """
    ways = [bool(args.key), bool(args.tokens), bool(args.text), args.all]
    if sum(ways) != 1:
        raise ConfigError(
            "name blocks in one way",
            path="KEY",
            remedy="give KEYs, --tokens FILE, --text FILE --model MODEL, or --all",
        )
    if args.tokens or args.text:
        yield from _of_prompt(client, args)
        return
    endings = [checked_digits(text) for text in args.key] or [""]
    for ending in endings:
        ask = m.ListBlocks(
            keyspace=args.keyspace,
            tenant=args.tenant,
            tier=tier,
            ending=ending,
            alone=args.alone,
            limit=m.MOST_ITEMS,
        )
        for page in pages(client, ask):
            yield list(dict.fromkeys((block.key, block.parent) for block in page.blocks))


def pages(client: CacheClient, ask: m.ListBlocks) -> Iterator[m.BlockPage]:
    """A list, page by page."""
    while True:
        page = client.ask(ask, m.BlockPage)
        yield page
        if not page.cursor:
            return
        ask = msgspec.structs.replace(ask, cursor=page.cursor)


def checked_digits(text: str) -> str:
    """Hex digits of a key.

    Raises:
        ConfigError: they are none.
    """
    digits = text.lower()
    if not digits or len(digits) > _KEY_DIGITS or not _HEX.issuperset(digits):
        raise ConfigError(
            f"{text!r} is no key", path="KEY", remedy="give hex digits, as `kvist cache ls` prints"
        )
    return digits


def _of_prompt(client: CacheClient, args: argparse.Namespace) -> Iterator[Batch]:
    keyspace = _keyspace(client, args.keyspace)
    tokens = _token_ids(args.tokens) if args.tokens else _tokenised(args.text, args.model)
    if not keyspace.block_tokens:
        raise ConfigError(
            f"the engine of {keyspace.fingerprint[:12]} did not say how long its blocks are",
            remedy="give keys instead",
        )
    scope = RequestScope(salt=args.salt)
    seed = digest(seed_bytes(bytes.fromhex(keyspace.fingerprint), scope))
    try:
        keys = chain_keys(seed, tokens, keyspace.block_tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"no token ids: {error}", path=args.tokens or args.text) from error
    if not keys:
        raise ConfigError(
            f"{len(tokens)} tokens do not fill a block of {keyspace.block_tokens}",
            path=args.tokens or args.text,
            remedy="give a longer prompt; what does not fill a block is not cached",
        )
    names = [key.hex() for key in keys]
    chain = list(zip(names, [None, *names[:-1]], strict=True))
    chain = chain[-1:] if args.alone else chain
    for start in range(0, len(chain), m.MOST_KEYS):
        yield chain[start : start + m.MOST_KEYS]


def _keyspace(client: CacheClient, digits: str) -> m.OpenKeyspace:
    found = client.ask(m.ShowKeyspaces(), m.Keyspaces).keyspaces
    meant = [k for k in found if k.fingerprint.startswith(digits)]
    if len(meant) != 1:
        names = ", ".join(k.fingerprint[:12] for k in found) or "none"
        raise ConfigError(
            f"{len(meant)} open keyspaces are meant", path="--keyspace", remedy=f"open are: {names}"
        )
    return meant[0]


def _read(path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="give a file of text") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(
            f"{path} is above {_MOST_BYTES >> 20} MiB", remedy="is it the right file?"
        )
    return text


def _token_ids(path: str) -> list[int]:
    try:
        return msgspec.json.decode(_read(path), type=list[int])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path}: {error}", path="--tokens", remedy="write a JSON list such as [1, 2, 3]"
        ) from error


def _tokenised(path: str, model: str | None) -> list[int]:
    if not model:
        raise ConfigError("says not whose tokens", path="--text", remedy="add --model MODEL")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "needs a tokenizer", path="--text", remedy="pip install 'kvist[transformers]'"
        ) from error
    text = _read(path)
    try:
        ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer of {model}: {' '.join(str(error).split())[:200]}", path="--model"
        ) from error
    return [int(token) for token in ids]
