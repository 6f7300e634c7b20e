"""Reinforcement learning with TRL at three depths: GRPO from a damaged nano, on the CPU, in minutes.

    pip install "anydepth[rl,eval]"
    python examples/grpo.py --out grpo                       # all three, one after the other
    python examples/grpo.py --out grpo --arm interval-4      # one of them; stopped runs go on where they were
    python examples/grpo.py --out grpo --arm full --steps 3  # a first look, half a minute

The start is nano with noise on its matrices (OUT/start, made in a second): it has about 60 % of the questions right at
full depth, where nano has 99. Arms: `full` (every token at all four segments), `depth-2` (all but the first at two),
`interval-4` (every fourth at four, the others at two). The reward is exact match of the final number. Each arm leaves a
Record in OUT/<arm>/record (one line a step, two a question) and a checkpoint that `LLM` loads in OUT/<arm>/model; then
a table is printed. Questions: trained on "train", reported on "validation" before and after; settings were chosen on
"calibration".
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from anydepth import LLM, Sampling
from anydepth.models.load import load_checkpoint
from anydepth.models.nano.questions import Question, final_answer, grade, questions
from anydepth.provenance import PACKAGES, provenance
from anydepth.record import Record, RecordWriter, Sample
from anydepth.stats import compare_paired, wilson

NOISE = 0.15  # standard deviation of the noise, as a share of each matrix's own
ARMS = {
    "full": Sampling(),
    "depth-2": Sampling(depth=2),
    "interval-4": Sampling(interval=4, shallow_depth=2),
}
GROUP, PROMPTS = 8, 8  # answers a prompt, prompts a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arm", choices=ARMS, action="append", help="one or more; default: all")
    parser.add_argument("--start", type=Path, help="another checkpoint to begin with; default: OUT/start")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--split", choices=("validation", "calibration", "test"), default="validation")
    parser.add_argument("--questions", type=int, default=2160, help="held-out questions asked before and after")
    parser.add_argument("--fill", choices=("full", "deferred"), default="deferred", help="same answers, other work")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a model this small gains nothing from more
    asked.start = asked.start or damaged_nano(asked.out / "start")
    for arm in asked.arm or ARMS:
        run(arm, asked)
    print(table(asked.out))


def damaged_nano(folder: Path, *, seed: int = 0) -> Path:
    """nano with normal noise on every matrix but the gate's; the same seed gives the same weights."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    nano = load_checkpoint("nano").path
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(nano / file, folder / file)
    weights = load_file(nano / "model.safetensors")
    for name in sorted(weights):
        if weights[name].dim() == 2 and "gate." not in name:
            noise = torch.randn(weights[name].shape, generator=random)
            weights[name] = weights[name] + NOISE * weights[name].std() * noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(arm: str, asked: argparse.Namespace) -> Record:
    """Ask, train, ask again; all that is in the Record already is not done again."""
    held_out = questions(asked.split, n=asked.questions)
    llm = LLM(asked.start, fill=asked.fill, max_batch=64)
    settings = {name: value for name, value in vars(asked).items() if name not in ("out", "arm", "start")}
    settings |= {"arm": arm, "group": GROUP, "prompts": PROMPTS}
    with RecordWriter(
        asked.out / arm / "record",
        kind="train",
        settings_used=settings,
        settings_passed={},
        provenance=provenance(
            packages=(*PACKAGES, "trl", "transformers", "accelerate"),
            threads=1,
            seed=asked.seed,
            model={
                "name": f"nano with noise {NOISE}" if asked.start == asked.out / "start" else asked.start.name,
                "hash": llm.checkpoint.model_hash,
            },
        ),
    ) as record:
        answer(record, llm, held_out, arm, stage=0)
        if (f"step-{asked.steps - 1}", 0) not in record.done:
            for number, step in enumerate(train(arm, llm, asked)):
                if (f"step-{number}", 0) not in record.done:
                    record.append({"id": f"step-{number}", "answer_index": 0, **step})
        answer(record, LLM(asked.out / arm / "model", fill=asked.fill, max_batch=64), held_out, arm, stage=1)
        return record.finish(summary(record.samples))


def answer(record: RecordWriter, llm: LLM, held_out: Sequence[Question], arm: str, *, stage: int) -> None:
    """Greedy answers to the questions that have none yet; `answer_index` 0 is before training, 1 after."""
    missing = [question for question in held_out if (question.id, stage) not in record.done]
    for question, output in zip(missing, llm.generate([q.prompt for q in missing], ARMS[arm]), strict=True):
        record.append(
            {
                "id": question.id,
                "answer_index": stage,
                "score": float(grade(output.text or "", question)),
                "segments_read": output.usage.segments_read,
                "segments_executed": output.usage.segments_executed,
                "output_tokens": len(output.token_ids),
            }
        )


