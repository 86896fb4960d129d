"""DTensor parameters, sharded: training on two mesh dimensions equals the bare model's."""

from __future__ import annotations

import pytest
from tests.engine.models import make
from tests.engine.parity import adam, train, train_alone
from tests.engine.tensor_parallel import Tokens, mesh_of, sharded
from tests.original.training import MODES
from torch.distributed.device_mesh import DeviceMesh

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import ranks


def assert_trains(mesh: DeviceMesh, model: FSDP, case: object, tolerance: float = 1e-9) -> None:
    """Losses and full parameters are those of the bare model on the batches of all ranks."""
    others = [mesh[name] for name in ("copies", "dp") if name in mesh.mesh_dim_names]
    size, rank = 1, 0
    for other in others:
        size, rank = size * other.size(), rank * other.size() + other.get_local_rank()
    expected = train_alone(make(Tokens), adam, world_size=size, rank=rank)
    found = train(model, adam(model.parameters()), rank=rank)
    found.assert_close(expected, case, tolerance)


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@ranks(4)
def test_a_tensor_parallel_model_trains_as_the_bare_one(kind: str) -> None:
    mesh = mesh_of(2, 2)
    for strategy, use_orig_params in [*MODES, (ShardingStrategy.NO_SHARD, False)]:
        for blocks in (True, False):
            model = sharded(mesh, strategy, kind, blocks, use_orig_params=use_orig_params)
            assert_trains(mesh, model, (strategy, use_orig_params, blocks))
