"""`LLM` on tiny folders of both namings: what goes in and out, in which order, and what is held afterwards."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from anydepth import LLM, Sampling
from anydepth.engine.philox import derive
from anydepth.reference.generate import generate, score
from anydepth.reference.model import Model as Reference
from tests.helpers import by_request
from tests.models.checkpoints import WORDS, write_folder, write_tokenizer

SAMPLED = Sampling(max_tokens=6, temperature=1.0, seed=11)
KINDS = pytest.mark.parametrize("kind", ["looped", "layered"])


@pytest.fixture
def load(tmp_path):
    """An LLM over a folder of 16 words, or of ids alone, and the reference with the same weights."""

    def load(kind="looped", words=True, **options):
        weights = write_folder(tmp_path, kind, vocab_size=len(WORDS))
        if words:
            write_tokenizer(tmp_path)
        segments = {"layered": [1, 2, 4]}.get(kind)
        llm = LLM(tmp_path, **{"dtype": "float64", "segments": segments, "page_size": 4, "kv_pages": 60} | options)
        config = dict(llm.checkpoint.config)
        return llm, Reference(config, {n: w.double() for n, w in weights.items()}, segments=segments)

    return load


def assert_nothing_held(llm):
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["pages_in_use"]) == (0, 0, 0)
    assert not llm._inbox and not llm._mail and not llm.engine.slots.chunks


@KINDS
def test_ids_in_ids_out_without_a_tokenizer(load, kind):
    llm, reference = load(kind, words=False)
    prompts = [[7, 8, 9], [10], [6, 11, 12, 13, 9, 9]]
    outputs = llm.generate(prompts, Sampling(max_tokens=5))
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = generate(reference, prompt, fill=llm.stats()["fill"], max_tokens=5)
        assert (list(output.token_ids), list(output.depths)) == (wanted.token_ids, wanted.depths)
        assert output.text is None and output.prompt_ids == tuple(prompt)
    with pytest.raises(ValueError, match="has no tokenizer; give token ids"):
        llm.generate("a b")
    with pytest.raises(ValueError, match="a chat needs a tokenizer"):
        llm.chat([{"role": "user", "content": "a"}])
    assert [chunk.text for chunk in llm.stream([7], Sampling(max_tokens=3))] == [None] * 3


@KINDS
def test_text_in_text_out(load, kind):
    """A string's ids are the tokenizer's; text is derived from the ids and leaves the ending id out."""
    llm, _ = load(kind)
    (output,) = llm.generate("a b c", Sampling(max_tokens=6, ignore_eos=True))
    assert output.prompt_ids == (6, 7, 8) and output.text == llm.tokenizer.decode(output.token_ids)
    assert llm.generate([6, 7, 8], Sampling(max_tokens=6, ignore_eos=True))[0].token_ids == output.token_ids
    (stopped,) = llm.generate("a b c", Sampling(max_tokens=6, ignore_eos=True, stop_token_ids=[output.token_ids[2]]))
    cut = output.token_ids.index(output.token_ids[2])
    assert stopped.token_ids == output.token_ids[: cut + 1] and stopped.finish_reason == "stop"
    assert stopped.text == llm.tokenizer.decode(output.token_ids[:cut])


def test_outputs_are_prompts_times_n_prompt_major(load):
    llm, _ = load()
    outputs = llm.generate(["a", "b c", "d e f"], replace(SAMPLED, n=3))
    assert [(o.prompt_index, o.answer_index) for o in outputs] == [(i, j) for i in range(3) for j in range(3)]
    assert [o.prompt_ids for o in outputs[::3]] == [(6,), (7, 8), (9, 10, 11)]
    assert len({o.token_ids for o in outputs}) > 6
    assert llm.generate([]) == [] and len(llm.generate("a", Sampling(max_tokens=1))) == 1


def test_each_answer_has_a_derived_seed_that_reproduces_it_alone(load):
    """Answer j to prompt i uses derive(seed, i, j), records it, and is the same answer when it is asked for alone."""
    llm, _ = load()
    prompts = ["a", "b c", "d e f"]
    outputs = llm.generate(prompts, replace(SAMPLED, n=2))
    assert outputs[0].seed == 11
    for output in outputs:
        assert output.seed == derive(11, output.prompt_index, output.answer_index)
        (alone,) = llm.generate([prompts[output.prompt_index]], replace(SAMPLED, seed=output.seed))
        assert (alone.token_ids, alone.depths, alone.seed) == (output.token_ids, output.depths, output.seed)


def test_one_sampling_a_prompt(load):
    """Settings go with their prompt, and each one's own seed counts from answer 0."""
    llm, _ = load()
    asks = [replace(SAMPLED, max_tokens=2, n=2), Sampling(max_tokens=3, depth=1), replace(SAMPLED, max_tokens=4)]
    outputs = llm.generate(["a", "b", "a"], asks)
    assert [(o.prompt_index, o.answer_index) for o in outputs] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert all(len(o.token_ids) <= n for o, n in zip(outputs, (2, 2, 3, 4), strict=True))
    assert [outputs[n].seed for n in (0, 1, 3)] == [11, derive(11, 0, 1), 11]
    assert outputs[3].token_ids[:2] == outputs[0].token_ids and set(outputs[2].depths[1:]) <= {1}
    with pytest.raises(ValueError, match="2 Samplings for 3 prompts; give one, or one a prompt"):
        llm.generate(["a", "b", "c"], asks[:2])


