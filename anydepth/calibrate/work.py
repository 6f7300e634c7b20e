"""A calibration under way: the model with its heads, answers to fit and to certify on, and what is asked of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anydepth.calibrate.answers import Answer, answers_hash, full_depth_answers
from anydepth.calibrate.certify import LOSS, choose, p_value, table_losses
from anydepth.calibrate.gather import gather
from anydepth.calibrate.job import Job
from anydepth.calibrate.prompts import Prompts, choose_prompts, question_ids
from anydepth.calibrate.scores import LOSSES_FILE, kept_engine_losses
from anydepth.calibrate.table import Table
from anydepth.certificate import FILE, Certificate, question_set_hash
from anydepth.engine.llm import LLM
from anydepth.eval.calibrate import fix_plan
from anydepth.eval.calibrate_checks import LEAST_QUESTIONS, check_questions
from anydepth.models.heads_about import read_about
from anydepth.models.llama import Llama
from anydepth.profile import Profile

PLAN_VERSION = 1
Report = Callable[[str], None]


class Work:
    """A model with its heads, and answers to fit and to certify on."""

    def __init__(self, job: Job, out: Path, answers: Path | None, report: Report, *, fitting: bool = True) -> None:
        self.job, self.out, self.report = job, out, report
        about = read_about(job.heads)
        trained_on = {source["sha256"] for source in about.get("data", {}).get("sources", ())}
        self.prompts: Prompts = choose_prompts(
            job.data, trained_on=trained_on, seed=job.seed, fit_share=job.fit_share, limit=job.limit
        )
        self.llm = LLM(job.model, heads=job.heads, dtype=job.dtype, device=job.device, revision=job.revision)
        model, self.head_hash = self.llm.checkpoint.model, str(about["sha256"])
        assert isinstance(model, Llama), "heads are refused for all others"
        self.model = model
        if job.policy == "probe" and not model.probes:
            raise ValueError(f"the heads in {job.heads} have no probe; give policy 'confidence', or other heads")
        out.mkdir(parents=True, exist_ok=True)
        if fitting:
            fix_plan(out, self._plan())
        report(f"{len(self.prompts.fit)} prompts to fit on, {len(self.prompts.certify)} to certify on")
        made = full_depth_answers(
            self.llm,
            [*self.prompts.fit, *self.prompts.certify],
            answers or out / "answers",
            tokens=job.answer_tokens,
            report=report,
        )
        wanted = set(question_ids(self.prompts.fit))
        self.fit: list[Answer] = [answer for answer in made if answer.id in wanted]
        self.certify: list[Answer] = [answer for answer in made if answer.id not in wanted]

    def _plan(self) -> dict[str, Any]:
        """What must be fixed before the answers are looked at."""
        job = self.job
        return {
            "version": PLAN_VERSION,
            "command": job.command,
            "model_hash": self.llm.checkpoint.model_hash,
            "head_hash": self.head_hash,
            "grid": [job.profile_name(level) for level in sorted(set(job.levels), reverse=True)],
            "loss": LOSS,
            "eps": job.epsilon,
            "delta": job.delta,
            "fit_share": job.fit_share,
            "least_rows": job.least_rows,
            "fitted_on": question_set_hash(question_ids(self.prompts.fit)),
            "certified_on": question_set_hash(question_ids(self.prompts.certify)),
        }

    def tables(self, temperature: float) -> tuple[Table, Table]:
        """The rows to fit on, and those to certify on."""
        count = len(self.fit), len(self.fit) + len(self.certify)
        whole = gather(self.model, [*self.fit, *self.certify], temperature=temperature, report=self.report)
        tables = whole.of(0, count[0]), whole.of(*count)
        if not all(map(len, tables)):
            raise ValueError("all answers of a set have one token only, so nothing leaves early; give more prompts")
        return tables

    def profile(self, level: float, exits: Sequence[Any], temperature: float) -> Profile:
        return Profile(
            name=self.job.profile_name(level),
            exits=tuple(exits),
            gate_temperature=temperature,
            model_hash=self.llm.checkpoint.model_hash,
            head_hash=self.head_hash,
        )

    def certified(self, profiles: Sequence[Profile], certifying: Table) -> tuple[Certificate | None, str | None]:
        """The certificate, written; or why there is none."""
        job, ids = self.job, [answer.id for answer in self.certify]
        (self.out / FILE).unlink(missing_ok=True)
        if not profiles:
            return None, "no profile could be fitted"
        if len(ids) < LEAST_QUESTIONS:
            return None, f"there are {len(ids)} certifying prompts, it needs {LEAST_QUESTIONS}; the profiles are fitted"
        fitted_on = [answer.id for answer in self.fit]
        check_questions(ids, split="held out", test_ids=None, fitted_on=fitted_on)
        losses = list[list[float]]()
        for profile in profiles:
            losses.append(self.losses(profile, certifying))
            if job.fill == "project" and p_value(losses[-1], job.epsilon) > job.delta:
                break  # laxer ones cannot be certified any more, and scoring takes long
        certificate = choose(
            profiles[: len(losses)],
            losses,
            llm=self.llm,
            policy=job.policy,
            fill=job.fill,
            epsilon=job.epsilon,
            delta=job.delta,
            ids=ids,
            fitted_on=fitted_on,
            seed=job.seed,
            plan_hash=_hash(self._plan() | {"answers": answers_hash([*self.fit, *self.certify])}),
        )
        certificate.write(self.out / FILE)
        return certificate, None

    def losses(self, profile: Profile, certifying: Table) -> list[float]:
        """By the table where K/V are those of full depth, else by the engine, kept as they are found."""
        if self.job.fill != "project":
            return table_losses(certifying, profile, self.job.policy)
        return kept_engine_losses(
            self.llm,
            self.certify,
            profile,
            self.job.policy,
            fill=self.job.fill,
            path=self.out / LOSSES_FILE,
            report=self.report,
        )


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
