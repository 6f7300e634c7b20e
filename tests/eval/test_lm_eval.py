"""The bridge to lm-eval: its three kinds of request under any arm, its command, and tasks with local data."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import lm_eval.tasks
import pytest
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file

from anydepth import LLM, Sampling
from anydepth.eval.arms import Arm
from anydepth.eval.backends.engine import EngineBackend
from anydepth.eval.lm_eval import model as lm_eval_model
from anydepth.eval.lm_eval.command import complete, main
from anydepth.eval.lm_eval.local_tasks import write_local_tasks
from anydepth.eval.lm_eval.model import AnydepthLM, parted, slots
from anydepth.eval.run import run
from anydepth.eval.task import load_task
from anydepth.reference.model import Model as Reference
from anydepth.types import Usage

REGISTERED_AT_LOAD = "anydepth" in model_registry
PROMPT = "Ann has 5 . Bob has 3 more than Ann . How many has Bob ?"
GATE = {"exit_threshold": 0.5, "min_depth": 1}


@pytest.fixture(scope="module")
def lm():
    return AnydepthLM(model="nano", dtype="float64")


@pytest.fixture(scope="module")
def gated():
    return AnydepthLM(model="nano", fill="last_exited", dtype="float64", **GATE)


@pytest.fixture(scope="module")
def questions():
    return load_task("nano").select(limit=12)


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(lm_eval_model.log, "warning", lambda text, *_: lines.append(text))
    utils.warning_once.cache_clear()
    return lines


def asks(kind, *arguments):
    return [Instance(kind, {}, given, 0, metadata=("task", at, 1)) for at, given in enumerate(arguments)]


def answers(lm, *arguments):
    return lm.generate_until(asks("generate_until", *arguments), disable_tqdm=True)


def scores(lm, *arguments):
    return lm.loglikelihood(asks("loglikelihood", *arguments), disable_tqdm=True)


# generate_until


def test_answers_come_in_order_each_under_its_own_settings(gated, questions):
    pairs = [
        ({"until": ["####"], "max_gen_toks": 40}, {"stop": "####", "max_tokens": 40}),
        ({"until": [], "max_gen_toks": 3}, {"max_tokens": 3}),
        ({"until": ".", "max_tokens": 20}, {"stop": ".", "max_tokens": 20}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0, "max_new_tokens": 9}, {"max_tokens": 9}),
        ({"stop": ["has"], "until": ["####", "", None], "num_beams": 1}, {"stop": ["has", "####"], "max_tokens": 128}),
        ({}, {"max_tokens": 128}),
    ]
    prompts = [question.prompt for question in questions]
    got = answers(gated, *((prompt, asked) for prompt, (asked, _) in zip(prompts, pairs, strict=False)))
    for text, prompt, (_, meant) in zip(got, prompts, pairs, strict=False):
        assert text == gated.llm.generate(prompt, Sampling(**meant, **GATE))[0].text
    assert "####" not in got[0] and len(set(got)) == len(got) == len(pairs)


def test_a_task_may_name_depths_where_the_arm_does_not(lm, gated, logged):
    at_two = lm.llm.generate(PROMPT, Sampling(max_tokens=64, depth=2))[0].text
    assert answers(lm, (PROMPT, {"max_gen_toks": 64, "policy": "fixed", "depth": 2})) == [at_two]
    assert gated.sampling({"exit_threshold": 0.9}).exit_threshold == 0.5
    assert logged == ["exit_threshold is 0.5 as model_args say, not 0.9"]


def test_what_is_drawn_depends_on_seed_and_context_not_on_order(lm):
    drawn = {"do_sample": True, "temperature": 50.0, "top_k": -1, "max_gen_toks": 12}
    one, other = (PROMPT, drawn), ("Ann has 2 .", drawn)
    first = answers(lm, one, one, other)
    assert first[0] != first[1] and answers(lm, other, one, one) == [first[2], *first[:2]]
    assert answers(AnydepthLM(model="nano", seed=3), one) != [first[0]]
    assert answers(lm, (PROMPT, drawn | {"seed": 3})) == answers(AnydepthLM(model="nano", seed=3), one)


def test_an_until_that_is_a_special_token_stops_by_its_id(lm):
    sampling = lm.sampling({"until": ["<eos>", "Q:", "Ann"]})
    assert sampling.stop_token_ids == (lm.eot_token_id,) and sampling.stop == ("<eos>", "Q:", "Ann")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1.0}, "unknown setting 'temprature'; did you mean 'temperature'"),
        ({"num_beams": 4}, "num_beams is 4; allowed: 1"),
        ({"n": 2}, "n is 2; allowed: 1"),
        ({"max_length": 40}, "unknown setting 'max_length'"),
        ({"do_sample": True, "temperature": 1.0, "top_p": 0}, "gen_kwargs .*top_p is 0"),
        ({"max_gen_toks": 256}, "256 tokens, and the model's length is 256: no room .* max_gen_toks"),
        ({"depth": 7}, "depth is 7"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_before_work(lm, given, message):
    turns = lm.llm.stats()["turns"]
    with pytest.raises(ValueError, match=message):
        answers(lm, (PROMPT, {}), (PROMPT, given))
    assert lm.llm.stats()["turns"] == turns and lm.engine.idle


def test_a_long_context_loses_its_left_and_an_empty_one_is_the_prefix_token(lm, logged):
    long = " ".join([PROMPT] * 20)
    ids = lm.tok_encode(long)[-(256 - 100) :]
    meant = Sampling(max_tokens=100)
    expected = [lm.llm.generate(given, meant)[0].text for given in (ids, [lm.eot_token_id])]
    assert answers(lm, (long, {"max_gen_toks": 100}), ("", {"max_gen_toks": 100})) == expected
    assert logged == ["1 of 2 contexts are too long for 256 positions: cut at the left"]
    short = AnydepthLM(model="nano", max_length=20)
    assert short.max_gen_toks == 10
    assert answers(short, (long, {})) == [lm.llm.generate(ids[-10:], Sampling(max_tokens=10))[0].text]


def test_an_interrupted_call_leaves_the_engine_empty(lm, monkeypatch):
    step = lm.engine.step
    calls = iter([step] * 5)
    monkeypatch.setattr(lm.engine, "step", lambda: next(calls, interrupt)())
    with pytest.raises(KeyboardInterrupt):
        answers(lm, (PROMPT, {}), ("Ann", {}))
    monkeypatch.undo()
    lm.engine.step()
    assert lm.engine.idle and lm.engine.pages.in_use == 0


def interrupt():
    raise KeyboardInterrupt


# Log-likelihood


def test_scores_are_those_of_the_engine_under_the_arm(gated, questions):
    pairs = [(q.prompt, f" {name} has {n} .") for q in questions[:4] for name in ("Ann", "Bob") for n in (3, 8)]
    meant = gated.llm.score(*map(list, zip(*pairs, strict=True)), Sampling(**GATE))
    got = scores(gated, *pairs)
    assert [score for score, _ in got] == pytest.approx([math.fsum(score.logprobs) for score in meant], abs=1e-9)
    assert [greedy for _, greedy in got] == [score.greedy for score in meant]
    assert {depth for score in meant for depth in score.depths} > {1}
    answer = gated.llm.generate(PROMPT, Sampling(max_tokens=4, first_token="policy", **GATE))[0].text
    assert [greedy for _, greedy in scores(gated, (PROMPT, " " + answer), (PROMPT, " Bob Bob"))] == [True, False]


@pytest.mark.parametrize(("signals", "lateness"), [("exact", 1), ("resident", 2), ("delayed", 3)])
def test_late_signals_answer_and_score_as_their_synchronous_form(gated, questions, signals, lateness):
    late = AnydepthLM(
        model="nano", fill="last_exited", dtype="float64", signals=signals, lateness=lateness, batch_size=3, **GATE
    )
    base = (
        gated
        if signals != "delayed"
        else AnydepthLM(model="nano", fill="last_exited", dtype="float64", signals="delayed", lateness=0, **GATE)
    )
    pairs = [(q.prompt, f" {name} has {n} .") for q in questions[:4] for name in ("Ann", "Bob") for n in (3, 8)]
    before, spent = base._spent.get("loglikelihood"), "loglikelihood"
    before = before.usage if before else Usage()
    assert scores(late, *pairs) == [pytest.approx(pair, abs=1e-9) for pair in scores(base, *pairs)]
    assert late._spent[spent].usage.segments_read == base._spent[spent].usage.segments_read - before.segments_read
    assert late._spent[spent].usage.segments_read > 0
    asked = [(q.prompt, {"max_gen_toks": 8}) for q in questions[:4]]
    assert answers(late, *asked) == answers(base, *asked)


def test_under_never_a_score_is_that_of_one_dense_pass(lm):
    folder = lm.llm.checkpoint.path
    config = json.loads((folder / "config.json").read_text())
    reference = Reference(config, {name: w.double() for name, w in load_file(folder / "model.safetensors").items()})
    continuation = " Bob has 8 . #### 8"
    ids, start = lm.tok_encode(PROMPT + continuation), len(lm.tok_encode(PROMPT))
    logprobs = reference.truncated_logits(ids, 4).log_softmax(-1)
    one_pass = sum(logprobs[at - 1, ids[at]].item() for at in range(start, len(ids)))
    assert scores(lm, (PROMPT, continuation))[0][0] == pytest.approx(one_pass, abs=1e-9)


def test_contexts_follow_lm_evals_rules(lm, logged):
    def meant(context, continuation):
        return math.fsum(lm.llm.score([context], [continuation])[0].logprobs)

    ids, eos, long = lm.tok_encode, lm.eot_token_id, " ".join([PROMPT] * 20)
    got = scores(lm, (PROMPT + "  ", "Bob"), ("", "Ann has"), ("  ", "Ann has"), (long, " Bob has"), ("", "<eos> Ann"))
    cut = ids(long)[-(256 + 1 - 2) :]
    pairs = [(ids(PROMPT), ids("Bob")), ([eos], ids("Ann has")), ([eos], ids("Ann has")), (cut, ids("Bob has"))]
    expected = [meant(*pair) for pair in [*pairs, ([eos], ids("Ann"))]]
    assert [score for score, _ in got] == pytest.approx(expected, abs=1e-9)
    assert logged == ["1 of 5 contexts are too long for 256 positions: cut at the left"]
    with pytest.raises(ValueError, match=r"a continuation has 0 tokens; allowed: 1 \.\. 256"):
        scores(lm, (PROMPT, "Bob"), (PROMPT, ""))


def test_choices_of_one_question_prefill_it_once_and_one_context_still_fills_the_batch(lm):
    alone, lm = lm, AnydepthLM(model="nano", dtype="float64", batch_size=2)
    choices = [(f"{PROMPT} {n}", f" Ann has {m} .") for n in (1, 2) for m in range(4)]
    meant = [scores(alone, choice)[0][0] for choice in choices]
    assert [score for score, _ in scores(lm, *choices)] == pytest.approx(meant, abs=1e-9) and len(set(meant)) == 8
    prompt = len(lm.tok_encode(choices[0][0]))
    # Both contexts begin alike, up to the token that is a decode row.
    assert lm.llm.stats()["usage"]["segments_prefill"] == 4 * (prompt - 1)
    turns = lm.llm.stats()["turns"]
    lm.loglikelihood_rolling(asks("loglikelihood_rolling", ("Ann has 5 .",), ("Bob has 3 .",)), disable_tqdm=True)
    assert lm.llm.stats()["turns"] - turns <= 4 * 4  # side by side: 4 tokens through 4 segments


def test_rolling_scores_every_token_once_with_as_much_context_as_fits():
    lm = AnydepthLM(model="nano", max_length=8, dtype="float64", **GATE)
    ids, eos = lm.tok_encode(PROMPT), lm.eot_token_id
    assert len(ids) == 16
    windows = [([eos], ids[:8]), (ids[7:8], ids[8:16])]
    more = lm.tok_encode("Ann has 5 . Ann has 5 . Ann has")
    windows += [([eos], more[:8]), (more[1:8], more[8:])]  # 7 + 2 tokens: 8 positions and the last prediction
    each = [math.fsum(s.logprobs) for s in lm.llm.score(*map(list, zip(*windows, strict=True)), Sampling(**GATE))]
    got = lm.loglikelihood_rolling(
        asks("loglikelihood_rolling", (PROMPT,), ("",), ("Ann has 5 . Ann has 5 . Ann has",)), disable_tqdm=True
    )
    assert got == pytest.approx([each[0] + each[1], 0.0, each[2] + each[3]], abs=1e-9)


def test_a_bos_stands_once_before_contexts_and_is_never_scored(lm, monkeypatch):
    ids, bos = lm.tok_encode("Ann has 5 ."), lm.tokenizer.id_of("Bob")
    monkeypatch.setattr(lm.tokenizer, "add_bos", True)
    monkeypatch.setattr(lm.tokenizer, "bos_id", bos)
    (whole,) = lm.loglikelihood_rolling(asks("loglikelihood_rolling", ("Ann has 5 .",)), disable_tqdm=True)
    pairs = [([bos], ids), ([bos, *ids[:2]], ids[2:]), ([bos, *ids[:2]], ids[2:]), ([bos], ids)]
    meant = [math.fsum(score.logprobs) for score in lm.llm.score(*map(list, zip(*pairs, strict=True)))]
    got = scores(lm, ("Ann has", " 5 ."), ("Bob Ann has", " 5 ."), ("", "Ann has 5 ."))
    assert [whole, *(score for score, _ in got)] == pytest.approx(meant, abs=1e-9)
    (text,) = answers(lm, ("Ann has", {"max_gen_toks": 5}))
    assert text == lm.llm.generate([bos, *ids[:2]], Sampling(max_tokens=5))[0].text


# What a run leaves behind


def test_results_say_settings_and_depths(lm, gated):
    requests = asks("generate_until", *[(PROMPT, {"max_gen_toks": 30})] * 2)
    for model, policy in ((lm, "never"), (gated, "gate_cdf")):
        model._spent.clear()
        model.generate_until([requests[0], *requests], disable_tqdm=True)
        info = model.get_model_info()
        assert info["anydepth"]["settings"]["policy"] == policy and json.dumps(info)
    full, early = (model.get_model_info()["anydepth"]["depths"]["generate_until"] for model in (lm, gated))
    tokens = len(lm.llm.generate(PROMPT, Sampling(max_tokens=30))[0].token_ids) - 1
    assert full == {
        "questions": 2,
        "requests": 3,
        "decode_tokens": 3 * tokens,
        "mean_depth": 4.0,
        "segments_read_per_question": 3 * tokens * 4 / 2,
        "segments_executed_per_question": 3 * tokens * 4 / 2,
    }
    assert early["mean_depth"] < 4 and early["segments_read_per_question"] < full["segments_read_per_question"]
    assert gated.get_model_info()["model_sha"] == gated.llm.checkpoint.model_hash


def test_every_result_is_handed_to_lm_evals_cache(lm):
    kept = []
    lm.set_cache_hook(SimpleNamespace(add_partial=lambda *given: kept.append(given)))
    generate = (PROMPT, {"max_gen_toks": 2})
    expected = [
        ("generate_until", generate, answers(lm, generate)[0]),
        ("loglikelihood", ("Ann", " has"), scores(lm, ("Ann", " has"))[0]),
    ]
    rolling = lm.loglikelihood_rolling(asks("loglikelihood_rolling", ("Ann has",)), disable_tqdm=True)
    assert kept == [*expected, ("loglikelihood_rolling", ("Ann has",), rolling[0])]


def test_a_chat_is_written_by_the_template_and_a_begun_answer_stays_open(lm, monkeypatch):
    chat = [{"role": "user", "content": "Who ?"}, {"role": "assistant", "content": " Ann has "}]
    with pytest.raises(ValueError, match="no chat template"):
        lm.apply_chat_template(chat)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    monkeypatch.setattr(
        lm.tokenizer, "chat_template", template + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert lm.apply_chat_template(chat[:1]) == "<user>Who ?<end><assistant>"
    assert lm.apply_chat_template(chat, add_generation_prompt=False) == "<user>Who ?<end><assistant> Ann has "
    assert lm.chat_template(True) == lm.tokenizer.chat_template and lm.tokenizer_name.startswith("nano-")
    monkeypatch.setattr(lm.tokenizer, "chat_template", template.replace("m.content", "m.content | trim"))
    assert lm.apply_chat_template(chat, add_generation_prompt=False) == "<user>Who ?<end><assistant>Ann has"


# model_args


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exit_treshold": 0.5}, "unknown setting 'exit_treshold'; did you mean 'exit_threshold'"),
        ({"kv_page": 3}, "did you mean 'kv_pages'"),
        ({"pretrained": "x"}, "named by model=, not pretrained=; give model=x"),
        ({"model": None}, "model"),
        ({"n": 2}, "n is 2"),
        ({"policy": "never", "exit_policy": "never"}, "the same"),
        ({"depth": 9}, "depth is 9; this model has 4 segments"),
        ({"exit_threshold": 2}, "exit_threshold is 2"),
        ({"fill": "none"}, "none"),
        ({"batch_size": "many"}, "batch_size is 'many'"),
        ({"batch_size": 0}, "max_batch is 0"),
        ({"batch_size": 4, "max_batch": 8}, "max_batch is 8 and batch_size 4"),
        ({"max_length": 257}, r"max_length is 257; allowed: 2 \.\. 256"),
        ({"max_length": "long"}, "max_length is 'long'"),
    ],
)
def test_wrong_model_args_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        AnydepthLM(**{name: value for name, value in ({"model": "nano"} | given).items() if value is not None})


def test_every_option_is_taken_as_lm_eval_writes_it():
    text = "model=nano,policy=gate_cdf,exit_threshold=0.5,max_depth=3,fill=full,dtype=float64,device=cpu,tokenizer=None"
    text += ",max_batch=4"
    lm = AnydepthLM.create_from_arg_string(text, {"batch_size": "auto", "device": "auto", "max_batch_size": None})
    settings = lm.get_model_info()["anydepth"]["settings"]
    assert {"policy": "gate_cdf", "exit_threshold": 0.5, "max_depth": 3, "min_depth": 1}.items() <= settings.items()
    assert {"fill": "full", "dtype": "float64", "device": "cpu"}.items() <= settings.items()
    assert len(lm.engine.slots) == 4
    trace = AnydepthLM.create_from_arg_obj({"model": "nano", "trace": [4, 1, 2], "max_tokens": 3})
    answers(trace, (PROMPT, {}))
    assert trace.get_model_info()["anydepth"]["depths"]["generate_until"]["segments_read_per_question"] == 3
    with pytest.raises(ValueError, match="device is 'cpu' in model_args and 'cuda:0' beside them"):
        AnydepthLM.create_from_arg_obj({"model": "nano", "device": "cpu"}, {"device": "cuda:0"})


def test_names_that_look_like_numbers_stay_names():
    assert parted({"model": 7, "revision": 1234, "policy": "never"}) == (
        {"model": "7", "revision": "1234"},
        {"exit_policy": "never"},
    )


def test_a_batch_size_is_a_number_of_slots():
    assert slots(None, None, None) == slots("auto:4", None, 8) == {}
    assert slots("8", None, 8) == slots(8, 99, None) == slots("auto", 8, None) == {"max_batch": 8}


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    spec = importlib.util.spec_from_file_location("again", lm_eval_model.__file__)
    with pytest.raises(ValueError, match=r"pip install 'anydepth\[eval\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# The command


def test_the_command_runs_tasks_offline_on_local_data(tmp_path, questions, monkeypatch):
    """gsm8k_cot as lm-eval has it, and nano's questions as a task of one's own, equal to our own evaluation of them."""
    assert not REGISTERED_AT_LOAD
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few_tasks)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    rows = [{"question": f"Ann has {n} .", "answer": f"So\n#### {n}"} for n in range(5)]
    write_rows(tmp_path / "gsm8k.jsonl", rows)
    write_rows(tmp_path / "questions.jsonl", [{"prompt": q.prompt, "gold": q.gold} for q in questions])
    task = {
        "task": "nano_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}, "cache_dir": str(tmp_path / "c")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{gold}}",
        "generation_kwargs": {"until": [], "max_gen_toks": 64},
        "filter_list": [{"name": "final", "filter": [{"function": "regex", "regex_pattern": "#### (.*?)\\s*$"}]}],
        "metric_list": [{"metric": "exact_match"}],
    }
    task["filter_list"][0]["filter"].append({"function": "take_first"})
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "nano.yaml").write_text(json.dumps(task))
    main(
        [
            *("run", "--tasks", "gsm8k_cot,nano_questions", "--local-data", f"gsm8k_cot={tmp_path / 'gsm8k.jsonl'}"),
            *("--model_args", "model=nano,fill=last_exited,exit_threshold=0.5", "min_depth=1,dtype=float64"),
            *("--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"), "--log_samples"),
            *("--samples", json.dumps({"gsm8k_cot": [0, 1, 3], "nano_questions": list(range(len(questions)))})),
        ]
    )
    (results,) = (json.loads(path.read_text()) for path in (tmp_path / "out").rglob("results_*.json"))
    config = results["config"]
    assert config["model"] == "anydepth" and config["batch_size"] == "auto"
    assert config["anydepth"]["settings"]["exit_threshold"] == 0.5 and config["anydepth"]["settings"]["seed"] == 1234
    assert config["anydepth"]["depths"]["generate_until"]["questions"] == 3 + len(questions)
    assert 1 <= config["anydepth"]["depths"]["generate_until"]["mean_depth"] < 4
    gsm8k = sorted(logged_samples(tmp_path, "gsm8k_cot"), key=lambda sample: sample["doc_id"])
    assert [s["doc"]["question"] for s in gsm8k if s["filter"] == "strict-match"] == [
        rows[n]["question"] for n in (0, 1, 3)
    ]
    assert gsm8k[0]["arguments"]["gen_args_0"]["arg_0"].count("Q: ") == 9 and gsm8k[0]["target"] == "0"

    backend = EngineBackend(LLM("nano", fill="last_exited", dtype="float64"))
    arm = Arm.parse({"name": "own", **GATE})
    own = run(arm, task=load_task("nano"), backend=backend, out=tmp_path / "own", questions=questions)
    accuracy = results["results"]["nano_questions"]["exact_match,final"]
    assert accuracy == own.aggregates["accuracy"] and 0 < accuracy < 1
    texts = {sample["id"]: sample["text"] for sample in own.samples}
    lm_evals = {sample["doc"]["prompt"]: sample["resps"][0][0] for sample in logged_samples(tmp_path, "nano_questions")}
    assert lm_evals == {question.prompt: texts[question.id] for question in questions}


def few_tasks(include_path, metadata=None):
    """lm-eval's index of its gsm8k folder: that of all takes seconds."""
    gsm8k = Path(lm_eval.tasks.__file__).parent / "gsm8k"
    return TaskManager(include_defaults=False, include_path=[gsm8k, *include_path], metadata=metadata)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def logged_samples(folder, task):
    (path,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_help_is_lm_evals_own_after_ours(capsys):
    before = list(sys.argv)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and sys.argv == before
    assert "--local-data TASK[:SPLIT]=FILE" in out and "--num_fewshot" in out
    main([])
    assert "lm-eval ls tasks" in capsys.readouterr().out
    with pytest.raises(ValueError, match="belongs to lm-eval's run"):
        main(["ls", "tasks", "--local-data", "a=b"])


@pytest.mark.parametrize(
    ("given", "config", "expected"),
    [
        ({}, None, ("anydepth", "auto", "auto")),
        ({"batch_size": "8", "device": "cuda:0"}, None, ("anydepth", "8", "cuda:0")),
        ({}, {"model": "anydepth", "batch_size": 4}, ("anydepth", 4, "auto")),
        ({"model": "hf"}, {"model": "anydepth"}, ("hf", None, None)),
        ({}, {"model": "hf"}, ("hf", None, None)),
    ],
)
def test_only_what_was_not_given_is_filled_in(tmp_path, given, config, expected):
    arguments = argparse.Namespace(config=None, model=None, device=None, include_path=None)
    if config is not None:
        arguments.config = str(tmp_path / "config.yaml")
        (tmp_path / "config.yaml").write_text(json.dumps(config))
    vars(arguments).update(given)
    complete(arguments, [], tmp_path)
    assert (arguments.model, getattr(arguments, "batch_size", None), arguments.device) == expected


def test_arms_do_not_share_lm_evals_cache_of_answers(tmp_path):
    def cache(**given):
        arguments = argparse.Namespace(config=None, use_cache="kept/answers", **given)
        complete(arguments, [], tmp_path)
        return arguments.use_cache

    one = cache(model_args={"model": "nano", "exit_threshold": 0.5})
    assert one.startswith("kept/answers_") and one == cache(model_args={"exit_threshold": 0.5, "model": "nano"})
    assert len({one, cache(model_args={"model": "nano"}), cache(model_args={"model": "nano"}, seed=[1])}) == 3
    assert cache(model="hf") == "kept/answers"


# Local data


@pytest.fixture
def index(monkeypatch):
    """lm-eval's index of tasks, which takes seconds to build, with a few of its kinds of entry."""
    shots = {"test_split": "test", "fewshot_config": {"samples": []}}
    configs = {
        "cot": {"task": "cot", "training_split": "train", **shots},
        "shots": {"task": "shots", "training_split": "train", "validation_split": "valid", "test_split": "test"},
        "valid": {"task": "valid", "validation_split": "valid"},
        "all": {"group": "all", "task": ["cot"]},
        "tag": None,
    }
    entries = {name: SimpleNamespace(cfg=cfg, yaml_path=f"/tasks/{name}.yaml") for name, cfg in configs.items()}
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path: SimpleNamespace(task_index=entries))


