"""Options: three sources in order, every value checked, nothing unknown or unserved ignored."""

import ast
import inspect
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from zeepo import config
from zeepo.config import (
    INTERNAL_VARIABLES,
    OPTION_NAMES,
    Options,
    launched_ranks,
    resolve_options,
)
from zeepo.errors import ConfigError, UnsupportedError
from zeepo.units import GiB, MiB


def resolve(
    environ: dict[str, str] | None = None,
    config_path: Path | None = None,
    **keywords: object,
) -> Options:
    """`resolve_options` that never sees the variables of the machine the tests run on."""
    return resolve_options(keywords, config_path, environ or {})


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_accelerator_available", lambda: True)


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_accelerator_available", lambda: False)


# ---- The list of options


def test_a_table_is_not_a_path() -> None:
    with pytest.raises(ConfigError, match=r"not a dict.*zeepo.init\(model, \*\*options\)"):
        resolve_options({}, config_path={"ram": "1GiB"}, environ={})  # type: ignore[arg-type]


def test_the_option_list_and_its_defaults_are_frozen() -> None:
    assert {field.name: field.default for field in fields(Options)} == {
        "stage": "auto",
        "device_memory": None,
        "ram": None,
        "disk": (),
        "disk_limit": None,
        "params": "auto",
        "grads": "auto",
        "optimizer_state": "auto",
        "activations": "auto",
        "precision": None,
        "update": "step",
        "weigh_samples": True,
        "durable": False,
        "resume": None,
        "zero_offload": None,
        "num_gpus": None,
        "events": None,
        "progress": "auto",
    }


def test_nothing_given_is_the_defaults() -> None:
    assert resolve() == Options()


def test_every_option_has_a_parser() -> None:
    assert set(config._PARSERS) == set(OPTION_NAMES)


def test_every_field_has_a_docstring_under_it() -> None:
    (body,) = [
        node.body
        for node in ast.parse(inspect.getsource(config)).body
        if isinstance(node, ast.ClassDef) and node.name == "Options"
    ]
    for position, node in enumerate(body):
        if isinstance(node, ast.AnnAssign):
            below = body[position + 1]
            assert isinstance(below, ast.Expr), ast.unparse(node)
            assert isinstance(below.value, ast.Constant), ast.unparse(node)


def test_options_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().ram = 1  # type: ignore[misc]


# ---- Sources


def test_later_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "zeepo.toml"
    file.write_text('ram = "1GiB"\nstage = 1\nparams = "ram"\n')
    options = resolve({"ZEEPO_STAGE": "2", "ZEEPO_PARAMS": "auto"}, file, stage=3)
    assert (options.ram, options.params, options.stage) == (GiB, "auto", 3)


def test_a_keyword_given_at_its_default_still_wins() -> None:
    assert resolve({"ZEEPO_RAM": "1GiB", "ZEEPO_STAGE": "2"}, ram=None, stage="auto") == Options()


def test_an_overridden_value_that_could_not_stand_does_not_count() -> None:
    assert resolve({"ZEEPO_UPDATE": "backward"}, update="step") == Options()


def test_variables_are_read_as_text(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    options = resolve(
        {
            "ZEEPO_RAM": "64MiB",
            "ZEEPO_DISK": f"{one}:{two}",
            "ZEEPO_DISK_LIMIT": "1048576",
            "ZEEPO_ZERO_OFFLOAD": "1",
            "ZEEPO_DURABLE": "False",
            "ZEEPO_NUM_GPUS": "1",
            "ZEEPO_EVENTS": f"{one}/events.jsonl",
            "ZEEPO_PROGRESS": "false",
            "HOME": "/elsewhere",
        }
    )
    assert options == Options(
        ram=64 * MiB,
        disk=(one, two),
        disk_limit=MiB,
        zero_offload=True,
        num_gpus=1,
        events=one / "events.jsonl",
        progress=False,
    )


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEEPO_RAM", "3GiB")
    assert resolve_options({}).ram == 3 * GiB


def test_internal_variables_are_no_options() -> None:
    assert resolve(dict.fromkeys((*INTERNAL_VARIABLES, "ZEEPO_TUNING_PREFETCH"), "1")) == Options()


def test_an_empty_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="ZEEPO_RAM is set but empty"):
        resolve({"ZEEPO_RAM": ""})


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        resolve(config_path=tmp_path / "absent.toml")


