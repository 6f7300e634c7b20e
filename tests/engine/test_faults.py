"""Guards that are broken on purpose: for each, the smallest check that must notice.

A fault replaces one piece of a function's text. Where the text is no longer there, the guard has moved: move the fault.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest

from anydepth.engine import runner, sampling, text
from anydepth.engine.engine import Engine
from anydepth.engine.plan import Sequence
from anydepth.engine.requests import Requests
from anydepth.engine.runner import Runner
from anydepth.engine.sampling import Sampler
from anydepth.engine.scheduler import Scheduler
from anydepth.engine.slots import Slots
from anydepth.engine.text import TextStream
from anydepth.engine.waiting import Waiting
from anydepth.exits import base, gate_cdf
from anydepth.models import load
from anydepth.ops import kv
from anydepth.ops.kv import KVMap, KVPool, TurnKV
from anydepth.types import Sampling
from tests.engine import test_errors, test_sampling, test_scheduler, test_text, test_traps
from tests.engine.planting import Fault, notice
from tests.engine.schedules import VOCABULARY, Asked, Schedule, play
from tests.exits import test_policies
from tests.helpers import assert_lone_runs, drain, poison, score_verdicts, twins

GATED = {"max_tokens": 8, "exit_threshold": 0.5}
SAMPLED = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
ONE, TWO = {"max_tokens": 1}, {"max_tokens": 2}


def prompt(length: int) -> list[int]:
    return Random(length).choices(range(61), k=length)


def lone(*asks: tuple[int, dict[str, Any]], **options: Any) -> None:
    """Requests of (prompt length, settings), beside each other, equal their lone runs."""
    options = {"fill": "last_exited"} | options
    assert_lone_runs(twins(seed=4), [(prompt(length), settings) for length, settings in asks], **options)


def scored() -> None:
    asks = [(prompt(3), [prompt(2), prompt(4)], {"exit_threshold": 0.5})]
    for verdict in score_verdicts(twins(seed=4), asks, fill="last_exited"):
        assert verdict.equal


def aborted_in_prefill() -> None:
    """Between two segments of a chunk; `drain` looks for what is held."""
    engine = Engine(twins(seed=4)[0])
    engine.submit(prompt(5), id="a")
    engine.step()
    engine.abort("a")
    drain(engine)


def two_prompts_of_five() -> None:
    """`play` counts every turn's rows against the cap of three."""
    asked = tuple(Asked(0, (n, 2, 3, 4, 5), ONE) for n in range(2))
    options = {"max_batch": 2, "page_size": 4, "kv_pages": 9, "max_batched_tokens": 3}
    play(Schedule("looped", 0, {"vocab_size": VOCABULARY}, None, "float64", "full", (), options, asked))


def one_after_the_other() -> None:
    """A layered model's second request arrives while the first is between two segments."""
    asked = (Asked(0, (1, 2, 3), TWO), Asked(1, (4, 5), TWO))
    options = {"max_batch": 2, "page_size": 4, "kv_pages": 9, "max_batched_tokens": 8}
    changes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2}
    play(Schedule("layered", 0, changes, (1, 2), "float64", "full", (), options, asked))


def the_same_request_twice() -> None:
    """Two equal requests draw the same tokens, whatever slot they have."""
    engine = poison(Engine(twins(seed=4)[0], max_batch=2))
    first, second = drain(engine, [engine.prepare(prompt(4), Sampling(**SAMPLED)) for _ in range(2)]).values()
    assert first.token_ids == second.token_ids


depth_1 = partial(lone, (5, {"max_tokens": 5, "depth": 1}))
depth_2 = partial(lone, (5, {"max_tokens": 5, "depth": 2}))
together = partial(lone, (3, {"max_tokens": 4}), (4, {"max_tokens": 4}))
gated = partial(lone, (5, GATED))
gated_full = partial(lone, (5, GATED), fill="full")
tenants = partial(lone, (3, GATED | {"max_tokens": 2}), (7, GATED | {"exit_threshold": 0.9}), max_batch=1)