def test_every_prompt_is_checked_before_any_work(load):
    llm, _ = load()
    for prompts, sampling, message in (
        (["a", ""], None, "prompt 1: the prompt is empty"),
        ([[6], [6, 16]], None, "prompt 1: the prompt has 16 at index 1"),
        (["a", "b"], [Sampling(), Sampling(depth=5)], "prompt 1: depth is 5"),
        (["a"], [{"max_tokens": 3}], "prompt 0: its sampling is .*; allowed: a Sampling"),
        (["a"], {"max_tokens": 3}, "allowed: a Sampling"),
        (7, None, "7 is no prompt; allowed: a string, a list of token ids, or a list of such prompts"),
        (None, None, "None is no prompt"),
    ):
        for call in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match=message):
                call(prompts, sampling)
    assert llm.stats()["turns"] == 0
    assert_nothing_held(llm)


@KINDS
@pytest.mark.parametrize("stop", [(), ("c d", "h")])
def test_stream_yields_what_generate_returns(load, kind, stop):
    llm, _ = load(kind)
    ask = replace(SAMPLED, n=2, stop=stop, logprobs="processed", max_tokens=12, ignore_eos=True)
    prompts = ["a b c", "d"]
    outputs = llm.generate(prompts, ask)
    chunks = by_request(llm.stream(prompts, ask))
    assert len(chunks) == 4
    for parts, output in zip(chunks.values(), outputs, strict=True):
        assert [c.token_id for c in parts] == list(output.token_ids)
        assert [c.depth for c in parts] == list(output.depths)
        # The second time the prompt's beginning is there already, which may round its last position another way.
        assert [c.logprob for c in parts] == pytest.approx(output.logprobs, abs=1e-12)
        assert "".join(c.text for c in parts) == output.text == parts[-1].output.text
        assert [c.finish_reason for c in parts] == [None] * (len(parts) - 1) + [output.finish_reason]
        same = {"request_id": "", "logprobs": None, "usage": None}
        assert replace(parts[-1].output, **same) == replace(output, **same)
    assert_nothing_held(llm)


def test_two_streams_side_by_side_and_a_generate_in_between(load):
    """Whoever steps the engine, each iterator gets its own chunks, all of them, in order."""
    llm, _ = load()
    ask = replace(SAMPLED, max_tokens=8, ignore_eos=True)
    wanted = [llm.generate([prompt], ask)[0].token_ids for prompt in ("a b", "c")]
    first, second = llm.stream(["a b"], ask), llm.stream(["c"], ask)
    got = [[next(first).token_id], [next(second).token_id]]
    got[0] += [next(first).token_id for _ in range(3)]
    assert llm.generate("d e", ask)[0].token_ids == llm.generate(["d e"], ask)[0].token_ids
    got[1] += [chunk.token_id for chunk in second]
    got[0] += [chunk.token_id for chunk in first]
    assert [tuple(ids) for ids in got] == wanted
    assert_nothing_held(llm)


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("how", ["close", "forget"])
def test_closing_a_stream_early_frees_everything(load, taken, how):
    """Before its first chunk, after some, by close() or by dropping it; another stream goes on."""
    llm, _ = load()
    ask = replace(SAMPLED, max_tokens=10, ignore_eos=True)
    wanted = llm.generate("c d", ask)[0].token_ids
    other, doomed = llm.stream(["c d"], ask), llm.stream(["a", "b", "a b c d e"], ask)
    got = [next(other).token_id]
    for _ in range(taken):
        next(doomed)
    got.append(next(other).token_id)
    if how == "close":
        doomed.close()
    del doomed
    gc.collect()
    assert llm.stats()["running"] + llm.stats()["waiting"] == 1
    assert (*got, *(chunk.token_id for chunk in other)) == wanted
    assert_nothing_held(llm)
    assert llm.stats()["finished"].get("abort", 0) == (3 if taken else 0)


