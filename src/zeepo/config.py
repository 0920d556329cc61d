"""The options of `zeepo.init`: what they are, where they come from, and which values they take.

Three sources, the later wins: a TOML file, `ZEEPO_*` variables, keywords the caller gave. Every
value is checked whatever its source, and an error names the source. The invariant: an `Options`
from `resolve_options` holds only what this version does. An option it does not know is a
`ConfigError`; one it knows but does not serve yet is an `UnsupportedError`. Nothing is ignored.

Left to others: whether a directory is usable (memory), whether a budget is enough (planner).
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zeepo.errors import ConfigError, UnsupportedError
from zeepo.units import parse_bytes

Placement = Literal["auto", "device", "ram", "disk"]
ActivationPlacement = Literal["auto", "device", "ram", "disk", "recompute"]

VARIABLE_PREFIX = "ZEEPO_"

TUNING_PREFIX = "ZEEPO_TUNING_"
"""Of variables that are settings, not options of `init` (engine/tuning.py reads them)."""
INTERNAL_VARIABLES = ("ZEEPO_VERIFY", "ZEEPO_LAUNCH_FIRST", "ZEEPO_LAUNCH_REPORT")
"""Variables of zeepo's own commands."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one session, checked. Made by `resolve_options`, never changed."""

    stage: int | Literal["auto"] = "auto"
    """ZeRO stage, a threshold: STATE is sharded from 1, GRAD from 2, PARAM from 3."""

    weigh_samples: bool = True
    """Whether ranks whose batches differ in size contribute by their number of samples."""

    device_memory: int | None = None
    """Bytes of accelerator memory per rank; None is what is free, less a margin."""

    ram: int | None = None
    """Bytes the process may grow in resident memory; None is what is free, less a margin."""

    disk: tuple[Path, ...] = ()
    """Directories of the disk tier; empty is no disk tier."""

    disk_limit: int | None = None
    """Bytes the disk tier may take over all its directories; None is what they have free."""

    params: Placement = "auto"
    """Lowest tier where parameters rest between uses."""

    grads: Placement = "auto"
    """Lowest tier where gradients rest between backward and the step."""

    optimizer_state: Placement = "auto"
    """Lowest tier where optimizer state rests between steps."""

    activations: ActivationPlacement = "auto"
    """Where what backward needs is kept; "recompute" keeps nothing and computes it again."""

    precision: str | None = None
    """Compute dtype of the parameters; None leaves the model's dtypes alone."""

    update: Literal["step", "backward"] = "step"
    """When parameters are updated: in `optimizer.step()`, or as backward finishes each chunk."""

    durable: bool = False
    """Whether every step is committed to disk, to resume after a kill."""

    resume: Path | None = None
    """Directory of a durable session to resume; None starts anew."""

    zero_offload: bool | None = None
    """Accepted for scripts that say it: moving state off the compute tier is what zeepo does."""

    num_gpus: int | None = None
    """Number of ranks to start when no launcher has; None is however many were started."""

    events: Path | None = None
    """File to which one JSON object per event is appended; None writes none."""

    progress: bool | Literal["auto"] = "auto"
    """Whether progress is shown on stderr; "auto" is when it is a terminal."""


OPTION_NAMES = tuple(field.name for field in fields(Options))


