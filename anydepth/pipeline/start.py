"""Where workers come from: a link for every stage of every replica, as the manifest places it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anydepth.pipeline.links import Actor, Here, Hub, Link, Process
from anydepth.pipeline.manifest import Manifest
from anydepth.pipeline.serve import Order


class Starter:
    """Starts workers, and knows those that are there. With a stage on Ray it connects to the cluster, a local one where
    this process is in none; ValueError for a host that the cluster has not."""

    def __init__(self, manifest: Manifest, artifacts: str | Path) -> None:
        self.manifest, self._artifacts = manifest, str(Path(artifacts).expanduser().resolve())
        self._links: dict[tuple[int, int], Link] = {}
        self._hub = self._open_hub()

    def start(self, number: int, stage: int, put: Callable[[Any], None]) -> Link:
        """The worker of a stage of replica `number`, in the place of the one before; `put` takes what it says."""
        manifest, place = self.manifest, self.manifest.stages[stage]
        order = Order(
            artifacts=self._artifacts,
            segments=place.segments,
            dtype=manifest.dtype,
            device=place.device[number],
            slots=manifest.max_batch,
            pages=manifest.pages,
            page_size=manifest.page_size,
            fill=manifest.fill,
            threads=manifest.threads,
        )
        link: Link
        if place.place == "here":
            link = Here(order, put, self._hub)
        else:
            assert self._hub is not None
            if place.place == "process":
                link = Process(order, put, self._hub)
            else:
                link = Actor(order, put, self._hub, place.host[number] if place.host else None)
        self._links[number, stage] = link
        return link

    def close(self) -> None:
        """End all workers."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._hub is not None:
            self._hub.close()

    def _open_hub(self) -> Hub | None:
        places = {stage.place for stage in self.manifest.stages}
        if "ray" not in places:
            return Hub(None) if "process" in places else None
        import ray

        if not ray.is_initialized():
            ray.init()
        known = ray.cluster_resources()
        for host in {host for stage in self.manifest.stages for host in stage.host}:
            if host not in known:
                raise ValueError(f"the Ray cluster has no host with the resource {host!r}; it has: {', '.join(known)}")
        return Hub(ray.util.get_node_ip_address())