def test_an_error_in_a_turn_reaches_whoever_stepped_and_ends_the_others(load, monkeypatch):
    llm, _ = load()
    ask = replace(SAMPLED, max_tokens=10, ignore_eos=True)
    first = llm.stream(["a"], ask)
    next(first)
    segment = llm.checkpoint.model.segment

    def fails_once(*args):
        monkeypatch.setattr(llm.checkpoint.model, "segment", segment)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(llm.checkpoint.model, "segment", fails_once)
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.generate("b")
    assert [chunk.finish_reason for chunk in first] == ["error"]
    assert_nothing_held(llm)
    assert llm.generate("b", ask)[0].finish_reason == "length"


@KINDS
def test_scores_are_the_references(load, kind):
    llm, reference = load(kind)
    contexts, targets = [[6, 7, 8], [9], [6, 7, 8]], [[9, 10], [11, 12, 13], [14]]
    for settings in ({}, {"depth": 1}, *([{"exit_threshold": 0.5}] * (kind == "looped"))):
        scores = llm.score(contexts, targets, Sampling(**settings))
        for got, context, target in zip(scores, contexts, targets, strict=True):
            wanted = score(reference, context, target, fill=llm.stats()["fill"], **settings)
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-9)
            assert list(got.depths) == wanted.depths and list(got.argmax) == wanted.argmax
    assert_nothing_held(llm)


def test_equal_contexts_are_prefilled_once(load):
    """Two contexts, five pairs: each context's prefill is in the usage of its first pair only."""
    llm, _ = load()
    contexts = [[6, 7, 8], [9, 10], [6, 7, 8], [9, 10], [6, 7, 8]]
    targets = [[11], [12, 13], [14, 15, 6], [7], [8, 9]]
    scores = llm.score(contexts, targets)
    assert [len(one.logprobs) for one in scores] == [1, 2, 3, 1, 2]
    assert [one.usage.segments_prefill for one in scores] == [4 * 2, 4 * 1, 0, 0, 0]
    assert [one.usage.decode_tokens for one in scores] == [1, 2, 3, 1, 2]
    assert llm.stats()["usage"]["segments_prefill"] == 12 and llm.stats()["usage"]["segments_executed"] == 4 * 9
    alone = [llm.score([context], [target])[0] for context, target in zip(contexts, targets, strict=True)]
    for together, one in zip(scores, alone, strict=True):
        assert together.logprobs == pytest.approx(one.logprobs, abs=1e-9)


