"""The models of torch's own FSDP tests, in torch's own comparison with DDP, on fullshard."""

from __future__ import annotations

from typing import Any

import pytest
from tests.compat.installed import installed

import fullshard
from fullshard.testing import device, ranks

pytest.importorskip("expecttest", reason="torch's test models import it")

MODELS = [
    "TransformerWithSharedParams",
    "NestedWrappedModule",
    "NestedWrappedModuleWithDelay",
    "AlwaysWrapNestedWrappedModule",
    "NonUniformReqGradNWM",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "original parameters": {"use_orig_params": True},
    "gradients only": {"sharding_strategy": fullshard.ShardingStrategy.SHARD_GRAD_OP},
    "no sharding": {"sharding_strategy": fullshard.ShardingStrategy.NO_SHARD},
    "prefetch, offload": {
        "forward_prefetch": True,
        "backward_prefetch": fullshard.BackwardPrefetch.BACKWARD_PRE,
        "cpu_offload": fullshard.CPUOffload(offload_params=True),
    },
}


def compare_with_ddp(model: str, **options: Any) -> None:
    """Run torch's comparison: it trains both, saves and loads in between, and compares them."""
    from torch.testing._internal import common_fsdp

    class Comparison(common_fsdp.FSDPTest):
        def runTest(self) -> None:
            """Makes the class one that can be instantiated."""

    assert common_fsdp.FSDP is fullshard.FullyShardedDataParallel
    if device().type == "cpu":
        mode = common_fsdp.DEVICEInitMode.DEVICE_NEVER
    else:
        mode = common_fsdp.DEVICEInitMode.DEVICE_BEFORE
    Comparison()._test_fsdp_parity(
        getattr(common_fsdp, model), common_fsdp.FSDPInitMode.RECURSIVE, mode, **options
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
@ranks(2)
def test_models_of_torchs_tests_train_as_under_ddp(model: str, options: str) -> None:
    chosen = dict(OPTIONS[options])
    if model == "NonUniformReqGradNWM":
        chosen["use_orig_params"] = True  # frozen beside trainable parameters
    with installed():
        compare_with_ddp(model, **chosen)


@pytest.mark.parametrize("options", OPTIONS)
@ranks(2)
def test_experts_that_each_rank_has_for_itself_train_as_without_sharding(options: str) -> None:
    def own_reduction(module: Any) -> Any:
        from torch.testing._internal.common_fsdp import DummyDDP

        return DummyDDP(module)  # the model reduces the gradients of what is not an expert itself

    with installed():
        compare_with_ddp("MixtureOfExperts", ref_init_fn=own_reduction, **OPTIONS[options])
