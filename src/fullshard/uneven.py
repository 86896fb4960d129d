"""Training on uneven numbers of batches: the wrapper as torch's ``Join`` sees it.

A rank without data still holds shards, for which the others need it and which it has to step: so
``Join`` is given the optimizers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from .engine.comm.collectives import Group, group_for
from .engine.grads.gradients import IN_BACKWARD
from .engine.join.following import Follower
from .engine.join.gradient_marks import Since
from .engine.join.joining import Joining
from .engine.runtime.forward import Schedule
from .engine.runtime.unit import Unit

#: Entries of an optimizer's parameter group that are not options.
_NOT_OPTIONS = ("params", "param_names")
_MISSING = object()


class UnevenInputs(nn.Module):
    """What ``torch.distributed.algorithms.join.Join`` asks of a model.

    >>> with Join([model], optimizer=optimizer):
    ...     for batch in batches:
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    """

    _schedule: Schedule | None
    _unit: Unit
    #: Made by :meth:`join_hook`; until the context ends.
    _joined: _Joined | None = None

    if TYPE_CHECKING:

        def check_is_root(self) -> bool: ...
        def clip_grad_norm_(self, max_norm: Any, norm_type: float = 2.0) -> torch.Tensor: ...
        def _start(self) -> Schedule: ...

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does that has run out of data.

        ``Join`` hands on its own keyword arguments: ``optimizer``, one or several, that train the
        model, or None if nothing is trained; ``lr_scheduler``, one or several, where the optimizers
        have any; and ``divide_by_initial_world_size``, by default True: gradients are divided by
        the number of ranks, otherwise by the number of those that still have data.
        """
        if not self.check_is_root():
            raise ValueError(
                "Join expects the outermost wrapped model, but got a unit inside of it"
            )
        optimizers = _optimizers(self, kwargs.get("optimizer", _MISSING))
        schedulers = _schedulers(optimizers, kwargs.get("lr_scheduler", _MISSING))
        if self._joined is not None:
            self._joined.leave()
        self._joined = _Joined(
            self, optimizers, schedulers, bool(kwargs.get("divide_by_initial_world_size", True))
        )
        return _JoinHook(self._joined)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` counts ranks."""
        return self._unit.device

    @property
    def join_process_group(self) -> Any:
        """Where ``Join`` counts ranks: among all that share the model."""
        if self._joined is None:
            return _all_ranks(self._unit).group
        return self._joined.joining.counting_group


class _JoinHook(JoinHook):
    """Held by ``Join`` alone, which tells nobody of an exception that ends its context.

    But it is gone then, and this with it.
    """

    def __init__(self, joined: _Joined) -> None:
        super().__init__()
        self._joined = joined

    def main_hook(self) -> None:
        """Take part in one step of the ranks that have data."""
        try:
            self._joined.follow()
        except BaseException:
            # The exception keeps Join for as long as it is looked at.
            self._joined.abandon()
            raise

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out of data."""
        self._joined.end(is_last_joiner)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._joined.abandon()


class _Joined:
    """A model in a ``Join``."""

    def __init__(
        self,
        model: UnevenInputs,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        by_initial: bool,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._schedule = model._schedule or model._start()
        self._has_left = False
        self.joining = Joining(
            _all_ranks(model._unit),
            self._schedule.units,
            self._notify,
            self.leave,
            not by_initial,
            [[p for group in o.param_groups for p in group["params"]] for o in optimizers],
            None if optimizers else _not_trained(model, ()),
        )
        self._schedule.join(self.joining)
        self._follower = Follower(self._schedule, self._obey)
        #: What was done to the gradients that an optimizer is stepping with, by its number.
        self._since: dict[int, Since | None] = {}
        self._hooks = [
            handle
            for number, optimizer in enumerate(optimizers)
            for handle in (
                optimizer.register_step_pre_hook(functools.partial(self._before_step, number)),
                optimizer.register_step_post_hook(functools.partial(self._after_step, number)),
            )
        ]

    # -- with data ----------------------------------------------------------------------------

    def _notify(self) -> Any:
        config: Any = self._model._join_config
        if not config.enable:
            self.leave()
            return None
        if not config.is_first_joinable:
            raise RuntimeError(
                "The wrapped model has to be the first in Join's list, and the only one of "
                "fullshard's there: ranks without data follow one model"
            )
        joinable: Any = self._model
        return Join.notify_join_context(joinable)

    def _before_step(self, number: int, *_: Any) -> None:
        self._since[number] = self.joining.since_backward(number)

    def _after_step(
        self, number: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        self.joining.stepped.add(number)
        since = self._since.pop(number, None)
        if args or kwargs:
            # A closure ran forward and backward inside of the step.
            since = self.joining.since_backward(number)
        self.joining.tell_of_step(number, _options(optimizer), since)

    # -- without ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Take part in one step of the ranks that have data."""
        self._follower.follow(self.joining)

    def _obey(self, verb: str, detail: Any) -> None:
        if verb == "clip":
            self._model.clip_grad_norm_(*detail)
        elif verb == "gradients":
            self._clear_gradients(detail)
        elif verb == "step":
            number, options, without_gradients = detail
            optimizer = self._optimizers[number]
            if without_gradients:
                optimizer.zero_grad()
            _take_options(optimizer, options)
            optimizer.step()
        else:
            raise AssertionError(f"No such word: {verb}")

    def _clear_gradients(self, others: dict[int, Since]) -> None:
        """Do to gradients what ``others`` have done since the last backward, by optimizer."""
        for number, since in others.items():
            stepped = number in self.joining.stepped
            if since is Since.REMOVED or (since is Since.UNKNOWN and stepped):
                self._optimizers[number].zero_grad()
            elif since is Since.ZEROED:
                self._optimizers[number].zero_grad(set_to_none=False)
        self.joining.stepped.clear()

    def end(self, is_last_joiner: bool) -> None:
        """All ranks have run out of data: take over what the last of them did in the end.

        That is to learning rates, and to the gradients of the last step.
        """
        facts = (
            [_options(optimizer) for optimizer in self._optimizers],
            [scheduler.state_dict() for scheduler in self._schedulers],
            self.joining.became_of_gradients(),
        )
        found = self.joining.exchange(facts if is_last_joiner else None)
        if not is_last_joiner:
            options, states, since = next(facts for facts in found if facts is not None)
            self._clear_gradients(since)
            for optimizer, its_options in zip(self._optimizers, options, strict=True):
                _take_options(optimizer, its_options)
            for scheduler, state in zip(self._schedulers, states, strict=True):
                scheduler.load_state_dict(state)
        self.leave()

    def leave(self) -> None:
        """Forget the context."""
        self._has_left = True
        for hook in self._hooks:
            hook.remove()
        self._schedule.join(None)
        self.joining.leave()
        if self._model._joined is self:
            self._model._joined = None

    def abandon(self) -> None:
        """Forget it, and let other ranks know, if it has not come to its end."""
        if not self._has_left:
            self.joining.leave_by_exception()
            self.leave()


def _all_ranks(unit: Unit) -> Group:
    """The ranks among which gradients are averaged."""
    if unit.copies is None:
        return unit.shards
    if unit.world_size != dist.get_world_size():
        raise NotImplementedError(
            "Join of a hybrid strategy needs the model to be on all ranks of the default process "
            f"group: there are {dist.get_world_size()}, and {unit.world_size} have the model"
        )
    return group_for(dist.group.WORLD)


def _optimizers(model: UnevenInputs, given: Any) -> list[torch.optim.Optimizer]:
    if given is _MISSING:
        raise ValueError(
            "Join needs the optimizer of a sharded model: a rank that is out of data still holds "
            "shards, which nobody else can step. Pass Join([model], optimizer=optimizer), with a "
            "list if there are several, or optimizer=None if the model is not trained"
        )
    optimizers = _as_list(given, torch.optim.Optimizer)
    problem = _not_trained(model, optimizers)
    if given is not None and problem is not None:
        raise ValueError(problem)
    return optimizers


def _not_trained(model: UnevenInputs, optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
    """Which parameters ``optimizers`` would not step, in words; None if they step all."""
    held = {p for o in optimizers for group in o.param_groups for p in group["params"]}
    schedule = model._schedule or model._start()
    handles = (handle for unit in schedule.units for handle in unit.handles)
    missing = [
        handle.where(parameter)
        for handle in handles
        for parameter in handle.optimizer_params
        if parameter.requires_grad and parameter not in held and not hasattr(parameter, IN_BACKWARD)
    ]
    if not missing:
        return None
    names = [getattr(m, "path", None) or type(m).__name__ for m in missing]
    return (
        f"The optimizers given to Join do not have {len(names)} trainable parameters, of "
        f"{', '.join(map(repr, names[:4]))}: ranks without data would not step them. Give "
        "it all optimizers of the model, made after wrapping, or freeze the parameters"
    )


def _schedulers(optimizers: Iterable[torch.optim.Optimizer], given: Any) -> list[Any]:
    if given is not _MISSING:
        return _as_list(given, object)
    if any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in optimizers):
        raise ValueError(
            "A scheduler sets the learning rate of an optimizer given to Join; a rank that is out "
            "of data does not step it, and would go on with another one. Pass "
            "Join([model], optimizer=optimizer, lr_scheduler=scheduler), or lr_scheduler=None if "
            "it is stepped outside of the context only"
        )
    return []


def _as_list(given: Any, expected: type) -> list[Any]:
    if given is None:
        return []
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    for each in found:
        if not isinstance(each, expected):
            raise TypeError(
                f"Join expects optimizer={expected.__name__} or a list of them, but got {each!r} "
                f"of type {type(each).__name__}"
            )
    return found


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of an optimizer's groups, such as learning rates."""
    return [
        {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        for group in optimizer.param_groups
    ]


def _take_options(optimizer: torch.optim.Optimizer, options: Sequence[dict[str, Any]]) -> None:
    for group, others in zip(optimizer.param_groups, options, strict=True):
        for key, value in others.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
