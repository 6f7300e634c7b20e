"""A tokenizer from a GGUF file's metadata: byte-level BPE that splits text as llama.cpp does for each `pre`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from anydepth.models.tokenizer import Tokenizer
from anydepth.types import unknown

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Pre(NamedTuple):
    """How text is cut before merging: each pattern cuts what the ones before it left whole. Words that are tokens
    already skip the merges with `whole_words`."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


PRE = {
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Pre((GPT2,)),
    "smollm": Pre((r"\p{N}", GPT2)),
    "qwen2": Pre((LLAMA3.replace("{1,3}", ""),)),
    "llama-bpe": Pre((LLAMA3,), whole_words=True, add_bos=True),
}
CONTROL, UNKNOWN, USER_DEFINED = 3, 2, 4
# Ends of a turn that files of instruct models do not always declare.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, path: Path) -> Tokenizer | None:
    """From the keys tokenizer.*, None where a file has none of them.

    Raises ValueError for another kind of tokenizer than byte-level BPE, an unknown `pre`, or contradictory keys.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind != "gpt2":
        raise ValueError(
            f"{path}: tokenizer.ggml.model is {kind!r}; allowed: 'gpt2' (byte-level BPE). Give a folder "
            f"with this model's tokenizer.json as tokenizer="
        )
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE:
        raise ValueError(
            f"{path}: {unknown('tokenizer.ggml.pre', str(name), PRE)}. Give a folder with this model's "
            f"tokenizer.json as tokenizer="
        )
    pre = PRE[name]
    tokens, kinds, merges = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if not tokens or not merges or len(kinds or tokens) != len(tokens):
        raise ValueError(f"{path}: tokens, token_type and merges of tokenizer.ggml are incomplete; download it again")
    named = {
        f"{role}_token": tokens[index]
        for role, key in ROLES.items()
        if (index := token_id(metadata, key, tokens, path)) is not None
    }
    specials = {tokens[i]: kind for i, kind in enumerate(kinds or []) if kind in (CONTROL, UNKNOWN, USER_DEFINED)}
    ends = [token_id(metadata, key, tokens, path) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    ends += [tokens.index(end) for end in TURN_ENDS if specials.get(end) == CONTROL]
    source = hashlib.sha256(json.dumps([name, tokens, kinds, merges]).encode()).digest()
    return Tokenizer(
        backend_of(pre, tokens, merges, specials, path),
        named_tokens=named,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)),
        eos_ids=[end for end in ends if end is not None],
        source=source,
        vocab_size=len(tokens),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def token_id(metadata: Mapping[str, Any], key: str, tokens: list[str], path: Path) -> int | None:
    """A special token's id. ValueError where it is beyond the vocabulary."""
    index = metadata.get(f"tokenizer.ggml.{key}")
    if index is not None and not 0 <= index < len(tokens):
        raise ValueError(f"{path}: tokenizer.ggml.{key} is {index}; allowed: 0 to {len(tokens) - 1}")
    return index


def backend_of(
    pre: Pre, tokens: list[str], merges: list[str], specials: Mapping[str, int], path: Path
) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    # llama.cpp drops bytes without a token after merging. Without ids here they would go before, and their neighbours
    # would merge over the gap: so they get ids beyond the vocabulary, which `Tokenizer.encode` leaves out.
    lacking = [byte for byte in sorted(pre_tokenizers.ByteLevel.alphabet()) if byte not in vocab]
    vocab |= {byte: len(tokens) + index for index, byte in enumerate(lacking)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab, pairs, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{path}: merges and tokens of tokenizer.ggml contradict each other ({error})") from error
    backend = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [AddedToken(text, special=kind != USER_DEFINED, normalized=False) for text, kind in specials.items()]
    )
    return backend
