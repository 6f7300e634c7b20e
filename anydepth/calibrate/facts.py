"""What calibration.json says: settings, data, and of every profile its thresholds, agreement, depths and gates."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from anydepth.calibrate.answers import answers_hash
from anydepth.calibrate.certify import LOSS
from anydepth.calibrate.gates import show_gates, summary
from anydepth.calibrate.table import Table
from anydepth.calibrate.work import Work
from anydepth.certificate import question_set_hash
from anydepth.profile import Profile

VERSION = 1


def facts(work: Work, temperature: float, fitting: Table) -> dict[str, Any]:
    """What calibration.json says beside the profiles."""
    job = work.job
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
        "model_hash": work.llm.checkpoint.model_hash,
        "head_hash": work.head_hash,
        "sources": list(work.prompts.sources),
        "answers_sha256": answers_hash([*work.fit, *work.certify]),
        "fitted_on": question_set_hash(answer.id for answer in work.fit),
        "certified_on": question_set_hash(answer.id for answer in work.certify),
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


def profile_facts(work: Work, profile: Profile, fitting: Table, certifying: Table) -> dict[str, Any]:
    """Thresholds, and on both sets agreement, depths and gates, which are also told."""
    layers = work.model.shape.layers
    sets = {
        name: summary(table, profile, work.job.policy, layers=layers)
        for name, table in (("fit", fitting), ("certify", certifying))
    }
    of = sets["certify"]
    work.report(
        show_gates(
            f"{profile.name}: agrees {100 * of['agreement']:.1f} %, {of['mean_layers']:.1f} of {layers} layers, on "
            f"{of['questions']} certifying questions",
            of["gates"],
        )
    )
    return {"hash": profile.hash, "exits": [asdict(exit) for exit in profile.exits], **sets}
