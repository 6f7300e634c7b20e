"""A pipeline over the two nodes of a local Ray cluster."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.pipeline.making import (
    asks,
    assert_nothing_held,
    assert_same,
    engine_answers,
    made,
    outputs_of,
    prepared,
    router_of,
)

ray = pytest.importorskip("ray", reason="ray is not installed: pip install anydepth[ray]")


@pytest.fixture
def nodes():
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {"left": 1}, "include_dashboard": False, **memory},
    )
    cluster.add_node(num_cpus=1, resources={"right": 1}, **memory)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_two_nodes_answer_as_the_engine_and_one_actor_dies(tmp_path, nodes):
    manifest = made(tmp_path, ((1, 2), "ray"), ((3, 4), "ray"), heads=True, kv_pages=200)
    lost = replace(manifest, stages=(replace(manifest.stages[0], host=("nowhere",)), manifest.stages[1]))
    with pytest.raises(ValueError, match="no host with the resource 'nowhere'"):
        router_of(lost, tmp_path)
    stages = (replace(manifest.stages[0], host=("left",)), replace(manifest.stages[1], host=("right",)))
    manifest = replace(manifest, stages=stages)
    asked = asks(Random(6), 40, heads=True)
    wanted = engine_answers(manifest, asked)
    with router_of(manifest, tmp_path) as router:
        alive = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
        assert len({actor["Address"]["NodeID"] for actor in alive}) == 2, "each actor is on a node of its own"
        got = outputs_of(router.run(prepared(router, asked)))
        for id, output in got.items():
            assert_same(output, wanted[id])
        chunks = router.run(prepared(router, [([n], {"max_tokens": 100, "ignore_eos": True}) for n in range(20)]))
        first = next(chunks)
        router.replicas[0].links[1].kill()
        ended = [chunk.output for chunk in [first, *chunks] if chunk.output]
        failed = [output for output in ended if output.finish_reason == "error"]
        assert len({output.request_id for output in ended}) == 20 and 0 < len(failed) <= manifest.max_batch
        assert all("worker 2 of 2 has died" in router.reason(output.request_id) for output in failed)
        assert_nothing_held(router)
        assert router.replicas[0].restarts == 1