FAULTS = {
    # -- planes and pages ---------------------------------------------------------------------------------------------
    "nothing is copied where a row left early": Fault(
        Runner, "_fill", "if not self.fill.copies:", "if True:", depth_1
    ),
    "copies are of plane 1, not of the readout depth's": Fault(
        KVPool, "copy_deeper", "index_select(2, source_NR.reshape(-1))",
        "index_select(2, source_NR.reshape(-1) % self.positions)", depth_2
    ),
    "copies reach the next plane only": Fault(
        KVPool, "copy_deeper", "self._deeper.index_select(0, depth_N)",
        "self._deeper.index_select(0, depth_N).clamp(max=self.positions)", depth_1,
    ),
    "copies are of the neighbouring position": Fault(
        KVPool, "copy_deeper", "index_select(2, source_NR.reshape(-1))",
        "index_select(2, source_NR.reshape(-1) - 1)", depth_1
    ),
    "decode rows of all depths write and read plane 1": Fault(
        KVPool, "offset", "index_select(0, depth_N)", "index_select(0, 0 * depth_N + 1)", together
    ),
    "prompts of all depths write and read plane 1": Fault(
        KVMap, "_plane", "(depth - 1) * self.pool.positions", "0 * depth", partial(lone, (5, TWO))
    ),
    "beyond a row's length its pages are read": Fault(
        KVMap, "together", "table * seen_BnT[:, -1]", "table", partial(lone, (9, TWO), (2, TWO))
    ),
    "a row does not see itself": Fault(KVMap, "together", "<= positions_Bn", "< positions_Bn", together),
    "a chunk's rows see the next one": Fault(
        kv, "causal_mask", "context - rows + 1", "context - rows + 2", partial(lone, (5, ONE))
    ),
    "rows of a slot stay on its former tenant's pages": Fault(
        KVMap, "give", "at * size + len(storage)] = storage", "at * size + len(storage)] += storage", tenants
    ),
    "values are keys": Fault(TurnKV, "attend", "self.write_N, v_NGD", "self.write_N, k_NGD", partial(lone, (3, ONE))),
    "query heads of decode rows read another group's keys": Fault(
        kv, "attend_rows", "k_BTGD.transpose(1, 2)", "k_BTGD.flip(2).transpose(1, 2)", together
    ),
    "query heads of a chunk read another group's keys": Fault(
        kv, "attend_chunk", "(q_nHD, k_TGD, v_TGD)", "(q_nHD, k_TGD.flip(1), v_TGD)", partial(lone, (3, ONE))
    ),
    "a slot's pages count as lying in a row when they do not": Fault(
        KVMap, "give", "if at == count and", "if at == count or",
        partial(lone, (5, ONE), (5, {"max_tokens": 12}), (9, TWO), max_batch=2, page_size=4),
    ),
    "a finished request keeps its pages": Fault(
        Scheduler, "_let_go", "self.pages.give_back(sequence.pages)", "pass", partial(lone, (3, ONE))
    ),
    "an aborted prompt leaves its chunk behind": Fault(
        Slots, "vacate", "self.chunks.pop(slot, None)", "pass", aborted_in_prefill
    ),
    # -- depth --------------------------------------------------------------------------------------------------------
    "the product of a token goes on in the next one": Fault(
        gate_cdf.Policy, "decide", "torch.where(depth_N == 1, 1.0, state_NS[:, 0])", "state_NS[:, 0]", gated
    ),
    "a threshold of 1 is `cdf >= 1`": Fault(
        gate_cdf.Policy, "parameters", 'tau if tau < 1 else float("inf")', "tau",
        test_policies.test_a_threshold_of_one_turns_adaptive_exit_off,
    ),
    "rounds below min may leave": Fault(
        base, "thresholds", 'float("inf") if d < low else value', "value",
        partial(test_traps.test_01_the_cdf_runs_over_the_rounds_below_min_too, "last_exited"),
    ),
    "max does not end it": Fault(
        runner, "_latest", "row.sequence.request.bounds[1] if row.read is None", "4 if row.read is None",
        partial(test_traps.test_02_a_gate_that_never_fires_means_full_depth, "last_exited"),
    ),
    "a slot keeps its former tenant's policy state": Fault(
        Slots, "_write_state", "pool[slot] = state", "pool[slot] = state if not pool[slot].any() else pool[slot]",
        tenants,
    ),
    "a snapshot of one token stands for the next": Fault(
        Runner, "_snapshot", "torch.where(depth == 1, 0, depths[slots])", "depths[slots]",
        gated_full,
    ),
    "full reads the last state, not the snapshot": Fault(
        Runner, "_leave_full", "h_Ld[self._index(early)] = self.slots.kept_h_Sd[slots]", "pass", gated_full
    ),
    "the first snapshot is written over": Fault(
        Runner, "_snapshot", "(leaves | last) & (before == 0)", "leaves | last",
        partial(lone, (5, GATED | {"exit_threshold": 0.3}), fill="full"),
    ),
    # -- who runs when ------------------------------------------------------------------------------------------------
    "`shared` prefills many positions at a time": Fault(
        Scheduler, "_cut_chunks", "self.prefill_rows or room", "room", partial(lone, (3, ONE), fill="shared")
    ),
    "a turn carries more prompt tokens than its cap": Fault(
        Scheduler, "_cut_chunks", "room, self.prefill_rows or room", "512", two_prompts_of_five
    ),
    "the deepest rows always go first": Fault(
        Scheduler, "_plan", "overdue = self.turn - oldest.ready_since >= self.segments", "overdue = False",
        test_scheduler.test_rows_scattered_over_a_layered_model_do_not_wait_for_all_that_are_deeper,
    ),
    "rows that left early go ahead": Fault(
        Scheduler, "_plan", "max(s.segment for s in ready)", "oldest.segment",
        test_scheduler.test_rows_of_a_layered_model_enter_together_however_early_some_left,
    ),
    "small requests overtake large ones without end": Fault(
        Waiting, "take", "other.overtaken >= BYPASSES", "False",
        test_scheduler.test_a_large_request_is_overtaken_so_often_and_no_more,
    ),
    "positions count from one": Fault(
        Sequence, "position", "return self.first_position", "return 1 + self.first_position", partial(lone, (3, TWO))
    ),
    "a layered turn takes rows of every depth": Fault(
        Scheduler, "_plan", "if s.segment == segment]", "]", one_after_the_other
    ),
    "an error in a turn leaves requests behind": Fault(
        Engine, "step", 'self._drop(request_id, "error")', "pass",
        lambda monkeypatch: test_errors.test_an_error_inside_a_turn_ends_what_was_running("looped", 5, monkeypatch),
    ),
    # -- tokens -------------------------------------------------------------------------------------------------------
    "a row's uniform depends on its slot": Fault(
        Sampler, "_draw", "draws[j].output for j in drawn", "draws[j].slot for j in drawn",
        the_same_request_twice,
    ),
    "uniforms do not depend on the seed": Fault(
        Sampler, "seat", "uniforms(request.seed,", "uniforms(0,", partial(lone, (3, SAMPLED))
    ),
    "of equal logits top-k keeps the higher ids": Fault(
        sampling, "_top_k", "equal.cumsum(-1)", "equal.flip(-1).cumsum(-1).flip(-1)",
        test_traps.test_10_top_k_with_ties_and_top_p_keep_what_they_should,
    ),
    "top-k keeps every logit equal to the k-th": Fault(
        sampling, "_top_k", "(equal & (equal.cumsum(-1) <= room))", "equal",
        test_traps.test_10_top_k_with_ties_and_top_p_keep_what_they_should,
    ),
    "top-p drops the token that crosses": Fault(
        sampling, "processed", ".cumsum(-1).roll(1, -1)", ".cumsum(-1)", test_sampling.test_top_p_edges
    ),
    "top-p may drop every token": Fault(
        sampling, "processed", "dropped[:, 0] = False", "pass",
        test_traps.test_10_top_k_with_ties_and_top_p_keep_what_they_should,
    ),
    "a neighbour's top-p touches a row": Fault(
        sampling, "processed", "(settings.top_p_N < 1).unsqueeze(1)", "settings.top_p_N.unsqueeze(1) > 0",
        partial(test_sampling.test_a_row_does_not_depend_on_its_neighbours, 6),
    ),
    "an id of no probability is drawn where the mass ends short": Fault(
        sampling, "pick", "torch.minimum(token, last)", "token.clamp(max=probabilities_NV.shape[1] - 1)",
        test_sampling.test_pick_falls_back_to_the_last_possible_id,
    ),
    "argmax ties go to the higher id": Fault(
        sampling, "greedy", "logits_NV.argmax(-1)", "logits_NV.shape[1] - 1 - logits_NV.flip(-1).argmax(-1)",
        test_sampling.test_argmax_ties_go_to_the_lower_id,
    ),
    "a scored continuation goes on from the one before": Fault(
        sampling, "_next_input", "if ends else", "if False else", scored
    ),
    # -- endings ------------------------------------------------------------------------------------------------------
    "the generation config's EOS is not read": Fault(
        load, "all_eos", 'weights.generation_config.get("eos_token_id")', "None",
        test_traps.test_12_eos_of_config_generation_config_and_tokenizer,
    ),
    "the tokenizer's EOS is not read": Fault(
        load, "all_eos", "sorted(words.eos_ids) if words else None", "None",
        test_traps.test_12_eos_of_config_generation_config_and_tokenizer,
    ),
    "nothing is held back of a stop string that may come": Fault(
        text, "_overlap", "text.endswith(stop[:n])", "False", test_traps.test_11_a_stop_string_over_several_tokens
    ),
    "what was held back is lost at the end": Fault(
        TextStream, "end", "self._held + fresh", "fresh", test_traps.test_11_a_stop_string_over_several_tokens
    ),
    "half a character is delivered": Fault(
        TextStream, "push", "if fresh.endswith(INCOMPLETE):", "if False:",
        test_text.test_a_character_in_parts_is_held_until_it_is_whole,
    ),
    "words after a special token lose their space": Fault(
        TextStream, "push", "if fresh:", "if True:", test_text.test_words_come_with_their_spaces
    ),
    "the model's length does not end a request": Fault(
        Requests, "make", "else min(sampling.max_tokens, room)", "else sampling.max_tokens",
        lambda: assert_lone_runs(twins(seed=4, max_position_embeddings=8), [(prompt(6), {})], fill="full"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_guard_is_noticed(name, monkeypatch, tmp_path):
    notice(FAULTS[name], monkeypatch, tmp_path)
