"""A model's tokenizer and chat template, read from its folder without the model's framework."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvist.core.errors import ConfigError
from kvist.gateway.pieces import Pieces, reads_apart

_KNOB = "$.gateway.tokenizer"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class UnreadablePrompt(ValueError):
    """A prompt that the template cannot render; an engine may say why."""


class ModelTokenizer:
    """Tokens of texts and chats, as an engine that serves the model has them.

    Source: the sandbox, filters and functions are those of Hugging Face's chat templates
    (`transformers.utils.chat_template_utils`); text parts of a message are joined by line breaks,
    as vLLM does for templates that expect text.
    """

    def __init__(self, folder: Path) -> None:
        """Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, if there.

        Raises:
            ConfigError: the folder has no tokenizer, or its template is none.
        """
        try:
            file = (folder / "tokenizer.json").read_bytes()
            self._tokenizer = Tokenizer.from_buffer(file)
            spec = json.loads(file)
            self._pieces = Pieces(self._tokenizer, spec) if reads_apart(spec) else None
            config = _json(folder / "tokenizer_config.json")
            self._template = self._compiled(_template_text(folder, config))
        except (OSError, ValueError, LookupError, TypeError, TemplateError) as error:
            raise ConfigError(
                f"cannot read the tokenizer in {folder}: {error}",
                path=_KNOB,
                remedy="name the model's folder, with tokenizer.json and tokenizer_config.json",
            ) from error
        self._special = {name: _token(config[name]) for name in _SPECIAL if config.get(name)}

    def text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt."""
        if self._pieces is not None and not add_special_tokens:
            return self._pieces.tokens(text)
        read = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(read[0].ids)

    def chat(self, payload: Mapping[str, Any]) -> list[int]:
        """The tokens of a chat request's messages.

        Raises:
            UnreadablePrompt: there is no template, it fails, or a message is not only text.
        """
        if self._template is None or payload.get("chat_template"):
            raise UnreadablePrompt("no template, or the client's own")
        options = payload.get("chat_template_kwargs")
        try:
            text = self._template.render(
                **self._special,
                **(options if isinstance(options, dict) else {}),
                messages=[_plain(message) for message in payload["messages"]],
                tools=payload.get("tools") or None,
                documents=payload.get("documents"),
                add_generation_prompt=payload.get("add_generation_prompt", True),
            )
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise UnreadablePrompt(str(error)) from error
        return self.text(text, add_special_tokens=bool(payload.get("add_special_tokens")))

    @staticmethod
    def _compiled(text: str | None) -> Any:
        if text is None:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        return environment.from_string(text)


def _template_text(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in found}
        return named.get("default")
    return found


def _json(path: Path) -> Mapping[str, Any]:
    found = json.loads(path.read_text()) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a mapping")
    return found


def _token(entry: Any) -> str:
    return str(entry["content"] if isinstance(entry, Mapping) else entry)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, arguments of calls as objects."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if p.get("type") == "text" else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise UnreadablePrompt("a part is not text")
        plain["content"] = "\n".join(str(part) for part in parts)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in plain["tool_calls"]]
    return plain


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _to_json(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=pair,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
