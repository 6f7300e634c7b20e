"""`anydepth calibrate --heads`: prompts in; profiles, a report of their gates and a certificate out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from anydepth.calibrate.facts import facts, profile_facts
from anydepth.calibrate.fit import fit_exits
from anydepth.calibrate.gather import gate_temperature
from anydepth.calibrate.job import Job
from anydepth.calibrate.table import tests_of
from anydepth.calibrate.work import Report, Work
from anydepth.calibrate.write import write_profile
from anydepth.certificate import describe
from anydepth.profile import FOLDER, Profile
from anydepth.record import write_atomically

REPORT = "calibration.json"


def calibrate_heads(
    job: Job, out: Path, *, answers: Path | None = None, install: bool = False, report: Report = print
) -> dict[str, Any]:
    """Fit profiles into `out`/profiles and certify them; what calibration.json says.

    `answers`: folder of full depth's answers, which are made once; `out`/answers if left out. `install` copies the
    profiles to the heads' folder. With fewer than 500 certifying prompts no certificate is made, which is said.
    ValueError, before any answer is made, for data, heads and a folder `out` that do not fit.
    """
    work = Work(job, out, answers, report)
    temperature = gate_temperature(work.model, work.fit) if job.policy == "confidence" else 1.0
    fitting, certifying = work.tables(temperature)
    fitted = fit_exits(fitting, job.policy, job.levels, least_rows=job.least_rows)
    profiles = [work.profile(level, exits, temperature) for level, exits in fitted.items() if exits]
    comments = [job.command, *(f"{s['file']}: sha256 {s['sha256']}" for s in work.prompts.sources)]
    for level, exits in fitted.items():
        if not exits:
            report(f"no exit reaches {level:g}: no profile is written for it")
    found = facts(work, temperature, fitting)
    for profile in profiles:
        path = write_profile(out / FOLDER, profile, comments)
        found["profiles"][profile.name] = profile_facts(work, profile, fitting, certifying)
        if install and out.resolve() != job.heads.resolve():
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
    work = Work(job, out, answers, report, fitting=False)
    profile.check_hashes(model_hash=work.llm.checkpoint.model_hash, head_hash=work.head_hash)
    profile.check_exits([layers.stop for layers in work.model.shape.segment_layers])
    tests = tests_of(job.policy)
    if all(getattr(exit, test) is None for exit in profile.exits for test in tests):
        raise ValueError(f"{path} has no exit with {', '.join(tests)}, which policy {job.policy!r} needs")
    fitting, certifying = work.tables(profile.gate_temperature)
    found = facts(work, profile.gate_temperature, fitting)
    found["profiles"][profile.name] = profile_facts(work, profile, fitting, certifying)
    write_atomically(out / f"check-{profile.name}.json", json.dumps(found, indent=1).encode() + b"\n")
    return found
