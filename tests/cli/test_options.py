"""Options: one dataclass behind the TOML file and the flags."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from fullshard import Communication
from fullshard.cli.checks import check_run
from fullshard.cli.main import app
from fullshard.cli.model import GPT, PRESETS
from fullshard.cli.option_files import read_values, to_toml
from fullshard.cli.options import Options, build_options
from fullshard.cli.problems import BadInput
from fullshard.cli.sharding import communication
from fullshard.cli.trainer.optimization import learning_rate
from fullshard.cli.words import rounded


def written(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text)
    return file


def test_every_option_is_a_flag_with_its_help() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    flags = {parameter.name: parameter for parameter in command.params}

    for field in dataclasses.fields(Options):
        assert flags[field.name].help.startswith(field.metadata["help"])


@pytest.mark.parametrize("name", ["", "run", "train", "plan"])
def test_help_is_whole_in_a_terminal_of_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command: Any = typer.main.get_command(app)
    command = command.commands[name] if name else command

    shown = CliRunner().invoke(app, [name, "--help"] if name else ["--help"]).output

    assert max(map(len, shown.splitlines())) <= 80
    assert "<bool>" not in shown
    assert "…" not in shown
    for parameter in command.params:
        if parameter.param_type_name == "option":
            for flag in [*parameter.opts, *parameter.secondary_opts]:
                assert re.search(rf"(^|[ /]){flag}($|[ /])", shown, re.MULTILINE), flag


def test_help_shows_every_default() -> None:
    shown = CliRunner().invoke(app, ["train", "--help"]).output
    words = " ".join(shown.split())

    for field in dataclasses.fields(Options):
        if field.default not in ("", 0, False):
            assert f"{field.metadata['help']} [{field.default}]" in words


def test_what_is_written_as_toml_reads_as_the_same_options(tmp_path: Path) -> None:
    options = Options(model="small", data='a "b" \\ c', learning_rate=1e-5, offload=True, ranks=3)

    read = build_options(read_values(written(tmp_path, to_toml(options))), "file")

    assert read == options


@pytest.mark.parametrize(
    ("given", "meant"),
    [("learning_rat", "learning_rate"), ("checkpoint-activation", "checkpoint_activations")],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    tmp_path: Path, given: str, meant: str
) -> None:
    with pytest.raises(BadInput, match=f"no option '{given}'; did you mean '{meant}'"):
        read_values(written(tmp_path, f"{given} = 1\n"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("steps = 1.5", "steps expects a whole number, but got 1.5 of type float"),
        ("steps = true", "steps expects a whole number, but got True of type bool"),
        ("offload = 1", "offload expects true or false, but got 1 of type int"),
        ('clip = "much"', "clip expects a number, but got 'much' of type str"),
        ("steps = 0", "steps expects 1 or more, but got 0"),
        ("clip = nan", "clip expects 0 or more, but got nan"),
        ('strategy = "full_shards"', "got 'full_shards'; did you mean 'full_shard'"),
        ("steps = ", "is not valid TOML"),
        ("[model]\nlayers = 2", "model expects text"),
    ],
)
def test_a_value_that_cannot_be_is_refused(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_values(written(tmp_path, line))

    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_whole_number_is_a_number(tmp_path: Path) -> None:
    values = read_values(written(tmp_path, "learning_rate = 1\n"))

    assert build_options(values, "file").learning_rate == 1.0


def test_a_preset_gives_way_to_what_was_given() -> None:
    size = Options(model="small", layers=3).size()

    assert (size.layers, size.heads, size.width) == (3, 12, 768)


@pytest.mark.parametrize("name", [*PRESETS])
def test_presets_are_shown_with_as_many_parameters_as_they_have(name: str) -> None:
    with torch.device("meta"):
        model = GPT(PRESETS[name], context=128)
    expected = sum(parameter.numel() for parameter in model.parameters())

    assert PRESETS[name].parameters(context=128) == expected
    (field,) = [field for field in dataclasses.fields(Options) if field.name == "model"]
    assert f"{name} ({rounded(expected)})" in field.metadata["help"]


def test_a_name_says_how_many_billions_a_preset_has() -> None:
    for name in ("7b", "65b"):
        parameters = PRESETS[name].parameters(context=2048, vocabulary=32_000)
        assert f"{parameters / 1e9:.0f}b" == name


def test_the_former_name_of_a_preset_is_taken(tmp_path: Path) -> None:
    values = read_values(written(tmp_path, 'model = "70b"\n'))

    assert build_options(values, "file") == Options(model="65b")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_learning_rate_warms_up_and_ends_where_it_should(schedule: str) -> None:
    options = Options(
        steps=100, warmup=10, learning_rate=1.0, schedule=schedule, final_fraction=0.2
    )
    rates = [learning_rate(options, step) for step in range(1, 101)]

    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    if schedule != "constant":
        assert rates[54] == pytest.approx(0.6)  # half of the way down


def test_steps_of_muon_are_not_captured() -> None:
    with pytest.raises(BadInput, match="steps of muon cannot be captured"):
        check_run(Options(optimizer="muon", capture=True), 2)


def test_options_of_communication_are_those_of_the_wrapper() -> None:
    given = Options(all_gather="int8", reduce="bfloat16", secondary_shards=True)

    found = communication(given)

    expected = Communication(torch.int8, torch.bfloat16, secondary_shards=True)
    assert found == expected
    assert communication(Options()) is None
