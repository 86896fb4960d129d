"""Where parameters lie in a flat buffer: the worked examples, and a handle made directly."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import ShardingStrategy
from fullshard.engine.params.handle import (
    FlatParameter,
    FlatParamHandle,
    HandleShardingStrategy,
)
from fullshard.engine.params.layout import FlatParamShardMetadata, Layout, alignment_elements
from fullshard.testing import device, ranks

LINEARS = ((7, 3), (5, 7), (5, 5))


def linears(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(i, o, bias=False, device=device()) for o, i in sizes))


def handle_for(module: nn.Module, parameters: list[Any] | None = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "device": device(),
        "sharding_strategy": HandleShardingStrategy.FULL_SHARD,
        "offload_params": False,
        "mp_param_dtype": None,
        "mp_reduce_dtype": None,
        "keep_low_precision_grads": False,
        "process_group": dist.group.WORLD,
        "use_orig_params": False,
        "fsdp_extension": None,
    }
    parameters = list(module.parameters()) if parameters is None else parameters
    return FlatParamHandle(parameters, module, **{**arguments, **changes})


def metadata(handle: Any, first: int, last: int) -> FlatParamShardMetadata:
    handle.flat_param._shard_param_infos = handle._get_shard_metadata(first, last)
    found: FlatParamShardMetadata = handle.shard_metadata()
    return found


def assert_metadata(found: FlatParamShardMetadata, names: str, *rest: Any) -> None:
    # Users compare with lists as well as with tuples.
    assert list(found.param_names) == [f"{name}.weight" for name in names]
    shapes, offsets = rest
    assert [tuple(shape) for shape in found.param_shapes] == shapes
    assert list(found.param_numels) == [shape[0] * shape[1] for shape in shapes]
    assert list(found.param_offsets) == offsets


def transformer(shared: bool) -> nn.Transformer:
    module = nn.Transformer(
        16, nhead=2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=24
    ).to(device())
    if shared:
        for encoder, decoder in zip(module.encoder.layers, module.decoder.layers, strict=True):
            decoder.linear1.weight = encoder.linear1.weight
            decoder.linear2.weight = encoder.linear2.weight
    return module


@ranks(1)
def test_full_precision_parameters_are_padded_to_four_elements() -> None:
    handle = handle_for(linears(*LINEARS), use_orig_params=True)

    # 21 + (3) + 35 + (1) + 25
    assert handle.flat_param.numel() == 85
    assert_metadata(metadata(handle, 0, 42), "01", [(7, 3), (5, 7)], [(0, 20), (0, 18)])
    assert_metadata(metadata(handle, 43, 85), "12", [(5, 7), (5, 5)], [(19, 34), (0, 24)])


@ranks(1)
def test_parameters_computing_in_16_bits_are_padded_to_eight_elements() -> None:
    module = linears((5, 2), (5, 5), (3, 5))
    handle = handle_for(module, use_orig_params=True, mp_param_dtype=torch.float16)

    # 10 + (6) + 25 + (7) + 15
    assert handle.flat_param.numel() == 63
    assert_metadata(metadata(handle, 0, 31), "01", [(5, 2), (5, 5)], [(0, 9), (0, 15)])
    assert_metadata(metadata(handle, 32, 63), "12", [(5, 5), (3, 5)], [(16, 24), (0, 14)])


@ranks(1)
def test_without_original_parameters_there_is_no_padding() -> None:
    handle = handle_for(linears(*LINEARS))

    # 21 + 35 + 25 = 81: element 42 is the last of 1.weight's first 22.
    assert handle.flat_param.numel() == 81
    assert_metadata(metadata(handle, 0, 42), "01", [(7, 3), (5, 7)], [(0, 20), (0, 21)])
    assert_metadata(metadata(handle, 43, 80), "12", [(5, 7), (5, 5)], [(22, 34), (0, 24)])


@ranks(1)
def test_a_range_of_padding_only_touches_no_parameter() -> None:
    handle = handle_for(linears(*LINEARS), use_orig_params=True)

    assert metadata(handle, 21, 23) == FlatParamShardMetadata((), (), (), ())


@ranks(1)
def test_a_range_inside_one_parameter_names_that_one_only() -> None:
    handle = handle_for(linears(*LINEARS), use_orig_params=True)

    assert_metadata(metadata(handle, 24, 24), "1", [(5, 7)], [(0, 0)])
    assert_metadata(metadata(handle, 30, 58), "1", [(5, 7)], [(6, 34)])


@ranks(2)
def test_a_rank_describes_the_shard_that_it_owns() -> None:
    handle = handle_for(linears(*LINEARS), use_orig_params=True)

    handle.shard()

    # 85 elements and one of tail padding: 43 for each rank.
    assert handle.flat_param.numel() == 43
    expected = [
        ("01", [(7, 3), (5, 7)], [(0, 20), (0, 18)]),
        ("12", [(5, 7), (5, 5)], [(19, 34), (0, 24)]),
    ]
    assert_metadata(handle.shard_metadata(), *expected[dist.get_rank()])


@pytest.mark.parametrize("half", [False, True])
@ranks(1)
def test_an_empty_list_cannot_be_flattened(half: bool) -> None:
    module = transformer(shared=False)
    module = module.half() if half else module

    with pytest.raises(
        ValueError, match="Cannot construct a FlatParamHandle with an empty parameter list"
    ):
        handle_for(module, [])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("half", [False, True])
@ranks(1)
def test_a_flat_parameter_has_as_many_elements_as_the_parameters(shared: bool, half: bool) -> None:
    module = transformer(shared)
    module = module.half() if half else module
    # Shared parameters are yielded once.
    expected = sum(p.numel() for p in module.parameters())

    handle = handle_for(module)

    assert handle.flat_param.numel() == expected
    assert handle.flat_param.dtype == (torch.float16 if half else torch.float32)


@ranks(1)
def test_a_parameter_given_twice_lies_in_the_buffer_once() -> None:
    module = linears((3, 3))

    handle = handle_for(module, [module[0].weight, module[0].weight])

    assert handle.flat_param.numel() == 9


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(1)
def test_a_flat_parameter_describes_the_originals(use_orig_params: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)).to(device())
    originals = list(module.parameters())
    values = [p.detach().clone() for p in originals]

    flat = handle_for(module, use_orig_params=use_orig_params).flat_param

    assert isinstance(flat, FlatParameter)
    assert not isinstance(nn.Parameter(torch.ones(1)), FlatParameter)
    assert flat._fqns == ("0.weight", "0.bias", "1.weight")
    assert flat._shapes == ((5, 3), (5,), (2, 5))
    assert flat._numels == (15, 5, 10)
    if use_orig_params:
        assert all(a is b for a, b in zip(flat._params, originals, strict=True))
        # 15 + (1) + 5 + (3) + 10
        starts = (0, 16, 24)
    else:
        assert flat._params is None
        starts = (0, 15, 20)
    for start, value in zip(starts, values, strict=True):
        assert torch.equal(flat.detach()[start : start + value.numel()], value.flatten())


@ranks(1)
def test_parameters_of_several_dtypes_do_not_fit_one_buffer() -> None:
    module = linears((3, 3), (3, 3))
    module[1].double()

    with pytest.raises(ValueError, match="uniform dtype"):
        handle_for(module, use_orig_params=True)


@ranks(1)
def test_a_parameter_of_another_module_is_refused() -> None:
    with pytest.raises(ValueError, match="not part of Sequential"):
        handle_for(linears((3, 3)), [nn.Parameter(torch.ones(2, device=device()))])


@ranks(2)
def test_nothing_is_cut_under_no_shard() -> None:
    handle = handle_for(linears(*LINEARS), sharding_strategy=ShardingStrategy.NO_SHARD)

    handle.shard()

    assert handle.flat_param.numel() == 81


@pytest.mark.parametrize(("itemsize", "elements"), [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)])
def test_alignment_is_sixteen_bytes(itemsize: int, elements: int) -> None:
    assert alignment_elements(itemsize) == elements


def test_ranks_own_the_pieces_that_the_picture_shows() -> None:
    layout = Layout.pack(
        ["a", "b", "c"],
        LINEARS,
        [(3, 1), (7, 1), (5, 1)],
        world_size=2,
        alignment=4,
    )

    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (85, 43, 86)
    assert [slot.offset for slot in layout.slots] == [0, 24, 60]
    assert layout.gaps() == ((21, 24), (59, 60), (85, 86))
    # (in_shard, offset in the shard, start in the parameter, elements)
    assert layout.pieces(0) == ((True, 0, 0, 21), (True, 24, 0, 19), (False, 0, 0, 0))
    assert layout.pieces(1) == ((False, 0, 0, 0), (True, 0, 19, 16), (True, 17, 0, 25))


def test_metadata_of_lists_equals_metadata_of_tuples() -> None:
    ours = FlatParamShardMetadata(("a",), (torch.Size((2, 3)),), (6,), ((0, 5),))
    listed: Any = FlatParamShardMetadata(["a"], [(2, 3)], [6], [(0, 5)])  # type: ignore[arg-type]
    other: Any = FlatParamShardMetadata(["a"], [(2, 3)], [6], [(0, 4)])  # type: ignore[arg-type]

    assert ours == listed
    assert hash(ours) == hash(listed)
    assert ours != other
    assert ours == (("a",), ((2, 3),), (6,), ((0, 5),))
    assert ours != ["a"]


def test_metadata_has_the_fields_of_torch_in_its_order() -> None:
    from torch.distributed.fsdp import _flat_param

    torchs = _flat_param.FlatParamShardMetadata._fields
    # Versions of torch before 2.13 may have some of them only.
    assert [name for name in FlatParamShardMetadata._fields if name in torchs] == list(torchs)


def test_metadata_without_strides_equals_metadata_with_any() -> None:
    four = {
        "param_names": ("a",),
        "param_shapes": (torch.Size((2, 3)),),
        "param_numels": (6,),
        "param_offsets": ((0, 5),),
    }
    older = FlatParamShardMetadata(**four)
    rows = FlatParamShardMetadata(**four, param_strides=((3, 1),), param_contiguities=(True,))
    columns = FlatParamShardMetadata(**four, param_strides=((1, 2),), param_contiguities=(False,))

    assert older == rows
    assert older == columns
    assert rows != columns
    assert hash(older) == hash(rows) == hash(columns)
    assert tuple(older) == tuple(rows)
    assert rows == (("a",), ((2, 3),), ((3, 1),), (True,), (6,), ((0, 5),))
    assert pickle.loads(pickle.dumps(older)) == columns
    with pytest.raises(TypeError, match="lacks param_numels"):
        FlatParamShardMetadata(("a",), ((2, 3),), param_offsets=((0, 5),))


@ranks(2)
def test_metadata_tells_how_a_parameter_lay_in_memory() -> None:
    module = nn.Conv2d(3, 4, 2, bias=False, device=device()).to(memory_format=torch.channels_last)
    stride = module.weight.stride()
    found = handle_for(module).shard_metadata()

    assert found.param_strides == (stride,)
    assert found.param_contiguities == (False,)
    assert handle_for(linears((7, 3))).shard_metadata().param_contiguities == (True,)
