"""Exit heads with their profiles, certificate and manifest as one folder, complete and checked: `export_heads`.

Imports no torch when it is loaded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from anydepth.certificate import FILE as CERTIFICATE
from anydepth.certificate import Certificate
from anydepth.models.heads_about import ABOUT, FILE, read_about
from anydepth.pipeline.manifest import manifest_text, read_manifest
from anydepth.profile import FOLDER, Profile, profile_path
from anydepth.provenance import source
from anydepth.publish.card import hashes_text, use_text
from anydepth.publish.folder import write_folder
from anydepth.record import files_hash, read_versioned
from anydepth.train.head_card import head_card

CARD, MANIFEST = "README.md", "manifest.toml"
_CALIBRATION = 1  # version
_FILE_NAME = re.compile(r"[^./\\][^/\\]*")


def export_heads(
    heads: str | Path,
    out: str | Path,
    *,
    profiles: Sequence[str | Path] = (),
    certificate: str | Path | None = None,
    calibrations: Sequence[str | Path] = (),
    manifest: str | Path | None = None,
) -> Path:
    """Write the folder `out` that `LLM(model, heads=out, profile=name)` loads, with a model card, and return it.

    profiles: by path, or by name in the heads' own folder of them; all of those if left out. calibrations: files
    calibration.json, from which the card has what was measured. manifest: of a pipeline; in `out` its heads are these.
    The same files give the same bytes. `out` may be new, empty or an earlier export; it appears whole or not at all.

    ValueError, before anything is written, for what does not belong together: profiles, certificate or calibration of
    another backbone or other heads, profiles with exits where no head reads, a certificate whose profiles are not among
    them as they were certified, a manifest without a segment that ends where a head reads, heads without a training.
    """
    folder = Path(heads).expanduser()
    about = read_about(folder)
    kept = _Heads.of(folder, about, folder / FILE)
    chosen = _profiles(folder, profiles, kept)
    found = [profile for profile, _ in chosen.values()]
    shown = None if certificate is None else _certificate(Path(certificate).expanduser(), found, kept)
    measured = [_calibration(Path(path).expanduser(), found, kept) for path in calibrations]

    files: dict[str, bytes | Path] = {FILE: folder / FILE}
    files |= {f"{FOLDER}/{name}.toml": path.read_bytes() for name, (_, path) in chosen.items()}
    if certificate is not None:
        files[CERTIFICATE] = Path(certificate).expanduser().read_bytes()
    if manifest is not None:
        files[MANIFEST] = _manifest(manifest, kept)
    last = {ABOUT: (folder / ABOUT).read_bytes()}  # without it there are no heads to load
    hashes = {name: kept.hash if isinstance(what, Path) else _sha256(what) for name, what in (files | last).items()}
    try:
        use = use_text(
            about["base"],
            found,
            calibrations=measured,
            certificate=shown,
            manifest=MANIFEST if MANIFEST in files else None,
        )
        card = head_card(
            about,
            model_hash=kept.model_hash,
            kinds={int(n): kind for n, kind in about["exits"].items() if kind is not None},
            numbers=kept.numbers,
            file=folder / FILE,
            use=use,
            others="what is listed under Hashes",
        )
    except KeyError as error:
        raise ValueError(
            f"{folder / ABOUT} lacks {error}, so that there can be no complete card; give heads that anydepth train "
            f"heads made, and calibrations of this version"
        ) from error
    whole_card = f"{card}\n{hashes_text(kept.model_hash, hashes)}".encode()
    files[CARD] = whole_card
    marker = {"version": 1, "anydepth": source(), "files": hashes | {CARD: _sha256(whole_card)}}
    return write_folder(Path(out).expanduser().resolve(), files | last, marker)


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """What other files must fit. `exits`: layers; `probes`: those with a probe; `numbers`: how many the file holds."""

    model_hash: str
    hash: str
    exits: tuple[int, ...]
    probes: frozenset[int]
    numbers: int

    @classmethod
    def of(cls, folder: Path, about: Mapping[str, Any], file: Path) -> _Heads:
        if (found := files_hash([file])) != about["sha256"]:
            raise ValueError(f"{file} is not the file that heads.json describes (its sha256 differs); get both again")
        numbers, probes = 0, set()
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    part = tensors.get_slice(name)
                    size = 1
                    for length in part.get_shape():
                        size *= length
                    numbers += size if "F" in part.get_dtype() else 0
                    if name.endswith(".probe.weight"):
                        probes.add(int(name.split(".")[1]))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read ({error}); train the heads again") from error
        exits = tuple(sorted(map(int, about["exits"])))
        return cls(
            model_hash=str(about["model_hash"]), hash=found, exits=exits, probes=frozenset(probes), numbers=numbers
        )

    def check(self, what: str, *, model_hash: Any, head_hash: Any) -> None:
        """ValueError for what was made with others."""
        for name, theirs, mine in (("backbone", model_hash, self.model_hash), ("heads", head_hash, self.hash)):
            if theirs != mine:
                raise ValueError(
                    f"{what} is of {name} {str(theirs)[:16]}, these are {mine[:16]}; give the one of these"
                )


def _profiles(folder: Path, names: Sequence[str | Path], heads: _Heads) -> dict[str, tuple[Profile, Path]]:
    """Profiles and their files by name, in order of name."""
    found = dict[str, tuple[Profile, Path]]()
    for path in [profile_path(name, folder) for name in names] or sorted((folder / FOLDER).glob("*.toml")):
        profile = Profile.read(path)
        profile.check_hashes(model_hash=heads.model_hash, head_hash=heads.hash)
        profile.check_exits(heads.exits)
        if no_probe := [e.layer for e in profile.exits if not e.has_confidence and e.layer not in heads.probes]:
            raise ValueError(f"{path} asks a probe after layers {no_probe}, where the heads have none")
        if profile.name in found:
            raise ValueError(f"{found[profile.name][1]} and {path} are both named {profile.name!r}; give one of them")
        if not _FILE_NAME.fullmatch(profile.name):
            raise ValueError(
                f"{path}: name is {profile.name!r}; to be a file's it must have no slash and no leading dot"
            )
        found[profile.name] = profile, path
    return dict(sorted(found.items()))


def _certificate(path: Path, profiles: Sequence[Profile], heads: _Heads) -> Certificate:
    certificate, named = Certificate.read(path), {profile.name: profile for profile in profiles}
    heads.check(f"the certificate {path}", model_hash=certificate.model_hash, head_hash=certificate.head_hash)
    if (segments := certificate.policy["segments"]) != len(heads.exits) + 1:
        raise ValueError(f"{path} is for {segments} segments; these heads make {len(heads.exits) + 1}")
    for setting, point in zip(certificate.grid, certificate.points, strict=True):
        name = setting.get("profile")
        if name is not None and name not in named:
            raise ValueError(f"{path} tried profile {name!r}, which is not among {sorted(named)}; export it, too")
        if name is not None and point.get("profile_hash") not in (None, named[name].hash):
            raise ValueError(f"profile {name!r} was changed after {path} was made; get it again, or calibrate again")
    return certificate


def _calibration(path: Path, profiles: Sequence[Profile], heads: _Heads) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no {path}; anydepth calibrate writes calibration.json")
    content = read_versioned(path, what="no calibration", version=_CALIBRATION)
    heads.check(f"the calibration {path}", model_hash=content.get("model_hash"), head_hash=content.get("head_hash"))
    told = {profile: content.get("profiles", {}).get(profile.name) for profile in profiles}
    if not any(told.values()):
        raise ValueError(f"{path} has none of the profiles {[profile.name for profile in profiles]}; leave it out")
    for profile, facts in told.items():
        if facts is not None and facts.get("hash") != profile.hash:
            raise ValueError(f"{path} is of another profile {profile.name!r}; calibrate again, or export that one")
    return content


def _manifest(path: str | Path, heads: _Heads) -> bytes:
    """As it is to be read from the folder of the heads."""
    manifest = read_manifest(path)
    if missing := [layer for layer in heads.exits if layer not in manifest.segments[:-1]]:
        raise ValueError(
            f"{path}: the heads read after layers {missing}, where none of its inner segments ends "
            f"({list(manifest.segments)}); give segments that end there"
        )
    return manifest_text(replace(manifest, heads=".")).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
