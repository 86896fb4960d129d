"""What a module's private state says: attributes of torch's that programs read."""

from __future__ import annotations

from typing import Any

import torch
from tests.fully_shard.side_by_side import OURS, THEIRS, build, by_block, forward_loss

from fullshard.testing import ranks


def facts(model: Any) -> list[Any]:
    """What programs read off the private states of a model, each parameter's in one tuple."""
    found: list[Any] = []
    for module in (model, model.blocks[1]):
        state = module._get_fsdp_state()
        group = state._fsdp_param_group
        mesh = group.mesh_info
        found.append((state._device, group.device, group.modules == (module,)))
        found.append((group.is_sharded, group.is_unsharded, group._reshard_after_forward))
        found.append((group._module_fqn, repr(group.mp_policy)))
        found.append((mesh.mesh.shape, mesh.shard_mesh_size, mesh.shard_mesh_rank))
        parameters: list[Any] = []
        for each in group.fsdp_params:
            place = each._module_info
            shown = getattr(place.module, place.param_name)
            dtype = None if group._module_fqn is None else each.orig_dtype
            sizes = each._orig_size, each.sharded_param.shape
            others = len(place.shared_modules)
            is_shown = each.sharded_param is shown
            parameters.append((place.param_name, each._param_fqn, sizes, others, is_shown, dtype))
        found += sorted(parameters, key=str)
    return found


@ranks(2)
def test_the_private_state_of_a_module_says_what_torchs_does() -> None:
    told_by: list[list[Any]] = []
    for api in (THEIRS, OURS):
        model: Any = build()
        model.blocks[1].up.weight.requires_grad_(False)
        model.blocks[1].norm.again = model.blocks[1].norm.weight
        by_block(mp_policy=api.MixedPrecisionPolicy(torch.bfloat16))(api, model)
        before = facts(model)
        forward_loss(model, 0).backward()
        told_by.append([*before, *facts(model)])

    assert told_by[1] == told_by[0]
