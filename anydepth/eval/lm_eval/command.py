"""`anydepth lm-eval`: the lm-evaluation-harness's own command, with the engine as its default model."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from anydepth.eval.lm_eval.local_tasks import write_local_tasks
from anydepth.eval.lm_eval.model import NAME, AnydepthLM, listed

HELP = """usage: anydepth lm-eval [--local-data TASK[:SPLIT]=FILE ...] <lm-eval's own arguments>

Runs the lm-evaluation-harness with the engine as its model; --model anydepth is the default. Example:
  anydepth lm-eval run --model_args model=nano,exit_threshold=0.5,min_depth=2 --tasks gsm8k_cot --limit 5
--model_args takes every option of LLM and every field of Sampling, which hold over what a task asks for.
  --local-data TASK[:SPLIT]=FILE  read a task's questions from a .jsonl or .json file instead of the hub; may be
                                  repeated. SPLIT: the one that the task evaluates, if left out.

What follows is lm-eval's own help.
"""


def main(argv: Sequence[str]) -> None:
    """Run lm-eval's command with these arguments, "anydepth" being one of its models and the default one.

    ValueError for wrong settings; lm-eval's own errors and exits (its help, its argument errors) pass through.
    """
    from lm_eval import utils
    from lm_eval._cli import HarnessCLI
    from lm_eval.api.registry import register_model

    own = argparse.ArgumentParser(prog="anydepth lm-eval", add_help=False, allow_abbrev=False)
    own.add_argument("--local-data", "--local_data", action="append", default=[])
    ours, rest = own.parse_known_args(list(argv))
    if not rest or {"-h", "--help"} & set(rest):
        print(HELP)
    utils.setup_logging()
    register_model(NAME)(AnydepthLM)
    before, sys.argv = sys.argv, ["lm-eval", *rest]  # where lm-eval's parser looks
    try:
        harness = HarnessCLI()
        arguments = harness.parse_args()
    finally:
        sys.argv = before
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the data may still be mapped
        if arguments.command == "run":
            complete(arguments, ours.local_data, Path(folder))
        elif ours.local_data:
            raise ValueError("--local-data belongs to lm-eval's run; leave it out")
        harness.execute(arguments)


def complete(arguments: argparse.Namespace, local_data: Sequence[str], folder: Path) -> None:
    """Fill in what was not given: our model, and for it neither lm-eval's batch size of 1 nor its GPU.

    lm-eval's cache of answers knows requests only: here its file's name says which arm's they are.
    """
    from lm_eval.config.evaluate_config import EvaluatorConfig

    given = EvaluatorConfig.load_yaml_config(arguments.config) if arguments.config else {}
    given |= {name: value for name, value in vars(arguments).items() if value is not None}
    arguments.model = given.get("model", NAME)
    if arguments.model == NAME:
        arguments.batch_size, arguments.device = given.get("batch_size", "auto"), given.get("device", "auto")
        if cache := given.get("use_cache"):
            arm = json.dumps([given.get("model_args"), given.get("seed")], sort_keys=True)
            arguments.use_cache = f"{cache}_{hashlib.sha256(arm.encode()).hexdigest()[:12]}"
    if local_data:
        include = listed(given.get("include_path"))
        write_local_tasks(local_data, folder, include_path=include)
        arguments.include_path = [*include, str(folder)]
