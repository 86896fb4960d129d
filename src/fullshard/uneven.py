"""Uneven inputs: the wrapper's side of ``torch.distributed.algorithms.join.Join``.

A rank that has run out of data still holds shards. The other ranks all-gather them, and only this
rank can step them, so ``Join`` has to be given the optimizers.
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
from .engine.grads.user_hooks import IN_BACKWARD
from .engine.join.following import Follower
from .engine.join.gradient_marks import Since
from .engine.join.joining import Joining
from .engine.runtime.forward import Schedule
from .engine.runtime.unit import Unit

#: Entries of an optimizer's parameter group that are not options.
_NOT_OPTIONS = ("params", "param_names")
_MISSING = object()


class UnevenInputs(nn.Module):
    """The methods that ``torch.distributed.algorithms.join.Join`` calls on a model.

    >>> with Join([model], optimizer=optimizer):
    ...     for batch in batches:
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    """

    _schedule: Schedule | None
    _unit: Unit
    #: Set by :meth:`join_hook` for as long as the context lasts.
    _joined: _Joined | None = None

    if TYPE_CHECKING:

        def check_is_root(self) -> bool: ...
        def clip_grad_norm_(self, max_norm: Any, norm_type: float = 2.0) -> torch.Tensor: ...
        def _start(self) -> Schedule: ...

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that ``Join`` runs on a rank that has run out of data.

        ``Join`` passes its keyword arguments on. ``optimizer`` is the optimizer of the model, a
        list of them, or None if the model is not trained. ``lr_scheduler`` is the scheduler of
        those optimizers, or a list; it is required if they have one. By default gradients are
        divided by the number of ranks; with ``divide_by_initial_world_size=False``, by the number
        of ranks that still have data.
        """
        if not self.check_is_root():
            raise ValueError(
                f"Join expects the root FSDP model, but got the nested unit {self._unit.name!r}. "
                "Pass the outermost wrapped model to Join"
            )
        optimizers = _optimizers(self, kwargs.get("optimizer", _MISSING))
        schedulers = _schedulers(optimizers, kwargs.get("lr_scheduler", _MISSING))
        if self._joined is not None:
            self._joined.leave()
        self._joined = _Joined(
            self, optimizers, schedulers, bool(kwargs.get("divide_by_initial_world_size", True))
        )
        return _JoinHook(self._joined)

    def _leave_join(self, joined: _Joined) -> None:
        """Forget ``joined``, unless the model was given to another ``Join`` in the meantime."""
        if self._joined is joined:
            self._joined = None

    @property
    def join_device(self) -> torch.device:
        """The device of the tensor with which ``Join`` counts the ranks that have data."""
        return self._unit.device

    @property
    def join_process_group(self) -> Any:
        """The process group in which ``Join`` counts ranks: all ranks that train the model."""
        if self._joined is None:
            return _all_ranks(self._unit).group
        return self._joined.joining.counting_group


