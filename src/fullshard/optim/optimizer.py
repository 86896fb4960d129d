"""``whole``: any optimizer, on whole tensors, of a model whose parameters are sharded."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..engine.comm.collectives import Group
from .owners import arrange_rounds, assign_owners
from .parameters import WholeParameter
from .rounds import Round
from .selection import Found, Select, divide
from .state_dicts import load_state_dict, saved_state_dict
from .twins import Make, Twins, made

#: Takes a parameter's name and a tensor of its shape; how much an owner of it has to do.
Cost = Callable[[str, torch.Tensor], float]

#: Up to how many elements a rank owns of rounds that are merged into one.
_ROUND_NUMEL = 4 * 2**20
_NAMES_SHOWN = 5
#: Of the digest by which ranks compare which tensors they step.
_DIGITS = 8


def whole(
    make: Make,
    model: nn.Module,
    rest: Make | None = None,
    *,
    select: Select | None = None,
    cost: Cost | None = None,
) -> WholeOptimizer:
    """An optimizer that steps some parameters of a sharded ``model`` as whole tensors.

    Every chosen parameter has one owner among the ranks that share it. In each step, the pieces of
    the parameter and of its gradient travel to the owner, the optimizer that ``make`` makes steps
    the whole tensor there, and the result travels back. The owner alone has the optimizer's state.
    All other trainable parameters go to the optimizer that ``rest`` makes, as shards.

    >>> optimizer = fullshard.optim.whole(
    ...     lambda parameters: torch.optim.Muon(parameters, lr=0.02),
    ...     model,
    ...     rest=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    ... )

    All ranks call ``make``, with one parameter of the whole shape for each chosen one. It has no
    memory; its name in the unwrapped model is its attribute ``fqn``. By default, matrices are
    chosen, except those of embeddings and of the head. ``select`` takes a parameter's name and a
    tensor of its shape, and returns whether it is chosen; or it contains the names. Owners are
    balanced by numbers of elements, or by ``cost``, which takes the name and the tensor, too.

    The model was wrapped with ``use_orig_params=True`` or sharded by ``fully_shard``. All ranks
    call this, and ``step``, ``state_dict`` and ``load_state_dict`` of what is returned.
    """
    return WholeOptimizer(make, model, rest, select, cost)


class WholeOptimizer(torch.optim.Optimizer):
    """The optimizer that :func:`whole` makes.

    Its parameter groups are those of both optimizers, with the model's own parameters, so that
    learning-rate schedulers, ``zero_grad``, clipping and gradient scalers work as always.
    """

    #: For ``Join``: ranks that have run out of data take part in steps, not only after them.
    steps_together = True

    def __init__(
        self,
        make: Make,
        model: nn.Module,
        rest: Make | None,
        select: Select | None,
        cost: Cost | None,
    ) -> None:
        chosen, others = divide(model, select)
        if others and rest is None:
            names = [name for name, _ in others[:_NAMES_SHOWN]]
            raise ValueError(
                f"{len(others)} trainable parameters are not stepped as whole tensors ({names}, "
                "...). Pass rest=, a function that makes an optimizer of them, such as "
                "lambda parameters: torch.optim.AdamW(parameters), or choose them with select="
            )
        parameters = _with_owners(chosen, cost)
        self._twins = Twins(make, parameters)
        self._rounds = list(_rounds_of(parameters, self._twins, cost))
        self._passes = _passes_of(parameters)
        self._twins.forget_model()
        ones: dict[Any, WholeParameter] = {}
        for each in parameters:
            ones.setdefault(each.handle, each)
        self._one_of_each_unit = list(ones.values())
        #: The optimizer of all parameters that were not chosen.
        self.rest: torch.optim.Optimizer | None = None
        if others:
            assert rest is not None
            self.rest = made(rest, [parameter for _, parameter in others], "second optimizer")
        self._has_stepped = False
        self._is_complete = False
        super().__init__([dict(group) for group in self._all_groups()], {})
        self.defaults = self._twins.defaults
        self._is_complete = True
        self._show_groups()

    # -- what torch's own code looks at -----------------------------------------------------------

    def _all_groups(self) -> list[dict[str, Any]]:
        return [*self._twins.shown, *(self.rest.param_groups if self.rest is not None else ())]

    def _show_groups(self) -> None:
        # The very dicts that the optimizers read, so that a scheduler's changes reach them.
        self.param_groups = self._all_groups()

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The state of all parameters: that of whole tensors is {} on ranks that do not own them.

        Before the first step, whole tensors have no entry.
        """
        found: defaultdict[Any, Any] = defaultdict(dict)
        if self._has_stepped:
            for each in self._rounds:
                states = each.optimizer.state
                for member in each.parameters:
                    found[member.parameter] = states.get(member.stand_in, {})
        if self.rest is not None:
            found.update(self.rest.state)
        return found

    @state.setter
    def state(self, value: Any) -> None:
        if not self._is_complete:
            # torch's constructor sets it; there is nothing in it yet.
            return
        if value:
            raise RuntimeError(
                "The state of an optimizer of whole tensors is on the owners of parameters, and "
                "cannot be replaced by other state. Pass what state_dict() returns to "
                "load_state_dict(), or assign {}, for no state"
            )
        self._twins.forget_states()
        if self.rest is not None:
            self.rest.state = defaultdict(dict)
        self._has_stepped = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: owners are chosen for all parameters together."""
        if self._is_complete:
            raise RuntimeError(
                "Parameters cannot be added to an optimizer of whole tensors, because their owners "
                "are chosen together. Make a new one with fullshard.optim.whole"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "An optimizer of whole tensors can be neither copied nor pickled, because it is bound "
            "to the model's process groups. Make another one with fullshard.optim.whole, and load "
            "state_dict() into it"
        )

    # -- a step -----------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> Any:
        """Step all parameters; on all ranks. ``closure`` is called once, before the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self._one_of_each_unit:
            each.check()
        for each in self._twins.parameters:
            each.check_is_the_models()
        with torch.no_grad():
            self._twins.tell()
            self._run_rounds()
            self._twins.listen()
        self._has_stepped = True
        return loss

    def _run_rounds(self) -> None:
        """Step each round while the next one travels; the other parameters meanwhile, too."""
        for group, content in self._passes.items():
            group.begin_pass("optimizer step", content)
        rounds = self._rounds
        rounds[0].start()
        if self.rest is not None:
            self.rest.step()
        for position, current in enumerate(rounds):
            if position + 1 < len(rounds):
                rounds[position + 1].start()
            current.step()
            if position > 0:
                rounds[position - 1].finish()
        rounds[-1].finish()

    # -- state dicts ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as an optimizer over shards would have it; all ranks call this.

        State tensors of a parameter's shape are cut like the parameter; every rank that has a piece
        of the parameter has all other values. ``FSDP.optim_state_dict``, ``fullshard.save`` and
        ``torch.distributed.checkpoint`` make of it what they make of any optimizer's.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._twins.tell()
        found = saved_state_dict(self._twins, self._rounds, self.rest)
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, found)
            found = found if replaced is None else replaced
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what :meth:`state_dict` returns, from any number of ranks; all ranks call this."""
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, given)
            given = given if replaced is None else replaced
        self._has_stepped = load_state_dict(self._twins, self._rounds, self.rest, given)
        self._show_groups()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _with_owners(chosen: list[Found], cost: Cost | None) -> list[WholeParameter]:
    """The chosen parameters with their owners, which are balanced in each process group."""
    owners: dict[Found, int] = {}
    for members in _sharing(chosen):
        costs = [_cost(each.name, each.meta(), cost) for each in members]
        holders = [{rank for rank, size in enumerate(each.sizes) if size} for each in members]
        found = assign_owners(costs, members[0].unit.shards.size, holders)
        owners.update(zip(members, found, strict=True))
    return [WholeParameter(each, owners[each]) for each in chosen]


def _sharing(chosen: list[Found]) -> Iterator[list[Found]]:
    groups: dict[Any, list[Found]] = {}
    for each in chosen:
        groups.setdefault(each.unit.shards, []).append(each)
    yield from groups.values()


def _passes_of(parameters: list[WholeParameter]) -> dict[Group, str]:
    """For each process group, what all its ranks have to step: they compare these words."""
    members: dict[Group, list[WholeParameter]] = {}
    for each in parameters:
        members.setdefault(each.group, []).append(each)
    return {group: _content(found) for group, found in members.items()}


def _content(parameters: list[WholeParameter]) -> str:
    facts = [(each.name, each.shape, each.owner, str(each.dtype)) for each in parameters]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:_DIGITS]
    return f"{len(parameters)} whole tensors, {digest}"


def _cost(name: str, tensor: torch.Tensor, cost: Cost | None) -> float:
    return float(tensor.numel() if cost is None else cost(name, tensor))


def _rounds_of(
    parameters: list[WholeParameter], twins: Twins, cost: Cost | None
) -> Iterator[Round]:
    alike: dict[Any, list[WholeParameter]] = {}
    for each in parameters:
        alike.setdefault((each.group, each.dtype, each.device), []).append(each)
    names = iter(range(len(parameters)))
    for members in alike.values():
        numels = [each.numel for each in members]
        arranged = arrange_rounds(
            [_cost(each.name, each.stand_in, cost) for each in members],
            numels,
            [each.owner for each in members],
            members[0].group.size,
            _ROUND_NUMEL,
        )
        for items in arranged:
            found = [members[item] for item in items]
            twin = twins.add(each for each in found if each.is_mine)
            yield Round(f"round {next(names)}", found, twin)
