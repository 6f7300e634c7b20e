"""`anydepth calibrate --heads`: prompts in; profiles, a report of their gates and a certificate out."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anydepth.calibrate.answers import Answer, answers_hash, full_depth_answers
from anydepth.calibrate.certify import LOSS, choose, engine_losses, engine_scores, p_value, table_losses
from anydepth.calibrate.fit import LEAST_ROWS, LEVELS, fit_exits
from anydepth.calibrate.gates import show_gates, summary
from anydepth.calibrate.gather import gate_temperature, gather
from anydepth.calibrate.prompts import Prompts, choose_prompts, prompt_ids
from anydepth.calibrate.table import Table, tests_of
from anydepth.calibrate.write import write_profile
from anydepth.certificate import FILE, PROFILED, Certificate, describe, question_set_hash
from anydepth.engine.llm import LLM
from anydepth.eval.calibrate import Goal, fix_plan
from anydepth.eval.calibrate_checks import LEAST_QUESTIONS, check_questions
from anydepth.models.heads_about import read_about
from anydepth.models.llama import Llama
from anydepth.profile import FOLDER, Profile
from anydepth.record import write_atomically
from anydepth.train.head_data import Source
from anydepth.types import unknown

REPORT, VERSION = "calibration.json", 1
FILLS = ("full", "deferred", "project")
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be calibrated. `levels`: agreements with full depth that profiles aim at. `epsilon`, `delta`: of the
    certificate. `fit_share`: of the prompts, to fit on; the others certify."""

    model: str
    heads: Path
    policy: str
    data: tuple[Source, ...]
    fill: str = "full"
    levels: tuple[float, ...] = LEVELS
    epsilon: float = 0.05
    delta: float = 0.05
    answer_tokens: int = 128
    limit: int | None = None
    seed: int = 0
    fit_share: float = 1 / 3
    least_rows: int = LEAST_ROWS

    def __post_init__(self) -> None:
        if self.policy not in PROFILED:
            raise unknown("policy that has profiles", self.policy, PROFILED)
        if self.fill not in FILLS:
            raise unknown("fill", self.fill, FILLS)
        if not self.data:
            raise ValueError("no prompts were given; name a JSONL file of them with --data")
        Goal(epsilon=self.epsilon, delta=self.delta)
        for name in ("answer_tokens", "least_rows", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: whole numbers from 1")

    @property
    def command(self) -> str:
        """The command that does it again, but for the places of files."""
        words = ["anydepth", "calibrate", "--model", Path(self.model).name, "--heads", self.heads.name]
        words += ["--policy", self.policy, "--fill", self.fill]
        for source in self.data:
            words += ["--data", source.path.name + ("" if source.rows is None else f":{source.rows}")]
        for level in self.levels:
            words += ["--level", f"{level:g}"]
        words += ["--eps", f"{self.epsilon:g}", "--delta", f"{self.delta:g}"]
        words += ["--answer-tokens", str(self.answer_tokens), "--seed", str(self.seed)]
        return shlex.join(words + ([] if self.limit is None else ["--limit", str(self.limit)]))


def calibrate_heads(
    job: Job, out: Path, *, answers: Path | None = None, install: bool = False, report: Report = print
) -> dict[str, Any]:
    """Fit profiles into `out`/profiles and certify them; what calibration.json says.

    `answers`: folder of full depth's answers, which are made once; `out`/answers if left out. `install` copies the
    profiles to the heads' folder. With fewer than 500 certifying prompts no certificate is made, which is said.
    ValueError, before any answer is made, for data, heads and a folder `out` that do not fit.
    """
    work = _Work(job, out, answers, report)
    temperature = gate_temperature(work.model, work.fit) if job.policy == "confidence" else 1.0
    fitting, certifying = work.tables(temperature)
    fitted = fit_exits(fitting, job.policy, job.levels, least_rows=job.least_rows)
    profiles = [work.profile(level, exits, temperature) for level, exits in fitted.items() if exits]
    comments = [job.command, *(f"{s['file']}: sha256 {s['sha256']}" for s in work.prompts.sources)]
    for level, exits in fitted.items():
        if not exits:
            report(f"no exit reaches {level:g}: no profile is written for it")
    found = work.facts(temperature, fitting)
    for profile in profiles:
        path = write_profile(out / FOLDER, profile, comments)
        found["profiles"][profile.name] = work.profile_facts(profile, fitting, certifying)
        if install:
            (job.heads / FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(path, job.heads / FOLDER / path.name)
    certificate, reason = work.certified(profiles, certifying)
    for profile, point in zip(profiles, certificate.points if certificate else (), strict=False):
        found["profiles"][profile.name]["risk"] = {key: point[key] for key in ("n", "losses", "p")}
    found["certificate"] = describe(certificate) if certificate else None
    found["no_certificate"] = reason
    write_atomically(out / REPORT, json.dumps(found, indent=1).encode() + b"\n")
    report(describe(certificate) if certificate else f"No certificate: {reason}")
    return found


def check_profile(
    job: Job, path: Path, out: Path, *, answers: Path | None = None, report: Report = print
) -> dict[str, Any]:
    """The report for a profile that exists already, into `out`/check-NAME.json; nothing is fitted or certified."""
    profile = Profile.read(path)
    work = _Work(job, out, answers, report, fitting=False)
    profile.check_hashes(model_hash=work.llm.checkpoint.model_hash, head_hash=work.head_hash)
    profile.check_exits([layers.stop for layers in work.model.shape.segment_layers])
    tests = tests_of(job.policy)
    if all(getattr(exit, test) is None for exit in profile.exits for test in tests):
        raise ValueError(f"{path} has no exit with {', '.join(tests)}, which policy {job.policy!r} needs")
    fitting, certifying = work.tables(profile.gate_temperature)
    found = work.facts(profile.gate_temperature, fitting)
    found["profiles"][profile.name] = work.profile_facts(profile, fitting, certifying)
    write_atomically(out / f"check-{profile.name}.json", json.dumps(found, indent=1).encode() + b"\n")
    return found


class _Work:
    """A model with its heads, and answers to fit and to certify on."""

    def __init__(self, job: Job, out: Path, answers: Path | None, report: Report, *, fitting: bool = True) -> None:
        self.job, self.out, self.report = job, out, report
        about = read_about(job.heads)
        trained_on = {source["sha256"] for source in about.get("data", {}).get("sources", ())}
        self.prompts: Prompts = choose_prompts(
            job.data, trained_on=trained_on, seed=job.seed, fit_share=job.fit_share, limit=job.limit
        )
        self.llm = LLM(job.model, heads=job.heads)
        model, self.head_hash = self.llm.checkpoint.model, str(about["sha256"])
        assert isinstance(model, Llama), "heads are refused for all others"
        self.model = model
        if job.policy == "probe" and not model.probes:
            raise ValueError(f"the heads in {job.heads} have no probe; give policy 'confidence', or other heads")
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
        wanted = set(prompt_ids(self.prompts.fit))
        self.fit: list[Answer] = [answer for answer in made if answer.id in wanted]
        self.certify: list[Answer] = [answer for answer in made if answer.id not in wanted]

    def _plan(self) -> dict[str, Any]:
        """What must be fixed before the answers are looked at."""
        job = self.job
        return {
            "version": VERSION,
            "command": job.command,
            "model_hash": self.llm.checkpoint.model_hash,
            "head_hash": self.head_hash,
            "grid": [_name(job, level) for level in sorted(set(job.levels), reverse=True)],
            "loss": LOSS,
            "eps": job.epsilon,
            "delta": job.delta,
            "fit_share": job.fit_share,
            "least_rows": job.least_rows,
            "fitted_on": question_set_hash(prompt_ids(self.prompts.fit)),
            "certified_on": question_set_hash(prompt_ids(self.prompts.certify)),
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
            name=_name(self.job, level),
            exits=tuple(exits),
            gate_temperature=temperature,
            model_hash=self.llm.checkpoint.model_hash,
            head_hash=self.head_hash,
        )

    def facts(self, temperature: float, fitting: Table) -> dict[str, Any]:
        """What calibration.json says beside the profiles."""
        job = self.job
        return {
            "version": VERSION,
            "command": job.command,
            "policy": job.policy,
            "fill": job.fill,
            "seed": job.seed,
            "levels": list(job.levels),
            "eps": job.epsilon,
            "delta": job.delta,
            "loss": LOSS,
            "model_hash": self.llm.checkpoint.model_hash,
            "head_hash": self.head_hash,
            "sources": list(self.prompts.sources),
            "answers_sha256": answers_hash([*self.fit, *self.certify]),
            "fitted_on": question_set_hash(answer.id for answer in self.fit),
            "certified_on": question_set_hash(answer.id for answer in self.certify),
            "gate_temperature": temperature,
            "exits": [
                {
                    "layer": layer,
                    "agreement": float(fitting.agrees_RE[:, e].mean()),
                    "may_answer": float(fitting.answers_RE[:, e].mean()),
                }
                for e, layer in enumerate(fitting.layers)
            ],
            "profiles": {},
        }

    def profile_facts(self, profile: Profile, fitting: Table, certifying: Table) -> dict[str, Any]:
        """Thresholds, and on both sets agreement, depths and gates, which are also told."""
        layers = self.model.shape.layers
        sets = {
            name: summary(table, profile, self.job.policy, layers=layers)
            for name, table in (("fit", fitting), ("certify", certifying))
        }
        of = sets["certify"]
        self.report(
            show_gates(
                f"{profile.name}: agrees {100 * of['agreement']:.1f} %, {of['mean_layers']:.1f} of {layers} layers, on "
                f"{of['questions']} certifying questions",
                of["gates"],
            )
        )
        return {"hash": profile.hash, "exits": [asdict(exit) for exit in profile.exits], **sets}

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
        """By the table where K/V are those of full depth, else by the engine."""
        if self.job.fill != "project":
            return table_losses(certifying, profile, self.job.policy)
        policy, fill = self.job.policy, self.job.fill
        return engine_losses(engine_scores(self.llm, self.certify, profile, policy, fill=fill, report=self.report))


def _name(job: Job, level: float) -> str:
    return f"{job.policy}-{level:g}"


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