def resolve_options(
    keywords: Mapping[str, object],
    config_path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    caller: str = "zeepo.init",
) -> Options:
    """Merge the three sources, check every value and return the session's options.

    `keywords` holds only what the caller gave: a keyword at its default value still overrides the
    file and the variables. `environ` defaults to the process's.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, _Given] = {}
    if config_path is not None:
        if not isinstance(config_path, (str, Path)):
            raise ConfigError(
                f"config= takes the path of a TOML file, not a {type(config_path).__name__}. "
                "Options that are at hand already are keywords: zeepo.init(model, **options)."
            )
        given.update(_from_file(Path(config_path)))
    given.update(_from_variables(environ))
    given.update(_from_keywords(keywords, caller))

    values = {name: _parse(name, item) for name, item in given.items()}
    options = Options(**values)
    _check_disk(options, given)
    _check_devices(options, given)
    _refuse_unsupported(options, given)
    return options


class _Given(NamedTuple):
    """A value as it was written, and where, for the errors about it."""

    value: object
    source: str


# ---- The three sources


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {path}: {error.strerror}. "
            "Give config= the path of a TOML file."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not valid TOML: {error}.") from error
    check_names(table, OPTION_NAMES, f"in the config file {path}")
    return {name: _Given(value, f"in {path}") for name, value in table.items()}


def _from_variables(environ: Mapping[str, str]) -> dict[str, _Given]:
    option_of = {VARIABLE_PREFIX + name.upper(): name for name in OPTION_NAMES}
    ours = [
        variable
        for variable in environ
        if variable.startswith(VARIABLE_PREFIX)
        and not variable.startswith(TUNING_PREFIX)
        and variable not in INTERNAL_VARIABLES
    ]
    check_names(ours, tuple(option_of), "among the environment variables")
    given = {}
    for variable in ours:
        text = environ[variable]
        if not text.strip():
            raise ConfigError(f"{variable} is set but empty. Give it a value or unset it.")
        name = option_of[variable]
        value = text.split(os.pathsep) if name == "disk" else text
        given[name] = _Given(value, f"from {variable}")
    return given


def _from_keywords(keywords: Mapping[str, object], caller: str) -> dict[str, _Given]:
    others = ("model", "optimizer", "config")
    check_names(keywords, OPTION_NAMES, f"among the keywords of {caller}", others)
    return {name: _Given(value, f"given to {caller}") for name, value in keywords.items()}


def check_names(
    names: Iterable[str], known: Sequence[str], where: str, others: Sequence[str] = ()
) -> None:
    """Refuse a name that is not `known`; `others` may be meant too."""
    folded = {name.lower(): name for name in (*known, *others)}
    for name in names:
        if name in known:
            continue
        close = difflib.get_close_matches(name.lower(), folded, n=1)
        if close:
            hint = f"Did you mean {folded[close[0]]!r}?"
        else:
            hint = f"The options are {', '.join(known)}."
        raise ConfigError(f"unknown option {name!r} {where}. {hint}")


# ---- Values: each parser returns the checked value or raises ValueError saying what it expects


def _parse(name: str, given: _Given) -> Any:
    try:
        return _PARSERS[name](given.value)
    except ValueError as error:
        raise ConfigError(f"{_written(name, given)}: {error}") from error


def _written(name: str, given: _Given) -> str:
    return f"{name}={given.value!r} ({given.source})"


def _optional(parser: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else parser(value)


def _choice(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        close = difflib.get_close_matches(str(value).lower(), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"expected one of {', '.join(map(repr, choices))}{hint}")

    return parse


def _parse_integer(value: object) -> int:
    # bool is an int to Python, but stage=True is a mistake.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    raise ValueError("expected a whole number")


def _parse_stage(value: object) -> int | str:
    if value == "auto":
        return "auto"
    try:
        stage = _parse_integer(value)
    except ValueError:
        stage = -1
    if stage not in range(4):
        raise ValueError("expected 0, 1, 2, 3 or 'auto'")
    return stage


def _parse_count(value: object) -> int:
    count = _parse_integer(value)
    if count < 1:
        raise ValueError("expected at least 1")
    return count


def _parse_budget(value: object) -> int:
    num_bytes = parse_bytes(value)  # type: ignore[arg-type]  # it refuses other types itself
    if num_bytes == 0:
        raise ValueError("a budget must be more than 0 bytes; leave the option out for no limit")
    return num_bytes


def _parse_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        flag = {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
        if flag is not None:
            return flag
    raise ValueError("expected true or false")


def _parse_progress(value: object) -> bool | str:
    try:
        return "auto" if value == "auto" else _parse_flag(value)
    except ValueError:
        raise ValueError("expected true, false or 'auto'") from None


def _parse_text(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError("expected a name")


def _parse_path(value: object, what: str = "directory") -> Path:
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and text.strip():
            return Path(text).expanduser().absolute()
    raise ValueError(f"expected the path of a {what}")


def _parse_paths(value: object) -> tuple[Path, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        return (_parse_path(value),)
    paths = tuple(_parse_path(item) for item in value)
    if not paths:
        raise ValueError("expected at least one directory; leave the option out for no disk")
    for position, path in enumerate(paths):
        if path in paths[:position]:
            raise ValueError(f"{path} is listed twice; each directory stands for one disk")
    return paths


_PLACEMENTS = ("auto", "device", "ram", "disk")

_PARSERS: dict[str, Callable[[object], Any]] = {
    "stage": _parse_stage,
    "device_memory": _optional(_parse_budget),
    "ram": _optional(_parse_budget),
    "disk": _parse_paths,
    "disk_limit": _optional(_parse_budget),
    "params": _choice(*_PLACEMENTS),
    "grads": _choice(*_PLACEMENTS),
    "optimizer_state": _choice(*_PLACEMENTS),
    "activations": _choice(*_PLACEMENTS, "recompute"),
    "precision": _optional(_parse_text),
    "update": _choice("step", "backward"),
    "weigh_samples": _parse_flag,
    "durable": _parse_flag,
    "resume": _optional(_parse_path),
    "zero_offload": _optional(_parse_flag),
    "num_gpus": _optional(_parse_count),
    "events": _optional(lambda value: _parse_path(value, "file")),
    "progress": _parse_progress,
}

_PLACED = ("params", "grads", "optimizer_state", "activations")


# ---- Options against each other, against the machine, against this version


def _check_disk(options: Options, given: Mapping[str, _Given]) -> None:
    if options.disk:
        return
    for name in _PLACED:
        if getattr(options, name) == "disk":
            raise ConfigError(
                f"{_written(name, given[name])} needs a disk tier and there is none. "
                "Give disk= a directory on a fast disk."
            )
    if options.disk_limit is not None:
        raise ConfigError(
            f"{_written('disk_limit', given['disk_limit'])} limits a disk tier and there is none. "
            "Give disk= a directory, or leave disk_limit out."
        )


def _accelerator_available() -> bool:
    # Imported here: only a request for the device tier needs to know the machine.
    import torch

    return torch.accelerator.is_available()


def _check_devices(options: Options, given: Mapping[str, _Given]) -> None:
    for name in _PLACED:
        if getattr(options, name) == "device" and not _accelerator_available():
            raise ConfigError(
                f"{_written(name, given[name])} needs an accelerator and torch finds none on this "
                "machine. Use 'auto', 'ram' or 'disk'."
            )


def launched_ranks(environ: Mapping[str, str], variable: str = "WORLD_SIZE") -> int:
    """How many ranks a launcher says it has started; `LOCAL_WORLD_SIZE`: on this host."""
    text = environ.get(variable, "1")
    try:
        return _parse_count(text)
    except ValueError as error:
        raise ConfigError(
            f"{variable}={text!r} is not a number of ranks. Start the program with its launcher, "
            f"or unset {variable}."
        ) from error


def _refuse_unsupported(options: Options, given: Mapping[str, _Given]) -> None:
    """Refuse by name what a later version will do. A feature that arrives removes its line."""
    unsupported: dict[str, tuple[bool, str]] = {
        "durable": (options.durable, "Use durable=False and save checkpoints yourself"),
        "resume": (options.resume is not None, "Leave resume out"),
        "precision": (options.precision is not None, "Leave precision out and cast the model"),
        "activations": (
            options.activations == "device",
            "Use 'auto', 'ram', 'disk' or 'recompute'",
        ),
        "device_memory": (options.device_memory is not None, "Leave device_memory out"),
        "params": (options.params == "device", "Use 'auto', 'ram' or 'disk'"),
        "grads": (options.grads == "device", "Use 'auto', 'ram' or 'disk'"),
        "optimizer_state": (options.optimizer_state == "device", "Use 'auto', 'ram' or 'disk'"),
    }
    for name, (refused, instead) in unsupported.items():
        if refused:
            raise UnsupportedError(
                f"{_written(name, given[name])} is not supported by this version of zeepo. "
                f"{instead}."
            )