@pytest.mark.parametrize(
    ("given", "files"),
    [
        (["cot=rows.jsonl"], {"test": "rows.jsonl"}),
        (["valid=rows.jsonl"], {"valid": "rows.jsonl"}),
        (["shots:train=more.json", "shots=rows.jsonl"], {"train": "more.json", "test": "rows.jsonl"}),
    ],
)
def test_a_local_file_stands_for_the_split_that_the_task_evaluates(index, tmp_path, monkeypatch, given, files):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "more.json"):
        (tmp_path / name).touch()
    (tmp_path / "out").mkdir()
    write_local_tasks(given, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "0.yaml").read_text())
    task = given[0].partition("=")[0].partition(":")[0]
    assert written["include"] == f"/tasks/{task}.yaml" and written["dataset_path"] == "json"
    assert written["tag"] is None, "a tag in it would replace lm-eval's own"
    assert written["dataset_kwargs"]["data_files"] == {split: str(tmp_path / file) for split, file in files.items()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["cot"], "allowed: TASK=FILE or TASK:SPLIT=FILE"),
        (["cot=none.jsonl"], r"there is no \.jsonl or \.json file .*none\.jsonl"),
        (["cot=rows.txt"], r"there is no \.jsonl or \.json file .*rows\.txt"),
        (["cott=rows.jsonl"], "unknown lm-eval task 'cott'; did you mean 'cot'"),
        (["all=rows.jsonl"], "all is no single task"),
        (["tag=rows.jsonl"], "tag is no single task"),
        (["cot:trian=rows.jsonl"], "unknown split of cot 'trian'"),
        (["shots=rows.jsonl"], "shots also reads its split 'train' for examples; give --local-data shots:train=FILE"),
        (["shots:train=rows.jsonl"], "shots also reads its split 'test'; give"),
        (["cot=rows.jsonl", "cot=rows.jsonl"], "a second time"),
        (["cot=rows.jsonl", "cot:test=rows.jsonl"], "a second time"),
    ],
)
def test_local_data_that_cannot_serve_is_refused(index, tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "rows.txt"):
        (tmp_path / name).touch()
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=message):
        write_local_tasks(given, tmp_path / "out")
