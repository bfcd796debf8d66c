"""A model's folder gives the tokens of a chat, and equal beginnings give equal keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvist.assemble.gateway import open_gateway
from kvist.config import load_config
from kvist.core.errors import ConfigError
from kvist.gateway.ask import Endpoint, read_body
from kvist.gateway.prompt import Prompt, Prompts
from kvist.gateway.template import ModelTokenizer, UnreadablePrompt

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if messages[0].role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are characters."""
    letters = {chr(i): i for i in range(32, 127)} | {"\n": 10}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "^"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def text_of(tokens: list[int]) -> str:
    """Tokens as characters."""
    return "".join(map(chr, tokens))


def test_chat_is_rendered_as_the_model_wants_it(folder: Path) -> None:
    tokenizer = ModelTokenizer(folder)
    messages = [{"role": "user", "content": "hi"}]
    assert text_of(tokenizer.chat({"messages": messages})) == "^<user>hi<assistant>"
    with_tools = tokenizer.chat({"messages": messages, "tools": [{"b": "<"}]})
    assert text_of(with_tools) == '^<user>hi[{"b": "<"}]<assistant>'
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
    assert text_of(tokenizer.chat(joined)) == "^<user>a\nb"
    call = {"function": {"name": "f", "arguments": '{"a": 5}'}}
    called = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert text_of(tokenizer.chat(called)) == "^<assistant>5<assistant>"


def test_template_in_its_own_file_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert text_of(ModelTokenizer(folder).chat({"messages": [{"content": "x"}]})) == "x"


@pytest.mark.parametrize(
    "payload",
    [
        {"messages": [{"role": "bad", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
        {"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        {"messages": [{"role": "a", "tool_calls": ["?"]}]},
        {"messages": [{"role": "a", "content": [1]}]},
    ],
    ids=str,
)
def test_chat_that_cannot_be_rendered_is_left_to_the_engine(
    folder: Path, payload: dict[str, Any]
) -> None:
    with pytest.raises(UnreadablePrompt):
        ModelTokenizer(folder).chat(payload)
    asked = read_body(Endpoint.CHAT, json.dumps(payload).encode())
    prompts = Prompts(ModelTokenizer(folder), lambda *_: (b"k",))
    assert asyncio.run(prompts.read(asked, 400, "")) == Prompt(100)


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": "{% if %}"}'])
def test_folder_that_is_no_models_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        ModelTokenizer(folder)


def test_prompts_with_one_beginning_share_its_keys(folder: Path) -> None:
    loaded = load_config(
        env={},
        sets=[
            "block_tokens=16",
            f"gateway.tokenizer={folder}",
            "gateway.replicas=http://127.0.0.1:1",
            "gateway.listen=127.0.0.1:0",
        ],
    )
    gateway, listener = open_gateway(loaded.config)
    listener.close()

    def keys(text: str, **more: Any) -> tuple[bytes, ...]:
        body = json.dumps({"prompt": text, **more}).encode()
        asked = read_body(Endpoint.COMPLETIONS, body)
        return asyncio.run(gateway.prompts.read(asked, len(body), "")).keys

    one, two = keys("a" * 40 + "b" * 30), keys("a" * 40 + "c" * 30)
    assert (len(one), one[:2]) == (4, two[:2])
    assert one[2] != two[2]
    assert keys("a" * 40, cache_salt="s")[0] != one[0]
    assert keys("a" * 5000)[:2] == one[:2]  # read by a thread
    gateway.prompts.close()