def test_scoring_strings(load):
    """The continuation's ids are what encode(context + continuation) adds to encode(context)."""
    llm, _ = load()
    (got,) = llm.score("a b", " c d")
    (wanted,) = llm.score([[6, 7]], [[8, 9]])
    assert got.logprobs == wanted.logprobs
    greedy = llm.generate("a b", Sampling(max_tokens=3, ignore_eos=True))[0].token_ids
    other = (greedy[-1] + 1) % len(WORDS)
    best, second = llm.score([[6, 7]] * 2, [list(greedy), [*greedy[:-1], other]])
    assert best.argmax == (True, True, True) and best.greedy
    assert second.argmax == (True, True, False) and not second.greedy
    for contexts, continuations, message in (
        (["a", "b"], ["c"], "2 contexts for 1 continuations"),
        (["a"], [[7]], "must both be strings or both be token ids"),
        (["a"], [""], "the continuation is empty"),
        ([[6]], [[7.9]], "the continuation has 7.9 at index 0"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.score(contexts, continuations)
    assert_nothing_held(llm)


def test_chat_goes_through_the_template(load):
    """One conversation or several; the template writes the BOS, and there is exactly one."""
    llm, _ = load()
    chats = [[{"role": "user", "content": " a b "}], [{"role": "user", "content": " c "}]]
    ids = llm.chat_ids(chats)
    assert ids == [[0, 3, 6, 7, 4], [0, 3, 8, 4]] and llm.chat_ids(chats[0]) == ids[:1]
    ask = Sampling(max_tokens=4, ignore_eos=True)
    outputs = llm.chat(chats, ask)
    assert [list(o.prompt_ids) for o in outputs] == ids
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(ids, ask)]
    with pytest.raises(ValueError, match="messages must be a list"):
        llm.chat([{"content": "no role"}])


def test_eos_ends_an_answer_unless_it_is_ignored(load):
    """Here the tokenizer's </s>, id 1: it is among the ids and depths, and not in the text."""
    llm, _ = load()
    ask = Sampling(max_tokens=30, temperature=2.0, seed=3, n=20)
    ended = [o for o in llm.generate("a", ask) if o.finish_reason == "stop"]
    assert ended and all(o.token_ids[-1] == 1 and 1 not in o.token_ids[:-1] for o in ended)
    assert all(o.text == llm.tokenizer.decode(o.token_ids[:-1]) for o in ended)
    assert {o.finish_reason for o in llm.generate("a", replace(ask, ignore_eos=True))} == {"length"}


def test_stats_count_what_was_done(load):
    llm, _ = load(max_batch=2, max_batched_tokens=3)
    outputs = llm.generate(["a b c", "d", "e f"], Sampling(max_tokens=4, ignore_eos=True, depth=2))
    stats = llm.stats()
    assert stats["usage"] == {
        "prompt_tokens": 6,
        "output_tokens": 12,
        "decode_tokens": 9,
        "segments_read": 18,
        "segments_executed": 18,
        "segments_prefill": 24,
        "segments_wasted": 0,
    }
    assert stats["finished"] == {"length": 3} and stats["turns"] > 0
    assert (stats["fill"], stats["segments"], stats["pages"], stats["pages_peak"]) == ("last_exited", 4, 60, 3)
    assert stats["kv_bytes"] == llm.engine.slots.pool.data.nbytes
    assert sum(o.usage.segments_prefill for o in outputs) == 24


def test_one_turn_answers_show_in_the_peak_of_pages(load):
    """A request that comes and goes within one step held its page all the same."""
    llm, _ = load("layered", segments=None)
    llm.generate("a", Sampling(max_tokens=1))
    assert llm.stats()["turns"] == 1 and llm.stats()["pages_peak"] == 1


def test_flips_of_the_released_gate_arithmetic_are_counted_over_all_requests(load):
    """Two slots, many tenants; the engine's count is the number of rounds at which the precisions part."""
    llm, _ = load(gate_dtype="bfloat16", max_batch=2, fill="last_exited")
    slots = llm.checkpoint.model.slots()
    slots["model.early_exit_gate.weight"].mul_(0.01)
    slots["model.early_exit_gate.bias"].fill_(-1.0)
    hazard = torch.tensor(-1.0).sigmoid().item()
    cdf = 1 - (1 - hazard) ** 2  # every token's cdf at depth 2 is within 1 % of this
    assert llm.stats().get("gate_flips", 0) == 0
    ask = Sampling(max_tokens=20, ignore_eos=True, exit_threshold=cdf)
    llm.generate(["a", "b", "c", "d", "e"], ask)
    flips = llm.stats()["gate_flips"]
    assert flips > 5
    llm.generate(["a", "b", "c", "d", "e"], ask)
    assert llm.stats()["gate_flips"] == 2 * flips


@pytest.mark.parametrize(
    "options, message",
    [
        ({"signals": "exakt"}, "signals is 'exakt'; allowed: 'sync', 'delayed', 'exact', 'resident'"),
        ({"signals": "exact", "fill": "shared"}, "'exact' does not go with fill 'shared': round k . 1 has overwritten"),
        ({"lateness": 1}, "lateness is 1, but signals 'sync' are never late"),
        ({"signals": "exact", "lateness": 4}, "lateness is 4; allowed: whole turns, 0 .. 3"),
        ({"host_kv_bytes": 1}, "host_kv_bytes is 1; one request of 128 positions may need"),
        ({"heads": "x"}, "there are no exit heads in x"),
        ({"head": "x"}, "did you mean 'heads'"),
        ({"max_batchs": 3}, "did you mean 'max_batch'"),
        ({"kv_pages": 0}, "kv_pages is 0"),
    ],
)
def test_options(load, options, message):
    with pytest.raises(ValueError, match=message):
        load(**options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fill", ["full", "last_exited", "shared"])
def test_narrow_dtypes_run(load, dtype, fill):
    """No equality is claimed for them, only that every part takes them: the answers are whole and their logprobs are
    numbers."""
    llm, _ = load(dtype=dtype, fill=fill, max_batched_tokens=3)
    ask = Sampling(max_tokens=6, exit_threshold=0.5, logprobs="processed", ignore_eos=True)
    outputs = llm.generate(["a b c d", "e"], [ask, replace(ask, temperature=1.0, seed=1, top_p=0.9)])
    for output in outputs:
        assert len(output.token_ids) == 6 and set(output.depths) <= {1, 2, 3, 4}
        assert all(-50 < logprob <= 0 for logprob in output.logprobs)
