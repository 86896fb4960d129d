"""Frozen and trainable parameters in one unit: the messages, and who is told first."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
from torch import nn

from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _validate_frozen_params,
    always_wrap_policy,
    wrap_submodules,
)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class LoraAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = frozen(nn.Linear(32, 32, bias=False))
        self.lora_A = nn.Linear(32, 8, bias=False)
        self.lora_B = nn.Linear(8, 32, bias=False)
        self.k_proj = frozen(nn.Linear(32, 32, bias=False))
        self.v_proj = frozen(nn.Linear(32, 32, bias=False))
        self.o_proj = frozen(nn.Linear(32, 32, bias=False))


class LoraMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj1 = frozen(nn.Linear(32, 128, bias=False))
        self.proj2 = frozen(nn.Linear(128, 32, bias=False))


class LoraDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = LoraAttention()
        self.mlp = LoraMLP()
        self.inp_layernorm = frozen(nn.LayerNorm(32))
        self.post_attn_layernorm = frozen(nn.LayerNorm(32))


class LoraModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = frozen(nn.Embedding(100, 32))
        self.layers = nn.ModuleList([LoraDecoder() for _ in range(4)])
        self.norm = frozen(nn.LayerNorm(32))


CLASSES = (LoraAttention, LoraMLP, LoraDecoder)


def instances(model: nn.Module, *classes: type[nn.Module]) -> set[nn.Module]:
    return {module for module in model.modules() if isinstance(module, classes)}


def lists(trainable: list[str], untrained: list[str]) -> str:
    return (
        "If possible, wrap the frozen parameters with FSDP separately.\n"
        f"The following parameters have requires_grad=True:\n{trainable}\n"
        f"The following parameters have requires_grad=False:\n{untrained}"
    )


ATTENTION_LISTS = (
    ["layers.0.attn.lora_A.weight", "layers.0.attn.lora_B.weight"],
    [f"layers.0.attn.{name}_proj.weight" for name in "qkvo"],
)


def test_without_original_parameters_the_first_mixed_unit_is_an_error() -> None:
    model = LoraModel()
    with pytest.raises(ValueError) as error:
        _validate_frozen_params(model, instances(model, *CLASSES), set(), False)
    assert str(error.value) == (
        "layers.0.attn has both parameters with requires_grad=True and False. FSDP does not "
        "support wrapping such modules when use_orig_params=False. " + lists(*ATTENTION_LISTS)
    )


def test_with_original_parameters_every_mixed_unit_is_warned_about_in_order() -> None:
    model = LoraModel()
    with pytest.warns(UserWarning) as record:
        _validate_frozen_params(model, instances(model, *CLASSES), set(), True)
    messages = [str(warning.message) for warning in record]
    total, trainable = 4 * 32 * 32 + 2 * 8 * 32, 2 * 8 * 32
    assert messages[0] == (
        "layers.0.attn has both parameters with requires_grad=True and False. We do not "
        "recommend wrapping such modules since the gradient memory usage will be higher than "
        f"expected ({total} numel instead of {trainable} numel before sharding via "
        "reduce-scatter). " + lists(*ATTENTION_LISTS)
    )
    assert [message.split()[0] for message in messages] == [
        f"layers.{index}.attn" for index in range(4)
    ]


def test_children_are_told_before_their_parents() -> None:
    model = LoraModel()
    extra = nn.Linear(2, 2)
    model.layers[0].extra = extra  # the decoder is mixed too
    with pytest.warns(UserWarning) as record:
        _validate_frozen_params(model, instances(model, LoraAttention, LoraDecoder), set(), True)
    first, second = (str(warning.message) for warning in record.list[:2])
    assert first.startswith("layers.0.attn has both")
    assert second.startswith("layers.0 has both")
    assert "layers.0.attn" not in second  # those parameters are the nested unit's


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_units_of_one_kind_each_are_not_complained_about(use_orig_params: bool) -> None:
    model = LoraModel()
    units = {m for m in model.modules() if isinstance(m, (nn.Linear, LoraDecoder))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _validate_frozen_params(model, units, set(), use_orig_params)


def test_ignored_parameters_do_not_mix() -> None:
    model = LoraModel()
    ignored = {p for name, p in model.named_parameters() if "lora" in name}
    _validate_frozen_params(model, instances(model, *CLASSES), ignored, False)


def test_modules_that_are_not_wrapped_are_not_checked() -> None:
    model = LoraModel()
    _validate_frozen_params(model, instances(model, LoraMLP), set(), False)


def test_the_root_is_checked_when_it_is_among_the_modules() -> None:
    model = LoraModel()
    with pytest.raises(ValueError, match=r"The root module \(LoraModel\) has both parameters"):
        _validate_frozen_params(model, {model}, set(), False)


def nonuniform(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, LoraAttention):
        return {"forward_prefetch": True}
    return isinstance(module, CLASSES)


POLICIES = [
    ModuleWrapPolicy(CLASSES),
    CustomPolicy(lambda module: isinstance(module, CLASSES)),
    CustomPolicy(nonuniform),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_wrapping_mixed_modules_without_original_parameters_fails_before_it_begins(
    policy: Any, unit_class: Any
) -> None:
    model = LoraModel()
    message = "layers.0.attn has both parameters with requires_grad=True and False. FSDP does not"
    with pytest.raises(ValueError, match=re.escape(message)):
        wrap_submodules(model, policy, unit_class, {"use_orig_params": False})
    assert not any(isinstance(module, unit_class) for module in model.modules())


@pytest.mark.parametrize("policy", POLICIES)
def test_wrapping_mixed_modules_with_original_parameters_warns(
    policy: Any, unit_class: Any
) -> None:
    model = LoraModel()
    with pytest.warns(UserWarning) as record:
        wrap_submodules(model, policy, unit_class, {"use_orig_params": True})
    assert [str(warning.message).partition("since")[0] for warning in record] == [
        f"layers.{index}.attn has both parameters with requires_grad=True and False. "
        "We do not recommend wrapping such modules "
        for index in range(4)
    ]
    assert isinstance(model.layers[3].module.attn, unit_class)


def test_a_root_left_with_both_kinds_is_refused_too(unit_class: Any) -> None:
    model = nn.Sequential(frozen(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    policy = ModuleWrapPolicy({nn.Sequential})
    with pytest.raises(ValueError, match=r"The root module \(Sequential\) has both"):
        wrap_submodules(model, policy, unit_class, {})


def test_always_wrapping_separates_frozen_and_trainable_layers(unit_class: Any) -> None:
    model = LoraModel()
    wrap_submodules(model, always_wrap_policy, unit_class, {})
    assert isinstance(model.layers.module[0].module.attn, unit_class)
