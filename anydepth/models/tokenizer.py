"""Text to token ids and back, from `tokenizer.json` or from a GGUF file's metadata. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from anydepth.models.config import read_json


class Tokenizer:
    """One checkpoint's tokenizer: ids of prompts and chats, text of ids, and which ids end a text.

    backend: what the `tokenizers` library made of it. named_tokens: "bos_token" and the like -> text, for chat
    templates too. add_bos: whether prompts get a BOS. eos_ids: the tokenizer's own, more may stand in a checkpoint's
    configs. source: the bytes that decide ids, for `hash`. vocab_size: largest id + 1 (of the backend's ids, those
    beyond a given vocab_size are never returned).

    Raises ValueError where add_bos is asked for without a BOS token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str],
        add_bos: bool,
        eos_ids: Iterable[int],
        chat_template: str | None,
        source: bytes,
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.named_tokens, self.chat_template = backend, dict(named_tokens), chat_template
        self.add_bos, self.eos_ids = add_bos, frozenset(eos_ids)
        self.vocab_size = vocab_size or largest_id(backend) + 1
        self.bos_id = self.id_of(self.named_tokens.get("bos_token", ""))
        if add_bos and self.bos_id is None:
            raise ValueError("the tokenizer says add_bos_token, but has no bos_token; give one of them another value")
        self._digest = hashlib.sha256(source)
        self._digest.update(json.dumps([self.add_bos, self.bos_id, sorted(self.eos_ids)]).encode())

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """From a folder with tokenizer.json and its companions (tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja or .json), or from the path of the tokenizer.json itself."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file() or file.suffix != ".json":
            raise ValueError(f"no tokenizer at {path}; give a folder with tokenizer.json, or that file")
        source = file.read_bytes()
        try:
            backend = tokenizers.Tokenizer.from_buffer(source)
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{file} is no tokenizer.json that can be read ({error}); download it again") from error
        config = read_json(file.parent / "special_tokens_map.json") | read_json(file.parent / "tokenizer_config.json")
        named = {key: text for key, value in config.items() if key.endswith("_token") and (text := token_text(value))}
        # The post-processor is what adds a BOS where the config does not say; its first token is then the BOS.
        first = backend.encode("", add_special_tokens=True).tokens[:1]
        if first and "bos_token" not in named:
            named["bos_token"] = first[0]
        said = config.get("add_bos_token")
        add_bos = said if isinstance(said, bool) else first == [named.get("bos_token")]
        eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        return cls(
            backend,
            named_tokens=named,
            add_bos=add_bos,
            eos_ids=[] if eos is None else [eos],
            chat_template=folder_template(file.parent, config),
            source=source,
        )

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Ids of a prompt; special tokens in it are parsed as such.

        With `add_bos` (None: as the tokenizer says) exactly one BOS stands in front, also where the text already
        starts with it: encode("<s>Hi") == encode("Hi"). Raises ValueError for text that is no Unicode.
        """
        if not isinstance(text, str):
            raise ValueError(
                f"the prompt is a {type(text).__name__}; allowed: a string (token ids are taken as they "
                f"are, without the tokenizer)"
            )
        try:
            ids = [i for i in self._backend.encode(text, add_special_tokens=False).ids if i < self.vocab_size]
        except (TypeError, UnicodeError) as error:
            raise ValueError(f"the prompt holds lone surrogates and is no valid Unicode ({error})") from error
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos was asked for, but this tokenizer has no BOS token")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a chat, by default with the opening of the assistant's turn. Errors as for `render`."""
        return self.encode(self.render(messages, add_generation_prompt=add_generation_prompt, **variables))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The chat's text as the template writes it. `variables` are the template's own, such as tools.

        Raises ValueError without a template, for messages that are no mappings, and where the template refuses.
        """
        from anydepth.models.chat_template import render

        if not self.chat_template:
            raise ValueError(
                "this checkpoint's tokenizer has no chat template; use a plain prompt, or give a "
                "tokenizer that has one as tokenizer="
            )
        return render(
            self.chat_template,
            messages,
            {**self.named_tokens, **variables, "add_generation_prompt": add_generation_prompt},
        )

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids; incomplete UTF-8 shows as U+FFFD. Ids beyond the vocabulary (padding rows of an embedding) give
        nothing. Text is not always the concatenation of its ids' texts: decode a growing list to stream."""
        known = [i for i in ids if i < self.vocab_size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special)
        return text

    def id_of(self, token: str) -> int | None:
        """Id of a token's exact vocabulary entry, or None."""
        found = self._backend.token_to_id(token)
        return found if found is not None and found < self.vocab_size else None

    def token_of(self, token_id: int) -> str | None:
        """An id's vocabulary entry as it is stored (byte-level vocabularies write a space as "Ġ"), or None."""
        return self._backend.id_to_token(token_id) if token_id < self.vocab_size else None

    def to_json(self) -> str:
        """What tokenizer.json would hold."""
        text: str = self._backend.to_str()
        return text

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def hash(self) -> str:
        """sha256 (hex) over everything that decides ids: not over the chat template."""
        return self._digest.hexdigest()

    @property
    def template_hash(self) -> str | None:
        """sha256 (hex) of the chat template."""
        return hashlib.sha256(self.chat_template.encode()).hexdigest() if self.chat_template else None


def largest_id(backend: tokenizers.Tokenizer) -> int:
    """Largest id of a vocabulary, which may have holes; -1 where it is empty."""
    count: int = backend.get_vocab_size(with_added_tokens=True)
    if backend.id_to_token(count - 1) is not None and backend.id_to_token(count) is None:
        return count - 1  # as many ids as entries, the usual case: no need to copy the vocabulary
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1)


def token_text(value: Any) -> str | None:
    """A named token's text: configs write a string or an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or tokenizer_config's key (a text, or a list with one named default)."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    value = read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        value = {item["name"]: item["template"] for item in value}.get("default")
    return value if isinstance(value, str) and value else None
