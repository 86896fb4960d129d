"""``enable_wrap`` and ``wrap`` with a stand-in for the wrapper class."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import nn

from fullshard.wrap import enable_wrap, wrap


def test_wrap_outside_a_context_returns_the_module_itself() -> None:
    module = nn.Linear(5, 5)
    assert wrap(module, forward_prefetch=True) is module


def test_wrap_inside_a_context_wraps_with_its_arguments(unit_class: Any) -> None:
    module = nn.Linear(5, 5)
    with enable_wrap(wrapper_cls=unit_class, forward_prefetch=True, auto_wrap_policy="policy"):
        unit = wrap(module)
    assert isinstance(unit, unit_class)
    assert unit.module is module
    assert unit.arguments == {"forward_prefetch": True, "auto_wrap_policy": "policy"}


def test_arguments_of_the_call_override_those_of_the_context(unit_class: Any) -> None:
    with enable_wrap(wrapper_cls=unit_class, forward_prefetch=True, device_id=0):
        overridden = wrap(nn.Linear(5, 5), device_id=1)
        plain = wrap(nn.Linear(5, 5))
    assert overridden.arguments == {"forward_prefetch": True, "device_id": 1}
    assert plain.arguments == {"forward_prefetch": True, "device_id": 0}


def test_a_module_built_outside_stays_unwrapped_inside_what_is_wrapped_later(
    unit_class: Any,
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = wrap(nn.Linear(5, 5))

    model = Model()
    with enable_wrap(wrapper_cls=unit_class):
        unit = wrap(model)
    assert isinstance(unit, unit_class)
    assert isinstance(model.lin, nn.Linear)


def test_an_inner_context_counts_until_it_is_left(unit_class: Any) -> None:
    with enable_wrap(wrapper_cls=unit_class, level=1):
        with enable_wrap(wrapper_cls=unit_class, level=2):
            inner = wrap(nn.Linear(1, 1))
        outer = wrap(nn.Linear(1, 1))
    assert (inner.arguments, outer.arguments) == ({"level": 2}, {"level": 1})


def test_a_context_left_by_an_exception_is_left(unit_class: Any) -> None:
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=unit_class):
        raise KeyError
    assert isinstance(wrap(nn.Linear(1, 1)), nn.Linear)


def test_another_thread_is_not_wrapped_along(unit_class: Any) -> None:
    built: list[nn.Module] = []
    with enable_wrap(wrapper_cls=unit_class):
        thread = threading.Thread(target=lambda: built.append(wrap(nn.Linear(1, 1))))
        thread.start()
        thread.join()
    assert isinstance(built[0], nn.Linear)


def test_a_wrapper_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="enable_wrap expects a class"), enable_wrap(wrapper_cls=3):
        pass
