"""Before a session: what is given, refused and planned; which tensors alias parameters."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from zeepo import events
from zeepo.chunks.chunk import Kind
from zeepo.chunks.layout import pack
from zeepo.chunks.storages import address, num_users
from zeepo.config import Options
from zeepo.engine.lazy import lazy_managers
from zeepo.engine.managed import ManagedTensor, home_of, mark_ordinary, storage_of
from zeepo.engine.manager import Manager
from zeepo.engine.ranks import choose_stage
from zeepo.engine.reduction import MOST_ASKED
from zeepo.engine.regions import largest_region_bytes
from zeepo.engine.team import Team
from zeepo.engine.tuning import tuning
from zeepo.errors import ConfigError, UnsupportedError
from zeepo.memory.disk_tier import STAGING_BYTES
from zeepo.memory.heap import give_back_free_memory
from zeepo.memory.tier import Tier
from zeepo.optim.catalogue import (
    grain_of,
    largest_state_of,
    num_states_of,
    num_temporaries_of,
)
from zeepo.planner.machine import available_ram_bytes, resident_growth_bytes, spare_bytes
from zeepo.planner.plan import Plan, UnitPlan, rank_buffers
from zeepo.planner.units import Unit, find_units, largest_unit_bytes


def refuse_unmanageable(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raise for what cannot be managed, before anything is touched."""
    for optimizer in optimizers:
        grain_of(optimizer)
    named: dict[int, tuple[str, Tensor]] = {}
    for number, model in enumerate(models):
        prefix = "" if len(models) == 1 else f"model{number}"
        for name, module in model.named_modules(prefix=prefix):
            _refuse_module(name or "the model", module)
        for name, p in model.named_parameters(prefix=prefix):
            named.setdefault(id(p), (name, p))
    for name, loose in loose_parameters(optimizers, named):
        named.setdefault(id(loose), (name, loose))
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in named.values():
        if home_of(tensor) is not None:  # built inside zeepo.lazy
            continue
        _refuse_parameter(name, tensor)
        low = tensor.data_ptr()
        span = (low, low + tensor.numel() * tensor.element_size(), name)
        ranges.setdefault(address(tensor.untyped_storage()), []).append(span)
    _refuse_overlap(ranges.values())


