"""nano's vocabulary: one token a word. No torch here."""

from __future__ import annotations

import json
from pathlib import Path

from anydepth.models.nano.questions import LARGEST, NAMES

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_WORDS = ("has", "more", "fewer", "than", "as", "many", "How", "?", ".", "####", "have", "and", "since", "why")
VOCABULARY: tuple[str, ...] = (PAD, EOS, UNKNOWN, *_WORDS, *(str(n) for n in range(2 * LARGEST + 1)), *NAMES)
IDS: dict[str, int] = {word: index for index, word in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Ids of a text of known words. ValueError names the first word outside the vocabulary."""
    try:
        return [IDS[word] for word in text.split()]
    except KeyError as error:
        raise ValueError(
            f"the word {error.args[0]!r} is not in nano's vocabulary of {len(VOCABULARY)} words; "
            "see anydepth.models.nano.tokenizer.VOCABULARY"
        ) from None


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Decoding joins words by single spaces; no BOS is added."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (PAD, EOS, UNKNOWN)])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
