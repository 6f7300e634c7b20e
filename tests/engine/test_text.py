"""Ids to text as they come: nothing is shown that may still change, and nothing is lost."""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from anydepth.engine.text import TextStream

EXAMPLES = settings(max_examples=200, deadline=None, derandomize=False, database=None, print_blob=True)


def joined(pieces):
    return lambda ids: "".join(pieces[i] for i in ids)


def stream(decode, ids, stop=(), *, eager=True):
    """(what each id delivered, what the end delivered, the whole text)"""
    text = TextStream(decode, stop, eager=eager)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return pieces, text.end(), text.text


@pytest.mark.parametrize(
    "pieces, stop, delivered, end",
    [
        (["a", "b", "c"], ["b"], ["a", ""], ""),
        (["ab", "cd"], ["bc"], ["a", ""], ""),
        (["ab", "cx"], ["bcd"], ["a", "bcx"], ""),  # what was held back is delivered when it does not become one
        (["ab", "c"], ["bcd"], ["a", ""], "bc"),
        (["aab", "aab"], ["aabaaa"], ["", "aab"], "aab"),
        (["aabaab", "aaa"], ["aabaaa"], ["aab", ""], ""),
        (["x", "xy", "y"], ["xyz", "yy"], ["", "x", "x"], ""),
        (["xyz"], ["z", "y"], ["x"], ""),  # the earliest one in the text, not the first in the list
        (["ab"], ["abc", "b"], ["a"], ""),
        (["a", "bc"], ["c", "abc"], ["", ""], ""),
        (["stop at once"], ["stop"], [""], ""),
        (["", "a", ""], ["q"], ["", "a", ""], ""),
    ],
)
def test_stop_strings(pieces, stop, delivered, end):
    assert stream(joined(pieces), range(len(pieces)), stop)[:2] == (delivered, end)


def test_text_after_a_stop_string_is_gone():
    pieces, end, text = stream(joined(["go ", "on. Q: ", "what"]), range(3), ["Q:"])
    assert (pieces, end, text) == (["go ", "on. "], "", "go on. ")


def test_a_character_in_parts_is_held_until_it_is_whole():
    """Euro sign and emoji byte by byte; an end in the middle of one delivers what it is: U+FFFD."""
    raw = "a€😀b".encode()
    decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731
    pieces, end, text = stream(decode, raw)
    assert pieces == ["a", "", "", "€", "", "", "", "😀", "b"] and (end, text) == ("", "a€😀b")
    pieces, end, text = stream(decode, raw[:3])
    assert (pieces, end, text) == (["a", "", ""], "\ufffd", "a\ufffd")
    assert stream(decode, b"\xff\xfeab")[0] == ["", "", "\ufffd\ufffda", "b"]


def test_a_stop_string_that_ends_in_parts_of_a_character():
    decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731
    assert stream(decode, "so€x".encode(), ["o€"]) == (["s", "", "", "", ""], "", "s")
    assert stream(decode, "soé".encode(), ["o€"]) == (["s", "", "", "oé"], "", "soé")


def word_level() -> tokenizers.Tokenizer:
    """Words joined by single spaces on the way back; three special tokens have no text."""
    words = ["<s>", "</s>", "<unk>", *"abcdefgh", "####", "12"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:3])
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    """One token a byte, some of two bytes, two special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *letters, "he", "Ġh", "ĠĠ"]
    merges = [("h", "e"), ("Ġ", "h"), ("Ġ", "Ġ")]
    tokenizer = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:2])
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    """The Llama-2 kind: "▁" is a space, the first one is dropped, bytes as <0x..> tokens."""
    words = ["<s>", "</s>", "▁", "▁a", "b", "▁▁", "c▁", *(f"<0x{n:02X}>" for n in range(256))]
    tokenizer = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(words[:2])
    return tokenizer


BACKENDS = {"words": word_level(), "bytes": byte_level(), "pieces": sentence_piece()}


def any_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids at all; in the Llama-2 kind bytes come as whole characters, since its decoder turns every byte of a run
    into U+FFFD when one of them is broken, also those that were characters before."""
    backend = BACKENDS[name]
    single = st.integers(0, backend.get_vocab_size() - 1)
    if name == "pieces":
        whole = st.characters(exclude_categories=["Cs"]).map(lambda c: [7 + byte for byte in c.encode()])
        return st.lists(st.integers(0, 6).map(lambda i: [i]) | whole, max_size=9).map(lambda parts: [*chain(*parts)])
    return st.lists(single, max_size=14)


@pytest.mark.parametrize("name", BACKENDS)
@EXAMPLES
@given(data=st.data())
def test_streamed_text_is_the_final_text(name, data):
    """Special ids and broken characters among them: the pieces join to what decoding all at once gives."""
    decode, ids = BACKENDS[name].decode, data.draw(any_ids(name))
    pieces, end, text = stream(decode, ids)
    assert "".join(pieces) + end == text == decode(ids)
    assert stream(decode, ids, eager=False)[1:] == (text, text)


def test_words_come_with_their_spaces():
    """Tokens without a text between two words do not swallow the space that joins them."""
    tokenizer = BACKENDS["words"]
    ids = [tokenizer.token_to_id(word) for word in ("a", "</s>", "b", "<s>", "<unk>", "c", "####", "12")]
    assert stream(tokenizer.decode, ids)[0] == ["a", "", " b", "", "", " c", " ####", " 12"]


@EXAMPLES
@given(
    pieces=st.lists(st.text("ab ", max_size=4), max_size=10),
    stop=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_cut_as_if_the_text_had_come_at_once(pieces, stop):
    """Whatever the pieces: the text ends before the first stop string of what had arrived by then, no piece is ever
    taken back, and what is held back is no longer than a stop string."""
    got, end, text = stream(joined(pieces), range(len(pieces)), stop)
    assert "".join(got) + end == text
    arrived = ""
    for piece in pieces:
        arrived += piece
        cuts = [at for at in (arrived.find(one) for one in stop) if at >= 0]
        if cuts:
            assert text == arrived[: min(cuts)]
            return
    assert text == arrived and len(end) < max(map(len, stop))


def test_without_stop_strings_and_readers_nothing_is_decoded_before_the_end():
    calls = []
    text = TextStream(lambda ids: calls.append(list(ids)) or "all of it", eager=False)
    assert [text.push(token) for token in range(5)] == [""] * 5 and not calls
    assert text.end() == "all of it" and calls == [[0, 1, 2, 3, 4]]


def test_decoding_a_long_answer_takes_a_window_at_a_time():
    """Each id is decoded with its neighbours, not with all that came before: time is linear in the answer."""
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join("ab "[i % 3] for i in ids)

    rng = Random(0)
    stream(decode, [rng.randrange(99) for _ in range(500)])
    assert longest <= 3


def test_a_stop_string_before_half_a_character_is_found_at_once():
    """`llo ` is complete although the same token begins a character that is not."""
    encoded = [b"he", b"llo \xf0\x9f", b"\x91", b"\xa9"]
    text = TextStream(lambda ids: b"".join(encoded[i] for i in ids).decode(errors="replace"), ["llo "])
    assert text.push(0) == "he"
    assert text.push(1) == "" and text.stopped and text.text == "he"


def test_a_stop_string_that_only_the_end_completes_still_stops():
    text = TextStream(joined(["al", "be", "\ufffd"]), ["be\ufffd"])
    assert text.push(0) + text.push(1) == "al"
    text.push(2)
    text.end()
    assert text.stopped and text.text == "al"
