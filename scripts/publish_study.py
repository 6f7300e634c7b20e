"""Publish a study that was run: its Records compressed, the plan, the frozen protocol and the report.

python scripts/publish_study.py STUDY results/NAME --protocol protocol.json --headers-only 'R1-*'
"""

from __future__ import annotations

import argparse
import shutil
from fnmatch import fnmatch
from pathlib import Path

from anydepth.eval.protocol import read_frozen
from anydepth.eval.report.report import report
from anydepth.eval.study import PLAN, read_plan
from anydepth.record import publish, write_atomically

PROTOCOL, REPORT = "protocol.json", "report"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="folder that anydepth eval wrote")
    parser.add_argument("target", type=Path, help="what lies there of an earlier run is replaced")
    parser.add_argument("--protocol", type=Path, required=True, help="the frozen file it was run from")
    parser.add_argument("--headers-only", default="", help="arms without their samples: a pattern")
    given = parser.parse_args()
    publish_study(given.study, given.target, protocol=given.protocol, headers_only=given.headers_only)


def publish_study(study: Path, target: Path, *, protocol: Path, headers_only: str = "") -> None:
    """Write `target`. The report is made from all samples, those that are not published too.

    Raises ValueError for a study that was run from another frozen file and for arms that are not complete.
    """
    frozen, plans = read_frozen(protocol), read_plan(study)
    if not plans or plans[-1]["study_hash"] != frozen["study_hash"]:
        raise ValueError(f"{study} was not run from {protocol}; give the frozen file it was run from")
    fresh = target.with_name(f"{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for arm in plans[-1]["arms"]:
        publish(study / arm["name"], fresh / arm["name"], samples=not fnmatch(arm["name"], headers_only))
    for path in (study / PLAN, protocol):
        write_atomically(fresh / (PLAN if path.name == PLAN else PROTOCOL), path.read_bytes())
    report([study], fresh / REPORT)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


if __name__ == "__main__":
    main()
