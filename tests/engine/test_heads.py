"""Exit heads, probes and profiles in the engine, against dense states of the reference."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anydepth import LLM
from anydepth.engine.engine import Engine
from anydepth.models.heads import KINDS, ExitHeads, Head, Probe, load_heads
from anydepth.models.heads_about import ABOUT, FILE, read_about
from anydepth.profile import Exit, Profile
from anydepth.record import files_hash
from anydepth.types import Sampling
from tests.helpers import Watch, drain, poison, twins
from tests.random_nano import write_random_nano

EXITS, SIZES = (1, 2, 4), {"hidden_size": 32, "vocab_size": 61}


def random_heads(kind: str, seed: int = 0, *, exits: tuple[int, ...] = EXITS[:-1]) -> ExitHeads:
    """As they are read from a folder, but for shortlists, which `folded` makes ready."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64) * scale

    def head() -> Head:
        tensors = {"norm": 1 + normal(32, scale=0.1)}
        if kind != "norm":
            tensors |= {"a": normal(32, 4, scale=0.3), "b": normal(4, 32, scale=0.5)}
        if kind == "shortlist":
            tensors |= {"ids": torch.randperm(61, generator=draw)[:20], "other": normal(32, scale=0.3)}
        return Head(kind, tensors)

    probes = {layer: Probe(normal(32, scale=0.3), normal(1, scale=0.1)) for layer in exits}
    return ExitHeads(model_hash="m", heads={layer: head() for layer in exits}, probes=probes, about={})


