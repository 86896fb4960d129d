"""What each policy picks, asked through ``decide``."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import fullshard.wrap as wrap_package
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _Policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    decide,
    lambda_auto_wrap_policy,
    resolve_ignored,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)
        self.bn1 = nn.BatchNorm1d(10)
        self.bn2 = nn.BatchNorm2d(10)
        self.bn3 = nn.BatchNorm3d(10)
        self.sync_bn = nn.SyncBatchNorm(10)


def paths(model: nn.Module, policy: Any, **options: Any) -> list[str]:
    return [decision.path for decision in decide(model, policy, **options).decisions]


def size_based(minimum: int, **options: Any) -> Any:
    return functools.partial(size_based_auto_wrap_policy, min_num_params=minimum, **options)


def transformer() -> nn.Transformer:
    return nn.Transformer(4, 2, num_encoder_layers=2, num_decoder_layers=2, batch_first=True)


ALL_LAYERS = [f"{coder}.layers.{i}" for coder in ("encoder", "decoder") for i in range(2)]


@pytest.mark.parametrize("name", torch_wrap.__all__)
def test_every_public_name_of_torch_is_here_with_the_same_parameters(name: str) -> None:
    ours = inspect.signature(getattr(wrap_package, name))
    theirs = inspect.signature(getattr(torch_wrap, name))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_always_wrap_picks_every_module_children_first(nested_sequential: nn.Module) -> None:
    assert paths(nested_sequential, always_wrap_policy) == ["0", "1", "2.0", "2.1", "2"]


def test_the_root_is_never_among_the_decisions() -> None:
    assert paths(nn.Linear(5, 5), size_based(1)) == []
    assert paths(nn.Linear(5, 5), ModuleWrapPolicy({nn.Linear})) == []


def test_size_based_joins_modules_that_are_too_small_alone(nested_sequential: nn.Module) -> None:
    assert paths(nested_sequential, size_based(40)) == ["2"]


def test_size_based_takes_wrapped_children_out_of_the_parents_count() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(9, 10), nn.Linear(3, 3)))
    assert paths(model, size_based(100)) == ["0.0"]  # 12 are left for the parent


def test_size_based_leaves_lists_and_dicts_unwrapped() -> None:
    inside = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 5)})
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), inside])
    assert paths(model, size_based(40)) == []


def test_size_based_wraps_the_children_of_lists() -> None:
    assert paths(nn.ModuleList([nn.Linear(10, 10)]), size_based(40)) == ["0"]


def test_size_based_leaves_attention_whole() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1))
    assert paths(model, size_based(40)) == ["0"]


def test_size_based_takes_other_classes_as_leaves() -> None:
    leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES.union({nn.Linear})  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(10, 10), nn.ModuleList([nn.Linear(10, 10)]))
    assert paths(model, size_based(40, force_leaf_modules=leaves)) == []


def test_size_based_excludes_other_classes(nested_sequential: nn.Module) -> None:
    assert paths(nested_sequential, size_based(40, exclude_wrap_modules={nn.Sequential})) == []


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}),
        functools.partial(
            _or_policy,
            policies=[ModuleWrapPolicy([nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])],
        ),
        functools.partial(
            transformer_auto_wrap_policy,
            transformer_layer_cls={nn.TransformerEncoderLayer, nn.TransformerDecoderLayer},
        ),
        functools.partial(
            lambda_auto_wrap_policy,
            lambda_fn=lambda m: type(m).__name__.endswith("coderLayer"),
        ),
        CustomPolicy(lambda m: type(m).__name__.endswith("coderLayer")),
    ],
    ids=["object", "object as function", "transformer", "lambda", "custom"],
)
def test_policies_that_name_the_layers_pick_the_layers(policy: Any) -> None:
    assert paths(transformer(), policy) == ALL_LAYERS


def test_policy_objects_of_torch_are_understood() -> None:
    policy = torch_wrap.ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})
    assert paths(transformer(), policy) == ALL_LAYERS


def test_a_policy_class_of_ones_own_is_asked_once_about_the_whole_tree(
    nested_sequential: nn.Sequential,
) -> None:
    class FirstOnly(_Policy):
        def _run_policy(
            self,
            root_module: nn.Module,
            ignored_modules: set[nn.Module],
            root_kwargs: dict[str, Any],
        ) -> dict[nn.Module, dict[str, Any]]:
            return {nested_sequential[0]: {**root_kwargs, "limit_all_gathers": False}}

    (decision,) = decide(
        nested_sequential, FirstOnly(), root_arguments={"forward_prefetch": True}
    ).decisions
    assert decision.path == "0"
    assert decision.arguments == {"forward_prefetch": True, "limit_all_gathers": False}


@pytest.mark.parametrize("use_or_policy", [True, False])
def test_batch_norms_can_be_picked_by_class(use_or_policy: bool) -> None:
    policy: Any = functools.partial(_wrap_module_cls_individually, module_classes=[_BatchNorm])
    if use_or_policy:
        never = lambda *args, **kwargs: False  # noqa: E731
        policy = functools.partial(_or_policy, policies=[never, policy])
    assert paths(BatchNormNet(), policy) == ["bn1", "bn2", "bn3", "sync_bn"]


def test_or_policy_picks_inside_what_another_policy_picks() -> None:
    def container(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, BatchNormNet)

    norms = functools.partial(_wrap_module_cls_individually, module_classes=[_BatchNorm])
    both = functools.partial(_or_policy, policies=[container, norms])
    model = nn.Sequential(BatchNormNet())
    assert paths(model, both) == ["0.bn1", "0.bn2", "0.bn3", "0.sync_bn", "0"]
    assert paths(model, container) == ["0"]


def test_a_module_wrapped_by_a_policy_inherits_the_roots_arguments(
    nested_sequential: nn.Module,
) -> None:
    arguments = {"forward_prefetch": True, "auto_wrap_policy": always_wrap_policy}
    plan = decide(nested_sequential, always_wrap_policy, root_arguments=arguments)
    assert all(d.arguments == {"forward_prefetch": True} for d in plan.decisions)


def test_custom_policy_overrides_the_roots_arguments_for_one_module(
    nested_sequential: nn.Sequential,
) -> None:
    def pick(module: nn.Module) -> bool | dict[str, Any]:
        if module is nested_sequential[0]:
            return {"forward_prefetch": False, "device_id": 1}
        return module is nested_sequential[1]

    plan = decide(nested_sequential, CustomPolicy(pick), root_arguments={"forward_prefetch": True})
    first, second = plan.decisions
    assert first.arguments == {"forward_prefetch": False, "device_id": 1}
    assert second.arguments == {"forward_prefetch": True}


def test_custom_policy_takes_an_empty_dict_for_no(nested_sequential: nn.Module) -> None:
    assert paths(nested_sequential, CustomPolicy(lambda module: {})) == []


@pytest.mark.parametrize("answer", [None, 3, "yes"])
def test_custom_policy_refuses_other_answers(answer: Any, nested_sequential: nn.Module) -> None:
    with pytest.raises(ValueError, match="should return False/True or a kwarg dict"):
        decide(nested_sequential, CustomPolicy(lambda module: answer))


def test_a_policy_function_is_told_what_is_in_no_nested_unit_yet(
    nested_sequential: nn.Module,
) -> None:
    asked: list[tuple[str, bool, int]] = []

    def only_sequential(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or isinstance(module, nn.Sequential)

    decide(nested_sequential, only_sequential)
    assert [a for a in asked if a[1]] == [
        ("Sequential", True, 120),
        ("Linear", True, 30),
        ("Linear", True, 30),
        ("Sequential", True, 60),
        ("Linear", True, 30),
        ("Linear", True, 30),
    ]
    assert [a for a in asked if not a[1]] == [("Linear", False, 30)] * 4 + [
        ("Sequential", False, 60)
    ]


def test_a_module_that_a_policy_does_not_look_into_is_not_wrapped_either(
    nested_sequential: nn.Sequential,
) -> None:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not (recurse and module is nested_sequential[2])

    assert paths(nested_sequential, policy) == ["0", "1"]


def test_ignored_modules_are_neither_asked_about_nor_counted(
    nested_sequential: nn.Sequential,
) -> None:
    ignored = resolve_ignored(nested_sequential, [nested_sequential[1], nested_sequential[2][0]])
    assert paths(nested_sequential, size_based(40), ignored=ignored) == []
    assert paths(nested_sequential, ModuleWrapPolicy({nn.Linear}), ignored=ignored) == ["0", "2.1"]


@pytest.mark.parametrize(
    "make",
    [
        lambda name: ModuleWrapPolicy({name}),
        lambda name: ModuleWrapPolicy(name),
        lambda name: decide(
            transformer(),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={name}),
        ),
        lambda name: decide(transformer(), size_based(0, force_leaf_modules={name})),
    ],
)
def test_a_class_given_by_its_name_is_refused_with_advice(make: Any) -> None:
    with pytest.raises(TypeError, match=r"the string 'Block'. Pass the class itself"):
        make("Block")


def test_a_module_given_as_class_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"an instance of Linear. Pass its class"):
        ModuleWrapPolicy({nn.Linear(1, 1)})  # type: ignore[arg-type]


def test_one_class_needs_no_set_around_it(nested_sequential: nn.Module) -> None:
    assert paths(nested_sequential, ModuleWrapPolicy(nn.Sequential)) == ["2"]  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [3, nn.Linear, {nn.Linear}, ModuleWrapPolicy])
def test_what_is_no_policy_is_refused_with_advice(
    policy: Any, nested_sequential: nn.Module
) -> None:
    with pytest.raises(TypeError, match=r"auto_wrap_policy expects .* but got"):
        decide(nested_sequential, policy)


def test_a_module_wrap_policy_prints_its_classes() -> None:
    policy = ModuleWrapPolicy({nn.Linear, nn.Conv2d})
    assert repr(policy) == "ModuleWrapPolicy({Conv2d, Linear})"