def train(arm: str, llm: LLM, asked: argparse.Namespace) -> list[dict[str, float]]:
    """Train into OUT/<arm>/model; what was logged of each step."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig

    from anydepth.rollout.trl import RolloutGRPOTrainer, Trainable

    folder = asked.out / arm
    shown = questions("train", n=PROMPTS * asked.steps, seed=asked.seed)
    trainer = RolloutGRPOTrainer(
        Trainable.load(asked.start),
        llm=llm,
        sampling=ARMS[arm],
        reward_funcs=Exact(),
        train_dataset=Dataset.from_list([{"prompt": q.prompt, "gold": final_answer(q.answer)} for q in shown]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(asked.start),
        args=GRPOConfig(
            str(folder / "steps"),
            num_generations=GROUP,
            per_device_train_batch_size=GROUP * PROMPTS,
            max_steps=asked.steps,
            max_completion_length=64,
            learning_rate=asked.learning_rate,
            adam_beta2=0.95,
            seed=asked.seed,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            save_steps=50,
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    saved = get_last_checkpoint(folder / "steps") if (folder / "steps").exists() else None
    trainer.train(resume_from_checkpoint=saved)
    trainer.save_model(folder / "model")
    kept = {
        "reward": "reward",
        "largest_difference": "rollout/largest_difference",
        "weight_version": "rollout/weight_version",
        "entropy": "entropy",
        "seconds": "step_time",
        "processor_s": "processor_s",
    }
    return [
        {name: line[logged] for name, logged in kept.items()} for line in trainer.state.log_history if "reward" in line
    ]


class Exact:
    """Reward 1 for the right final number, else 0. Also logs the processor time from one step to the next."""

    __name__ = "exact"

    def __init__(self) -> None:
        self.before = time.process_time()

    def __call__(self, completions: list[str], gold: list[str], log_metric: Any, **unused: Any) -> list[float]:
        now = time.process_time()
        log_metric("processor_s", now - self.before)
        self.before = now
        return [float(final_answer(said) == right) for said, right in zip(completions, gold, strict=True)]


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """What came out, from the lines of a Record."""
    steps = [line for line in samples if line["id"].startswith("step-")]
    stages = [
        {line["id"]: line for line in samples if line["answer_index"] == stage and "score" in line} for stage in (0, 1)
    ]
    n = len(stages[0])
    before, after = ([stages[stage][id]["score"] for id in stages[0]] for stage in (0, 1))
    gain = compare_paired(after, before)
    return {
        "n": n,
        "accuracy_before": sum(before) / n,
        "interval_before": wilson(sum(before), n),
        "accuracy_after": sum(after) / n,
        "interval_after": wilson(sum(after), n),
        "gain": gain.difference,
        "gain_interval": gain.interval,
        "gains": gain.gains,
        "losses": gain.losses,
        "p": gain.p,
        "segments_read_per_question": sum(line["segments_read"] for line in stages[1].values()) / n,
        "segments_executed_per_question": sum(line["segments_executed"] for line in stages[1].values()) / n,
        "tokens_per_question": sum(line["output_tokens"] for line in stages[1].values()) / n,
        "steps": len(steps),
        "seconds_per_step": median(step["seconds"] for step in steps),
        "processor_s_per_step": median(step["processor_s"] for step in steps),
        "first_difference": steps[0]["largest_difference"],
        "largest_difference": max(step["largest_difference"] for step in steps),
        "weight_versions": len({step["weight_version"] for step in steps}),
    }


def table(out: Path) -> str:
    """Markdown of all arms that are done."""
    lines = [
        "| arm | accuracy before, % | after, % | gain, points | tokens a question | segments read | executed "
        "| s a step (processor) | largest difference, first step / all |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        if (out / arm / "record" / "record.json").exists():
            record = Record.read(out / arm / "record", samples=False)
            lines += [row(arm, record.aggregates)] if record.status == "complete" else []
    return "\n".join(lines)


def row(arm: str, got: Mapping[str, Any]) -> str:
    def share(name: str, interval: str) -> str:
        low, high = got[interval]
        return f"{100 * got[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    cells = [
        arm,
        share("accuracy_before", "interval_before"),
        share("accuracy_after", "interval_after"),
        share("gain", "gain_interval"),
        f"{got['tokens_per_question']:.1f}",
        f"{got['segments_read_per_question']:.1f}",
        f"{got['segments_executed_per_question']:.1f}",
        f"{got['seconds_per_step']:.2f} ({got['processor_s_per_step']:.2f})",
        f"{got['first_difference']:.1e} / {got['largest_difference']:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