class _JoinHook(JoinHook):
    """The hook that ``Join`` runs on ranks without data.

    ``Join`` does not tell its joinables when an exception ends the context. ``Join`` alone holds
    this object, so it is deleted then, and :meth:`__del__` reports the early end to other ranks.
    """

    def __init__(self, joined: _Joined) -> None:
        super().__init__()
        self._joined = joined

    def main_hook(self) -> None:
        """Take part in one step of the ranks that have data."""
        try:
            self._joined.follow()
        except BaseException:
            # The traceback keeps Join, and so this object, alive: do not wait for __del__.
            self._joined.abandon()
            raise

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the context, once all ranks have run out of data."""
        self._joined.end(is_last_joiner)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._joined.abandon()


class _Joined:
    """A model inside a ``Join`` context, with its optimizers and schedulers."""

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
        #: By optimizer number: how gradients changed between the last backward and this step.
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
                "Join expects the fullshard model first in its list of joinables, and only one "
                "fullshard model in it, because ranks without data follow the steps of one model. "
                "Use Join([model, ...], optimizer=optimizer) with one wrapped model"
            )
        joinable: Any = self._model
        return Join.notify_join_context(joinable)

    def _before_step(
        self, number: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        since = self._since[number] = self.joining.since_backward(number)
        if not _steps_together(optimizer):
            return
        if len(args) > 1 or kwargs:
            raise RuntimeError(
                f"{type(optimizer).__name__} got a closure inside Join, but all ranks take part "
                "in its step, also those that have run out of data, and these have no closure. Run "
                "forward and backward before the step"
            )
        # The others are waited for in the step.
        self.joining.stepped.add(number)
        self.joining.tell_of_step(number, _options(optimizer), since)

    def _after_step(
        self, number: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        if _steps_together(optimizer):
            return
        self.joining.stepped.add(number)
        since = self._since.pop(number, None)
        if args or kwargs:
            # A closure may have run forward and backward inside the step.
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
            raise AssertionError(f"Unknown request from a rank with data: {verb!r}")

    def _clear_gradients(self, others: dict[int, Since]) -> None:
        """Repeat what the ranks in ``others`` did to gradients since the last backward.

        ``others`` is keyed by optimizer number.
        """
        for number, since in others.items():
            stepped = number in self.joining.stepped
            if since is Since.REMOVED or (since is Since.UNKNOWN and stepped):
                self._optimizers[number].zero_grad()
            elif since is Since.ZEROED:
                self._optimizers[number].zero_grad(set_to_none=False)
        self.joining.stepped.clear()

    def end(self, is_last_joiner: bool) -> None:
        """Take over optimizer options, scheduler state and gradient resets from the last rank.

        Called once all ranks have run out of data.
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
        """Detach the model and its optimizers from the context."""
        self._has_left = True
        for hook in self._hooks:
            hook.remove()
        self._schedule.join(None)
        self.joining.leave()
        self._model._leave_join(self)

    def abandon(self) -> None:
        """Leave the context early, and inform other ranks; does nothing after its regular end."""
        if not self._has_left:
            self.joining.leave_by_exception()
            self.leave()


def _steps_together(optimizer: Any) -> bool:
    """True if all ranks take part in a step, so that they have to begin it together."""
    return getattr(optimizer, "steps_together", False)


def _all_ranks(unit: Unit) -> Group:
    """The group of all ranks over which gradients are averaged."""
    if unit.copies is None:
        return unit.shards
    if unit.world_size != dist.get_world_size():
        raise NotImplementedError(
            "Join with a hybrid sharding strategy expects the model on all ranks of the default "
            f"process group, but it is on {unit.world_size} of {dist.get_world_size()} ranks. Wrap "
            "it on all ranks, or use FULL_SHARD or SHARD_GRAD_OP"
        )
    return group_for(dist.group.WORLD, unit.device)


def _optimizers(model: UnevenInputs, given: Any) -> list[torch.optim.Optimizer]:
    if given is _MISSING:
        raise ValueError(
            "Join expects the optimizer of a sharded model, but got none: a rank that has run out "
            "of data still holds shards, which no other rank can step. Pass "
            "Join([model], optimizer=optimizer), with a list if there are several optimizers, or "
            "optimizer=None if the model is not trained"
        )
    optimizers = _as_list(given, torch.optim.Optimizer)
    problem = _not_trained(model, optimizers)
    if given is not None and problem is not None:
        raise ValueError(problem)
    return optimizers


def _not_trained(model: UnevenInputs, optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
    """Describe the trainable parameters that ``optimizers`` do not step; None if there are none."""
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
        f"The optimizers passed to Join do not hold {len(names)} trainable parameters of the "
        f"model, in {', '.join(map(repr, names[:4]))}: ranks without data would not step them. "
        "Pass all optimizers of the model, create them after wrapping, or freeze the parameters"
    )


def _schedulers(optimizers: Iterable[torch.optim.Optimizer], given: Any) -> list[Any]:
    if given is not _MISSING:
        return _as_list(given, object)
    if any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in optimizers):
        raise ValueError(
            "An optimizer passed to Join has a learning rate scheduler, but Join got no "
            "lr_scheduler: a rank that has run out of data does not step the scheduler, so its "
            "learning rate would differ from that of the other ranks. Pass "
            "Join([model], optimizer=optimizer, lr_scheduler=scheduler), or lr_scheduler=None if "
            "the scheduler is stepped outside the context only"
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
    """The options of an optimizer's parameter groups, such as learning rates."""
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
