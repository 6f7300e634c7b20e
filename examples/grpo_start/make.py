"""How the checkpoint in this folder was made: nano's training stopped when it could do about half of the questions.

python examples/grpo_start/make.py WORK    # 10 minutes on one core; writes WORK and, in float16, this folder
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from anydepth.train.loop import train_loop
from anydepth.train.recipe import Recipe

# nano's own recipe, but phase A ends as soon as it has reached its last level, and B and C nearly at once.
RECIPE = Recipe(cap_a=700, end_steps=(1, 1), steps_b=120, steps_c=1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    made, here = train_loop(Path(sys.argv[1]), seed=0, processes=1, recipe=RECIPE), Path(__file__).parent
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.json"):
        (here / name).write_bytes((made / name).read_bytes())
    halves = {name: tensor.half() for name, tensor in load_file(made / "model.safetensors").items()}
    save_file(halves, here / "model.safetensors", metadata={"format": "pt"})