@pytest.mark.parametrize("content", [b"ram = ", b"ram = '\xff'"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "zeepo.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"zeepo\.toml is not valid TOML"):
        resolve(config_path=file)


# ---- Unknown names


def test_unknown_keyword_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'optimiser_state'.*Did you mean 'optimizer_state'"):
        resolve(optimiser_state="ram")


@pytest.mark.parametrize(
    ("given", "meant"), [("modle", "model"), ("optimiser", "optimizer"), ("configs", "config")]
)
def test_misspelt_arguments_of_init_are_suggested_too(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"'{given}'.*Did you mean '{meant}'"):
        resolve(**{given: None})


def test_misspelt_name_in_a_file_has_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "zeepo.toml"
    file.write_text('progres = "auto"\n')
    with pytest.raises(ConfigError, match=r"'progres' in the config .*Did you mean 'progress'"):
        resolve(config_path=file)


@pytest.mark.parametrize("variable", ["ZEEPO_DISK_LIMITS", "ZEEPO_disk_limit"])
def test_unknown_variable_has_a_suggestion(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"'{variable}'.*Did you mean 'ZEEPO_DISK_LIMIT'"):
        resolve({variable: "1GiB"})


def test_unknown_name_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "zeepo.toml"
    file.write_text("[training]\nram = 1\n")
    with pytest.raises(ConfigError, match=r"'training' in the config file .*zeepo\.toml.*stage, "):
        resolve(config_path=file)


# ---- Values


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "auto"])
def test_every_stage_runs_on_one_rank(stage: int | str) -> None:
    assert resolve(stage=stage).stage == stage


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("stage", 4, "expected 0, 1, 2, 3 or 'auto'"),
        ("stage", True, "expected 0, 1, 2, 3 or 'auto'"),
        ("stage", "Auto", "expected 0, 1, 2, 3 or 'auto'"),
        ("stage", None, "expected 0, 1, 2, 3 or 'auto'"),
        ("ram", "2 gigs", "unknown unit 'gigs'"),
        ("ram", 2.5, "float"),
        ("ram", 0, "more than 0 bytes"),
        ("ram", -1, "negative"),
        ("disk_limit", "lots", "cannot read 'lots' as bytes"),
        ("params", "Ram", "did you mean 'ram'"),
        ("params", "recompute", "expected one of 'auto', 'device', 'ram', 'disk'"),
        ("params", None, "expected one of"),
        ("activations", "recomputed", "did you mean 'recompute'"),
        ("update", "later", "expected one of 'step', 'backward'"),
        ("durable", "yes", "expected true or false"),
        ("durable", 1, "expected true or false"),
        ("zero_offload", 2, "expected true or false"),
        ("num_gpus", 0, "at least 1"),
        ("num_gpus", 1.0, "whole number"),
        ("num_gpus", True, "whole number"),
        ("precision", 16, "expected a name"),
        ("events", "", "path of a file"),
        ("events", True, "path of a file"),
        ("progress", "always", "true, false or 'auto'"),
        ("progress", None, "true, false or 'auto'"),
        ("disk", "", "path of a directory"),
        ("disk", b"/scratch", "path of a directory"),
        ("disk", 3, "path of a directory"),
        ("disk", [], "at least one directory"),
        ("disk", ["/a", "/b", "/a"], "/a is listed twice"),
    ],
)
def test_bad_value_names_option_value_and_source(name: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(**{name: value})
    message = str(raised.value)
    assert message.startswith(f"{name}={value!r} (given to zeepo.init): ")
    assert says in message


def test_bad_variable_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"ram='x' \(from ZEEPO_RAM\)"):
        resolve({"ZEEPO_RAM": "x"})


def test_one_disk_or_many_become_absolute_paths(tmp_path: Path) -> None:
    assert resolve(disk=str(tmp_path)).disk == (tmp_path,)
    assert resolve(disk=[tmp_path / "a", str(tmp_path / "b")]).disk == (
        tmp_path / "a",
        tmp_path / "b",
    )
    assert resolve(disk="here").disk == (Path.cwd() / "here",)
    assert resolve(disk="~/here").disk == (Path.home() / "here",)
    assert resolve(disk="/one:two").disk == (Path("/one:two"),)
    assert resolve(disk=None).disk == ()


@pytest.mark.parametrize("name", ["params", "grads", "optimizer_state"])
def test_placements(name: str, tmp_path: Path) -> None:
    for placement in ("auto", "ram", "disk"):
        assert getattr(resolve(disk=tmp_path, **{name: placement}), name) == placement


# ---- Options against each other and against the machine


@pytest.mark.parametrize("name", ["params", "grads", "optimizer_state"])
def test_disk_placement_needs_a_disk(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='disk' .*there is none. Give disk="):
        resolve(**{name: "disk"})


def test_disk_limit_needs_a_disk() -> None:
    with pytest.raises(ConfigError, match=r"disk_limit='1GiB' .*there is none"):
        resolve(disk_limit="1GiB")


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("name", ["params", "grads", "optimizer_state", "activations"])
def test_device_placement_needs_an_accelerator(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='device' .*torch finds none"):
        resolve(**{name: "device"})


def test_the_accelerator_question_reaches_torch() -> None:
    import torch

    assert config._accelerator_available() is torch.accelerator.is_available()


# ---- What later versions will do is refused by name


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("durable", True),
        ("resume", "/scratch/run"),
        ("precision", "bf16"),
        ("activations", "device"),
        ("device_memory", "8GiB"),
        ("params", "device"),
        ("grads", "device"),
        ("optimizer_state", "device"),
    ],
)
def test_unsupported_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError) as raised:
        resolve(disk="/scratch", **{name: value})
    assert str(raised.value).startswith(
        f"{name}={value!r} (given to zeepo.init) is not supported by this version of zeepo. "
    )


def test_world_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE='many'"):
        launched_ranks({"WORLD_SIZE": "many"})
    assert launched_ranks({"WORLD_SIZE": "3"}) == 3
    assert launched_ranks({}) == 1


def test_the_script_that_only_adds_init_is_served() -> None:
    options = resolve(zero_offload=True, num_gpus=1, activations="ram", durable=False)
    assert options == Options(zero_offload=True, num_gpus=1, activations="ram")