def single_precision(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() else x


def with_heads(kind: str, seed: int = 3) -> tuple[Any, Any, ExitHeads]:
    model, reference = twins("layered", seed=seed, segments=EXITS)
    heads = random_heads(kind)
    model.attach(replace(heads, heads={layer: head.folded(model.head) for layer, head in heads.heads.items()}))
    return model, reference, heads


def dense_logits(reference: Any, heads: ExitHeads, depth: int, h: torch.Tensor) -> torch.Tensor:
    """From the definitions: RMSNorm by hand, then what the kind says of it."""
    layer = EXITS[depth - 1]
    if layer not in heads.heads:
        return reference.readout(h)
    head = heads.heads[layer]
    x = corrected(reference, head, h)
    logits = reference.weights["lm_head.weight"] @ x
    if head.kind != "shortlist":
        return logits
    full = torch.full((61,), -torch.inf, dtype=h.dtype)
    full[head.tensors["ids"]] = logits[head.tensors["ids"]]
    return full


def corrected(reference: Any, head: Head, h: torch.Tensor) -> torch.Tensor:
    x = h / (h.pow(2).mean() + reference.config["rms_norm_eps"]).sqrt() * head.tensors["norm"]
    return x if head.kind == "norm" else x + x @ head.tensors["a"] @ head.tensors["b"]


def declines(reference: Any, heads: ExitHeads, depth: int, h: torch.Tensor) -> bool:
    head = heads.heads.get(EXITS[depth - 1])
    if head is None or head.kind != "shortlist":
        return False
    listed = dense_logits(reference, heads, depth, h)[head.tensors["ids"]]
    return bool(corrected(reference, head, h) @ head.tensors["other"] > listed.max())


def wanted_depth(policy: str, profile: Profile, reference: Any, heads: ExitHeads, states: list[torch.Tensor]) -> int:
    for depth, layer in enumerate(EXITS[:-1], start=1):
        h, exit = states[depth - 1][-1], next(e for e in profile.exits if e.layer == layer)
        if declines(reference, heads, depth, h):
            continue
        if policy == "probe":
            logit = h @ heads.probes[layer].weight + heads.probes[layer].bias[0]
            if float(logit.sigmoid()) >= exit.probe:
                return depth
            continue
        logits = dense_logits(reference, heads, depth, h)
        first, second = logits.topk(2).values.tolist()
        chances = (logits / profile.gate_temperature).softmax(-1)
        entropy = -sum(p * float(torch.tensor(p).log()) for p in chances.tolist() if p > 0)
        if first >= exit.logit and first - second >= exit.margin and entropy <= exit.entropy:
            return depth
    return len(EXITS)


PROFILE = Profile(
    name="p",
    gate_temperature=1.5,
    exits=(
        Exit(layer=1, logit=1.0, margin=0.3, entropy=3.5, probe=0.6),
        Exit(layer=2, logit=0.5, margin=0.2, entropy=3.8, probe=0.5),
    ),
)


@pytest.mark.parametrize("signals", ["sync", "exact"])
@pytest.mark.parametrize("policy", ["confidence", "probe"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_leave_where_the_dense_states_say(kind, policy, signals):
    """Under `full`, so that the dense pass over prompt and outputs has the states; greedy tokens are the heads'."""
    model, reference, heads = with_heads(kind)
    engine = poison(Engine(model, fill="full", page_size=4, max_batch=3, profiles=[PROFILE], signals=signals))
    ask = Sampling(max_tokens=10, exit_policy=policy, profile="p")
    prompts = [Random(n).choices(range(61), k=3 + 4 * n) for n in range(3)]
    requests = [engine.prepare(prompt, ask) for prompt in prompts]
    outputs, depths = drain(engine, requests), set()
    for request in requests:
        output = outputs[request.id]
        for n in range(1, len(output.token_ids)):
            states, _ = reference.dense([*output.prompt_ids, *output.token_ids[:n]])
            depth = wanted_depth(policy, PROFILE, reference, heads, states)
            logits = dense_logits(reference, heads, depth, states[depth - 1][-1])
            assert (output.depths[n], output.token_ids[n]) == (depth, int(logits.argmax()))
            depths.add(depth)
    assert len(depths) > 1, "this model says nothing about the policy"


@pytest.mark.parametrize("fill", ["project", "deferred", "full"])
def test_a_batch_of_mixed_exits_is_each_alone(fill):
    model, _, _ = with_heads("low_rank")
    asks = [
        Sampling(max_tokens=9, exit_policy="confidence"),
        Sampling(max_tokens=9, exit_policy="probe"),
        Sampling(max_tokens=9, depth=1),
        Sampling(max_tokens=9),
    ]
    prompts = [Random(n).choices(range(61), k=4 + n) for n in range(4)]

    def answers(several: bool) -> list[Any]:
        found = []
        for group in [range(4)] if several else [[n] for n in range(4)]:
            engine = Engine(model, fill=fill, profiles=[PROFILE], page_size=4)
            requests = [engine.prepare(prompts[n], asks[n], id=str(n)) for n in group]
            outputs = drain(engine, requests)
            found += [(outputs[str(n)].token_ids, outputs[str(n)].depths) for n in group]
        return found

    assert answers(several=True) == answers(several=False)


@pytest.mark.parametrize("fill", ["full", "project", "deferred"])
@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forced_readout_is_the_truncated_model_with_its_head(kind, fill):
    """At every depth; at the last one, as under `never`, it is the model without heads."""
    model, reference, heads = with_heads(kind)
    ids = [(7 * n * n + 3 * n) % 61 for n in range(65)]
    for ask in (Sampling(depth=1), Sampling(depth=2), Sampling(depth=3), Sampling(exit_policy="never")):
        engine = poison(Engine(model, fill=fill, page_size=4))
        watch = Watch(engine)
        drain(engine, [engine.prepare(ids[:1], ask, forced=[ids[1:]], id="a")])
        depth, h = ask.depth or len(EXITS), reference.embed(ids[:-1])
        for k in range(1, depth + 1):
            h, _ = reference.segment(k, h)
        for position in (0, 5, 63):
            wanted = dense_logits(reference, heads, depth, h[position])
            torch.testing.assert_close(watch.of("a")[position], wanted, rtol=1e-9, atol=1e-9)


def test_deferred_reads_as_full_does():
    model, _, _ = with_heads("low_rank")
    ask = Sampling(max_tokens=12, exit_policy="confidence")
    outputs = []
    for fill in ("full", "deferred"):
        engine = Engine(model, fill=fill, profiles=[PROFILE])
        outputs.append(next(iter(drain(engine, [engine.prepare([5, 9, 13], ask)]).values())))
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[0].depths == outputs[1].depths
    assert outputs[1].usage.segments_executed <= outputs[0].usage.segments_executed


def test_an_idle_test_is_told_from_one_that_decides():
    """With T = 2 and an entropy limit near ln V the entropy test keeps nobody."""
    model, _, _ = with_heads("norm")
    idle = Profile(
        name="idle",
        gate_temperature=2.0,
        exits=tuple(Exit(layer=layer, logit=0.0, margin=1.0, entropy=4.2) for layer in EXITS[:-1]),
    )
    engine = Engine(model, fill="project", profiles=[idle])
    drain(engine, [engine.prepare([n, 7, 9], Sampling(max_tokens=10, exit_policy="confidence")) for n in range(4)])
    stats = engine.stats()
    assert stats["stayed"] > 0 and stats["stayed_by_margin"] > 0 and stats["stayed_by_entropy"] == 0


@pytest.mark.parametrize("signals", ["sync", "exact"])
def test_a_token_that_has_left_is_tallied_no_more(signals):
    """Under `full` it is asked on to R, and counts as under `deferred`."""
    stats = []
    for fill in ("full", "deferred"):
        model, _, _ = with_heads("shortlist")
        engine = Engine(model, fill=fill, signals=signals, profiles=[PROFILE])
        ask = Sampling(max_tokens=12, exit_policy="confidence", temperature=1.0, ignore_eos=True)
        outputs = drain(engine, [engine.prepare([n, 7, 9], ask, seed=n) for n in range(6)])
        stats.append({name: count for name, count in engine.stats().items() if name.startswith("stayed")})
    assert {1, 2} <= {depth for output in outputs.values() for depth in output.depths}
    assert stats[0] == stats[1] and stats[0]["stayed"] > 0


@pytest.mark.parametrize("signals", ["sync", "exact"])
def test_what_a_request_tallied_is_told_apart_wherever_it_ran(signals):
    """With few pages, so that requests are preempted and change slots, each tallies what it does alone."""

    def tallied(numbers, **options):
        model, _, _ = with_heads("low_rank")
        engine = Engine(model, fill="deferred", signals=signals, profiles=[PROFILE], page_size=4, **options)
        engine.tallied = {}
        asks = [Sampling(max_tokens=6 + n, exit_policy="confidence", ignore_eos=True) for n in numbers]
        requests = [engine.prepare([n, 7, 9], ask, id=str(n)) for n, ask in zip(numbers, asks, strict=True)]
        drain(engine, requests)
        stats, total = engine.stats(), {name: sum(t[name] for t in engine.tallied.values()) for name in NAMES}
        assert total == {name: stats[name] for name in NAMES}
        return engine.tallied, stats["preempted"]

    NAMES = ("stayed", "stayed_by_logit", "stayed_by_margin", "stayed_by_entropy")
    together, preempted = tallied(range(6), max_batch=3, kv_pages=8)
    alone = {id: t for n in range(6) for id, t in tallied([n])[0].items()}
    assert together == alone and preempted > 0 and len({t["stayed"] for t in alone.values()}) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_heads_come_back_from_their_folder(kind, tmp_path):
    model, _, heads = with_heads(kind)
    heads.save(tmp_path)
    options = {"shape": model.shape, "unembedding_dV": model.head, "dtype": torch.float64}
    read = load_heads(tmp_path, model_hash="m", **options)
    assert read.exits == heads.exits and read.hash is not None
    for layer in heads.exits:
        before, after = heads.heads[layer].folded(model.head), read.heads[layer]
        assert before.kind == after.kind and before.tensors.keys() == after.tensors.keys()
        assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
        assert torch.equal(heads.probes[layer].weight, read.probes[layer].weight)
        assert torch.equal(heads.probes[layer].bias, read.probes[layer].bias)
    with pytest.raises(ValueError, match="heads belong to one backbone"):
        load_heads(tmp_path, model_hash="another", **options)
    (tmp_path / "heads.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="is not the file that heads"):
        load_heads(tmp_path, model_hash="m", **options)
    with pytest.raises(ValueError, match="there are no exit heads"):
        load_heads(tmp_path / "nowhere", model_hash="m", **options)


@pytest.mark.parametrize(
    "key, value",
    [
        ("exits", None),
        ("exits", {}),
        ("exits", [1, 2]),
        ("exits", {"one": "norm"}),
        ("exits", {"1": ["norm"]}),
        ("model_hash", None),
        ("model_hash", 5),
        ("sha256", None),
    ],
)
def test_a_malformed_description_of_heads_names_file_and_key(key, value, tmp_path):
    folder = write_random_nano(tmp_path / "model", kind="layered")
    random_heads("norm").save(tmp_path)
    about = {name: given for name, given in read_about(tmp_path).items() if name != key}
    (tmp_path / ABOUT).write_text(json.dumps(about if value is None else about | {key: value}))
    with pytest.raises(ValueError, match=rf"heads\.json: {key} is {re.escape(repr(value))}; allowed: "):
        LLM(folder, heads=tmp_path)


def test_heads_of_a_deeper_model_are_refused_as_another_models(tmp_path):
    folder = write_random_nano(tmp_path / "model", kind="layered")
    random_heads("norm", exits=(1, 25)).save(tmp_path / "heads")
    with pytest.raises(ValueError, match=r"made for the backbone m, this one is .* train some for this one"):
        LLM(folder, heads=tmp_path / "heads")
    random_heads("norm").save(tmp_path / "heads")
    with pytest.raises(ValueError, match=r"segments=\[1, 99\]: exit layers must rise"):
        LLM(folder, heads=tmp_path / "heads", segments=[1, 99])


BROKEN = [
    (
        {"exit.1.probe.weight": torch.full((32,), torch.nan)},
        {},
        "the probe after layer 1 has numbers that are not finite",
    ),
    ({"exit.1.probe.bias": None}, {}, "the probe after layer 1 lacks its bias"),
    ({}, {"3": None}, "the exit after layer 3 has neither a head nor a probe"),
]


@pytest.mark.parametrize("tensors, exits, message", BROKEN)
def test_probes_that_are_not_whole_are_refused(tensors, exits, message, tmp_path):
    model, _, heads = with_heads("norm")
    heads.save(tmp_path)
    changed = {name: t for name, t in (load_file(tmp_path / FILE) | tensors).items() if t is not None}
    save_file(changed, tmp_path / FILE)
    about = read_about(tmp_path)
    about = {**about, "exits": about["exits"] | exits, "sha256": files_hash([tmp_path / FILE])}
    (tmp_path / ABOUT).write_text(json.dumps(about))
    with pytest.raises(ValueError, match=message):
        load_heads(tmp_path, model_hash="m", shape=model.shape, unembedding_dV=model.head, dtype=torch.float64)


def test_numbers_that_a_dtype_cannot_hold_are_not_saved(tmp_path):
    _, _, heads = with_heads("norm")
    probes = heads.probes | {2: Probe(torch.full((32,), 1e6), torch.zeros(1))}
    heads = replace(heads, probes=probes)
    with pytest.raises(ValueError, match=r"exit\.2\.probe\.weight has numbers that are not finite in float16"):
        heads.save(tmp_path / "heads", torch.float16)
    assert not (tmp_path / "heads").exists()
    assert heads.save(tmp_path / "heads", torch.bfloat16)


REFUSED = [
    ({"exit_policy": "confidence", "profile": "nobody"}, "loaded: \\['p'\\]"),
    ({"exit_policy": "gate_cdf", "profile": "p"}, "exit_policy 'gate_cdf' does not read"),
    ({"profile": "p"}, "give exit_policy='confidence' or 'probe'"),
]


@pytest.mark.parametrize("settings, message", REFUSED)
def test_a_profile_that_cannot_be_used_is_refused(settings, message):
    model, _, _ = with_heads("norm")
    with pytest.raises(ValueError, match=message):
        Engine(model, profiles=[PROFILE]).prepare([1, 2], Sampling(**settings))


def test_a_profile_that_nobody_named_is_named_where_it_does_not_fit():
    model, _, _ = with_heads("norm")
    for policy, exit in (("confidence", Exit(layer=1, probe=0.5)), ("probe", Exit(layer=4, probe=0.5))):
        engine = Engine(model, profiles=[Profile(name="only", exits=(exit,))])
        with pytest.raises(ValueError, match="profile 'only' "):
            engine.prepare([1, 2], Sampling(exit_policy=policy))


def test_a_profile_of_exits_that_are_none_is_refused():
    model, _, _ = with_heads("norm")
    with pytest.raises(ValueError, match="exits after layers \\[3\\]"):
        Engine(model, profiles=[Profile(name="x", exits=(Exit(layer=3, probe=0.5),))])
    bare, _ = twins("layered", segments=EXITS)
    with pytest.raises(ValueError, match="asks probes at depths \\[1, 2\\]"):
        Engine(bare, profiles=[PROFILE]).prepare([1, 2], Sampling(exit_policy="probe"))


def test_the_published_profile_reads():
    path = Path(__file__).parents[2] / "examples/profiles/llama-3.1-8b-dolly.toml"
    profile = Profile.read(path)
    assert [exit.layer for exit in profile.exits] == list(range(4, 29, 4)) and profile.gate_temperature == 2.0
    assert profile.exits[0].logit == 5.1093 and profile.exits[-1].margin == 1.0184


def test_the_profile_that_the_page_shows_reads(tmp_path):
    """The page to which the error of a file that is none points."""
    (tmp_path / "none.toml").write_text("[[exit")
    with pytest.raises(ValueError, match=r"give a TOML file as (\S+) shows it") as error:
        Profile.read(tmp_path / "none.toml")
    page = re.search(r"as (\S+) shows it", str(error.value))[1]
    (shown,) = re.findall(r"```toml\n(.*?)```", (Path(__file__).parents[2] / page).read_text(), re.S)
    (tmp_path / "shown.toml").write_text(shown)
    read = Profile.read(tmp_path / "shown.toml")
    assert read.name == "careful" and read.policies == ("confidence", "probe")


BAD = [
    ("name = 'x'\n", "has no \\[\\[exit\\]\\]"),
    ("[[exit]]\nlayer = 0\n", "layer is 0; allowed: whole numbers from 1"),
    ("[[exit]]\nlayer = 4\nlogits = 3\n", "did you mean 'logit'"),
    ("[[exit]]\nlayer = 4\nprobe = 1.5\n", "probabilities"),
    ("gate_temperature = 0\n[[exit]]\nlayer = 4\n", "numbers above 0"),
    ("[[exit]]\nprobe = 0.5\n", "an exit is \\{'probe': 0.5\\}; write it as"),
    ("exit = [1]\n", "an exit is 1; write it as"),
    ("name = 3\n[[exit]]\nlayer = 4\n", "name is 3; allowed: texts"),
    ("[[exit]]\nlayer = 4\nlogit = 1\nmargin = 1\n", "the exit after layer 4 has not all of logit, margin, entropy"),
    ("[[exit]]\nlayer = 4\n[[exit]]\nlayer = 4\n", "two \\[\\[exit\\]\\]"),
]


@pytest.mark.parametrize("text, message", BAD)
def test_a_profile_that_is_wrong_says_so(text, message, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Profile.read(path)


def test_what_a_policy_was_shown_is_not_computed_again(monkeypatch):
    """Of rows that leave by their logits, the head runs once; below min_depth, and of a probe, it does not run."""
    model, _, _ = with_heads("low_rank")
    read, listed = [], model.listed

    def counted(k, h):
        read.append((k, len(h)))
        return listed(k, h)

    monkeypatch.setattr(model, "listed", counted)
    for settings in (
        {"exit_policy": "confidence"},
        {"exit_policy": "confidence", "min_depth": 2},
        {"exit_policy": "probe"},
    ):
        read.clear()
        engine = Engine(model, fill="project", profiles=[PROFILE])
        (output,) = drain(engine, [engine.prepare([5, 9, 13], Sampling(max_tokens=12, **settings))]).values()
        inner = sum(rows for k, rows in read if k < 3)
        if settings["exit_policy"] == "probe":
            assert inner == sum(depth < 3 for depth in output.depths)
        else:
            asked = range(settings.get("min_depth", 1), 3)
            assert inner == sum(k <= depth for depth in output.depths[1:] for k in asked)


def test_a_shortlist_is_packed_and_comes_back(monkeypatch):
    """Logits, and who may answer, are those of the plain table; `slots` unpacks it, `pack` packs it again."""
    model, _, heads = with_heads("shortlist")
    h = torch.randn(64, 32)
    single = replace(
        heads,
        heads={
            n: Head(x.kind, {k: single_precision(t) for k, t in x.folded(model.head).tensors.items()})
            for n, x in heads.heads.items()
        },
    )
    model.attach(single)
    plain, table = model.readout(1, h), model.heads[1].tensors["table"]
    assert not table.is_mkldnn and bool(plain.isinf().any())
    monkeypatch.setattr("anydepth.ops.linear.LARGE", 1)
    model.attach(single)
    assert model.heads[1].tensors["table"].is_mkldnn
    with torch.inference_mode():
        listed = model.listed(1, h)
        torch.testing.assert_close(model.over_vocabulary(1, listed), plain)
        may = model.answers(1, h, listed)
        assert torch.equal(may, model.answers(1, h, plain)) and {*may.tolist()} == {True, False}
    model.slots()
    assert torch.equal(model.heads[1].tensors["table"], table)
    model.pack()
    assert model.heads[1].tensors["table"].is_mkldnn


def test_a_shortlist_of_one_token_leads_over_nothing():
    model, _, heads = with_heads("shortlist")
    one = {layer: Head("shortlist", {**x.tensors, "ids": x.tensors["ids"][:1]}) for layer, x in heads.heads.items()}
    model.attach(replace(heads, heads={layer: head.folded(model.head) for layer, head in one.items()}))
    sure = Profile(name="p", gate_temperature=1.0, exits=(Exit(layer=1, logit=-1e9, margin=1e9, entropy=0.0),))
    engine = Engine(model, fill="project", profiles=[sure])
    request = engine.prepare([5, 9, 13], Sampling(max_tokens=12, ignore_eos=True, exit_policy="confidence"))
    (output,) = drain(engine, [request]).values()
    only = int(one[1].tensors["ids"])
    assert {token for d, token in zip(output.depths, output.token_ids, strict=True) if d == 1} == {only}


def test_a_single_profile_is_asked_where_no_exit_setting_is_named():
    """By the policy that it is for; not one that two policies may use, and not where a request says another."""
    model, _, _ = with_heads("low_rank")
    probe = replace(PROFILE, name="q", exits=tuple(Exit(layer=each.layer, probe=each.probe) for each in PROFILE.exits))

    def policy(profiles, **settings):
        engine = Engine(model, fill="project", profiles=profiles)
        return engine.prepare([5, 9], Sampling(**settings)).policy.name

    assert policy([probe]) == "probe"
    assert policy([probe], exit_policy="never") == "never" and policy([probe], depth=2) == "fixed"
    assert policy([PROFILE]) == policy([probe, PROFILE]) == policy([]) == "never"


@pytest.mark.parametrize("policy", ["confidence", "probe"])
def test_no_head_runs_after_the_exit_that_a_token_was_read_at(policy, monkeypatch):
    """Under `full`, where the token itself runs on, each exit's head runs as often as under `deferred`, and once more
    for what is read in the end."""
    asked = dict[str, dict[int, int]]()
    for fill in ("deferred", "full"):
        model, _, _ = with_heads("shortlist")
        rows, readout = Counter[int](), model.readout

        def counted(k, h, rows=rows, readout=readout):
            rows[k] += len(h)
            return readout(k, h)

        monkeypatch.setattr(model, "readout", counted)
        engine = Engine(model, fill=fill, profiles=[PROFILE])
        ask = Sampling(max_tokens=12, exit_policy=policy, ignore_eos=True)
        outputs = drain(engine, [engine.prepare([n, 7, 9], ask) for n in range(6)])
        depths = Counter(depth for output in outputs.values() for depth in output.depths[1:])
        asked[fill] = {k: rows[k] - (depths[k] if fill == "full" else 0) for k in (1, 2)}
        assert depths[1] and depths[2]
    assert asked["full"] == asked["deferred"]


def test_a_profile_that_is_not_there_is_told_from_those_that_are(tmp_path):
    (tmp_path / "near.toml").write_text("[[exit]]\nlayer = 1\nprobe = 0.5\n")
    with pytest.raises(ValueError, match=r"there is no profile .*far\.toml; there are: near"):
        Profile.read(tmp_path / "far.toml")
    with pytest.raises(ValueError, match=r"give the path of a \.toml, or a name beside heads="):
        Profile.read(tmp_path / "nowhere" / "far.toml")


def test_an_llm_takes_heads_and_profiles(tmp_path):
    folder = write_random_nano(tmp_path / "model", kind="layered", seed=0)
    plain = LLM(folder)
    hash, shape = plain.checkpoint.model_hash, plain.checkpoint.model.shape
    draw = torch.Generator().manual_seed(0)
    head = Head("norm", {"norm": torch.ones(shape.hidden)})
    probe = Probe(torch.randn(shape.hidden, generator=draw), torch.zeros(1))
    ExitHeads(model_hash=hash, heads={1: head}, probes={1: probe}, about={"seed": 0}).save(tmp_path / "heads")
    (tmp_path / "heads/profiles").mkdir()
    text = f"model_hash = '{hash}'\n[[exit]]\nlayer = 1\nprobe = 0.5\nlogit = -99\nmargin = 0\nentropy = 99\n"
    (tmp_path / "heads/profiles/eager.toml").write_text(text)
    (tmp_path / "other.toml").write_text(text.replace(hash, "0" * 64))
    options = {"heads": tmp_path / "heads", "fill": "project"}
    llm = LLM(folder, profile="eager", **options)
    assert llm.stats()["segments"] == 2
    prompt = [3, 4, 5]
    assert (
        llm.generate([prompt], Sampling(max_tokens=8))[0].token_ids
        == plain.generate([prompt], Sampling(max_tokens=8))[0].token_ids
    )
    (sure,) = llm.generate([prompt], Sampling(max_tokens=8, exit_policy="confidence", ignore_eos=True))
    assert set(sure.depths[1:]) == {1}
    (probed,) = llm.generate([prompt], Sampling(max_tokens=20, exit_policy="probe", profile="eager", ignore_eos=True))
    assert set(probed.depths) == {1, 2}
    with pytest.raises(ValueError, match="train heads for the result"):
        llm.update_weights(folder)
    with pytest.raises(ValueError, match="was made for model 0000000000000000"):
        LLM(folder, profile=tmp_path / "other.toml", **options)
    with pytest.raises(ValueError, match=r"with the exit heads in .* its loops"):
        LLM("nano", heads=tmp_path / "heads")
    with pytest.raises(ValueError, match="there are no exit heads in"):
        LLM(folder, heads=tmp_path / "nowhere")