def warn_of_strangers(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """An optimizer that updates nothing of the models given with it is mostly another model's."""
    of_models = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if own and not any(id(p) in of_models for p in own):
            events.warn(
                f"{type(optimizer).__name__} updates {len(own)} parameters, none of them of the "
                "model given to zeepo.init: the model will not be trained by it. Was the model "
                "built anew, or copied, after the optimizer was made?"
            )


def loose_parameters(
    optimizers: Sequence[Optimizer], known: Container[int]
) -> list[tuple[str, nn.Parameter]]:
    """What optimizers update and no module holds: by place, each once. `known` holds ids."""
    found = {
        id(p): (f"optimizer{i}.group{j}.{k}", p)
        for i, optimizer in enumerate(optimizers)
        for j, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
        if id(p) not in known
    }
    return list(found.values())


def _refuse_module(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{name} is a TorchScript module: its code runs outside Python, where zeepo cannot "
            "bring parameters in. Use the module it was made from, or torch.compile."
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UnsupportedError(
            f"{name} is wrapped in {type(module).__name__}. Give zeepo the module inside (.module)."
        )


def _refuse_parameter(name: str, p: Tensor) -> None:
    if isinstance(p, UninitializedParameter):
        raise UnsupportedError(
            f"{name} has no shape yet (a lazy module). Run one forward before zeepo.init."
        )
    if type(p) is not nn.Parameter:
        raise UnsupportedError(
            f"{name} is a {type(p).__name__}, not an nn.Parameter: zeepo manages ordinary "
            "parameters only. Make it one: nn.Parameter(tensor)."
        )
    if p.device.type != "cpu" or p.layout is not torch.strided:
        raise UnsupportedError(
            f"{name} is on {p.device} with layout {p.layout}: this version manages dense "
            "parameters on the CPU."
        )


def _refuse_overlap(ranges: Iterable[list[tuple[int, int, str]]]) -> None:
    for spans in ranges:
        spans.sort()
        for (_, high, first), (low, top, second) in pairwise(spans):
            if low < high and top > low:
                raise UnsupportedError(
                    f"{first} and {second} are different parameters in the same memory. Tie them "
                    "by using one nn.Parameter in both places."
                )


def split_by_trainable(unit: Unit) -> list[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """A unit's chunks: what trains and what is frozen do not share one."""
    trainable = [(n, p) for n, p in unit.parameters if p.requires_grad]
    frozen = [(n, p) for n, p in unit.parameters if not p.requires_grad]
    chunks = []
    if trainable:
        chunks.append((unit.name, trainable))
    if frozen:
        chunks.append((unit.name + " (frozen)" if trainable else unit.name, frozen))
    return chunks


def home_tiers(plan: Plan, disk: Tier | None) -> dict[Kind, Tier | None]:
    """Where each kind rests; None: in RAM."""
    where = plan.placement
    return {
        Kind.PARAM: disk if where["params"] == "disk" else None,
        Kind.GRAD: disk if where["grads"] == "disk" else None,
        Kind.STATE: disk if where["optimizer_state"] == "disk" else None,
    }


def adopt_units(manager: Manager, units: Sequence[Unit]) -> None:
    """Take over all parameters, also those that were built inside `zeepo.lazy`."""
    everything = [p for unit in units for _, p in unit.parameters]
    aliases = find_aliases(everything)
    lazies = lazy_managers(everything)
    for lazy in lazies:
        lazy.evict_all()
    for unit in units:
        for label, parameters in split_by_trainable(unit):
            manager.adopt_chunk(label, parameters)
    manager.adopt_aliases(aliases)
    for lazy in lazies:
        lazy.close_if_empty()
    give_back_free_memory()


def find_aliases(parameters: Sequence[nn.Parameter]) -> list[tuple[Tensor, nn.Parameter]]:
    """Ordinary tensors that share a parameter's storage (a state_dict taken before init, ...).

    They have to become managed too: an unmanaged one would look at memory that is gone.
    """
    owners: dict[int, nn.Parameter] = {}
    for p in parameters:
        if home_of(p) is not None:  # built inside zeepo.lazy: its views are managed already
            continue
        storage = p.untyped_storage()
        if num_users(storage) > 2:
            owners[address(storage)] = p
    if not owners:
        return []
    found = []
    for obj in gc.get_objects():
        if type(obj) is not Tensor and type(obj) is not ManagedTensor:
            continue
        if obj.layout is torch.strided and obj.device.type == "cpu":
            owner = owners.get(address(storage_of(obj)))
            if owner is not None:
                found.append((obj, owner))
    return found


def make_leftovers_ordinary() -> None:
    """After a session: what the user still holds of its views and gradients is ordinary again."""
    for obj in gc.get_objects():
        if type(obj) is ManagedTensor and home_of(obj) is None:
            mark_ordinary(obj)


def bytes_of_model(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> int:
    """What parameters, gradients and optimizer state take in RAM before they are managed."""
    parameters = {id(p): p for model in models for p in model.parameters()}
    parameters |= {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
    tensors: list[Tensor] = []
    for p in parameters.values():
        if home_of(p) is None:
            tensors.append(p)
        if p.grad is not None:
            tensors.append(p.grad)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    lazies = lazy_managers(list(parameters.values()))
    return sum(t.numel() * t.element_size() for t in tensors) + sum(m.held_bytes for m in lazies)


def find_all_units(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], largest_bytes: int
) -> list[Unit]:
    """The units of all models, and a unit for each parameter that only an optimizer knows."""
    taken: set[int] = set()
    units: list[Unit] = []
    for number, model in enumerate(models):
        name = "" if len(models) == 1 else f"model{number}"
        units.extend(find_units(name, model, taken, largest_bytes))
    units.extend(Unit(name, ((name, p),)) for name, p in loose_parameters(optimizers, taken))
    return units


def choose_units(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], options: Options, team: Team
) -> list[Unit]:
    """Large units in large budgets, unless they would make the least budget much of it."""
    spare = spare_bytes()
    ram = options.ram
    if ram is not None and spare is not None:
        ram = min(ram, max(0, resident_growth_bytes()) + spare)
    usual_bytes = largest_unit_bytes(None, team.num_ranks)
    largest_bytes = largest_unit_bytes(ram, team.num_ranks)
    small = find_all_units(models, optimizers, usual_bytes)
    if ram is None or largest_bytes == usual_bytes:
        return small
    large = find_all_units(models, optimizers, largest_bytes)
    least, least_of_large = (
        plan_session(models, optimizers, units, options, team).minimum_ram
        for units in (small, large)
    )
    return large if least_of_large <= max(least, ram // 2) else small


def plan_session(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    units: Sequence[Unit],
    options: Options,
    team: Team,
) -> Plan:
    """Where everything rests, and the bill."""
    default = "disk" if options.disk else "ram"
    wanted = {
        "params": options.params,
        "grads": options.grads,
        "optimizer_state": options.optimizer_state,
    }
    placement = {kind: default if where == "auto" else where for kind, where in wanted.items()}
    # A frozen parameter in an optimizer may be unfrozen later: its gradient and state have room.
    in_optimizers = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    unit_plans = tuple(
        UnitPlan(
            unit.name,
            unit.nbytes,
            sum(
                p.numel() * p.element_size()
                for _, p in unit.parameters
                if p.requires_grad or id(p) in in_optimizers
            ),
            max(p.nbytes for _, p in unit.parameters),
        )
        for unit in units
    )
    largest = max((_chunk_bytes(unit) for unit in units), default=0)
    buffer_bytes = rank_buffers(
        largest, team.num_ranks, team.share, MOST_ASKED, uses_disk="disk" in placement.values()
    )
    plan = Plan(
        units=unit_plans,
        num_states=max((num_states_of(o) for o in optimizers), default=0),
        placement=placement,
        ram=available_ram_bytes() if options.ram is None else options.ram,
        staging_bytes=STAGING_BYTES + buffer_bytes,
        piece_bytes=tuning().piece_bytes,
        region_bytes=max((largest_region_bytes(model) for model in models), default=0),
        largest_state=max((largest_state_of(o) for o in optimizers), default=0.0),
        num_temporaries=max((num_temporaries_of(o) for o in optimizers), default=0),
        activations=_place_of_activations(options),
        num_ranks=team.num_ranks,
        share=team.share,
        stage=choose_stage(options.stage, optimizers) if team.num_ranks > 1 else 0,
    )
    if options.ram is None and tuning().least_ram:
        return replace(plan, ram=plan.minimum_ram)
    return plan


def _chunk_bytes(unit: Unit) -> int:
    return pack([(name, p.nbytes) for name, p in unit.parameters]).nbytes


def _place_of_activations(options: Options) -> str:
    """Automatic means the disk, when RAM is short and there is one."""
    if options.activations == "auto":
        return "disk" if options.disk else "ram"
    return options.activations


def models_and_optimizers(
    model: nn.Module | Sequence[nn.Module] | None, optimizer: Optimizer | Sequence[Optimizer] | None
) -> tuple[list[nn.Module], list[Optimizer]]:
    """One or several of each, as lists."""
    return _listed("model", model, nn.Module), _listed("optimizer", optimizer, Optimizer)


NAMES: dict[type, str] = {nn.Module: "nn.Module", Optimizer: "Optimizer"}


def _listed(what: str, given: Any, kind: type) -> list[Any]:
    if given is None or isinstance(given, kind):
        return [] if given is None else [given]
    if isinstance(given, (list, tuple)) and all(isinstance(item, kind) for item in given):
        return list({id(item): item for item in given}.values())
    raise ConfigError(
        f"zeepo.init: {what} is of type {type(given).__name__}: it takes an {NAMES[kind]}"
        " or a list of them. "
        "Call it as zeepo.init(model, optimizer, ...)."
    )
