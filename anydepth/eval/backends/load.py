"""From an arm to what answers its questions."""

from __future__ import annotations

from collections.abc import Sequence

from anydepth.eval.arms import Arm
from anydepth.eval.backends.base import Backend


def load_backend(
    arm: Arm,
    model: str,
    *,
    concurrency: int = 32,
    trust_remote_code: str | None = None,
    profiles: Sequence[str] | None = None,
) -> Backend:
    """The arm's backend with the model in it, for up to `concurrency` answers at a time.

    trust_remote_code: the name of the one model whose own code may run (transformers backend). profiles: of every arm
    that the backend is for, as arms name them (None: the arm's own). Raises ValueError, naming the arm, for settings of
    LLM that the backend has not, and for those that do not go together.
    """
    if profiles is None:
        profiles = [arm.profile] if arm.profile is not None else []
    try:
        return _load(arm, model, concurrency=concurrency, trust_remote_code=trust_remote_code, profiles=profiles)
    except ValueError as error:
        raise ValueError(f"arm {arm.name!r}: {error}") from error


def _load(arm: Arm, model: str, *, concurrency: int, trust_remote_code: str | None, profiles: Sequence[str]) -> Backend:
    if arm.backend == "engine":
        from anydepth.engine.llm import LLM
        from anydepth.eval.backends.engine import EngineBackend

        llm = LLM(model, max_batch=concurrency, profile=profiles, **arm.engine)
        return EngineBackend(llm, profiles=dict(zip(profiles, llm.engine.profiles, strict=True)))
    for name in ("certificate", "lateness", "batch_invariant", "heads", "profile"):
        if name in {**arm.engine, **arm.options}:
            raise ValueError(f"{name} is of the engine alone; leave it out of {arm.backend} arms")
    if arm.backend == "reference":
        from anydepth.eval.backends.reference import ReferenceBackend

        return ReferenceBackend(model, **arm.engine)
    from anydepth.eval.backends.transformers import TransformersBackend

    return TransformersBackend(model, trust_remote_code=trust_remote_code, **arm.engine)
