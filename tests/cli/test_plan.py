"""``fullshard plan``: a table, and whether it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.cli.planner.device_memory import bytes_of_device
from fullshard.cli.problems import BadInput

MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512))

    def loss(model, sequences, length):
        return model(torch.empty(sequences, length, 512, device="meta")).square().mean()

    return model, loss

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return x + self.linears(x)

def mixers():
    embedding, head = nn.Embedding(256, 8), nn.Linear(8, 256)
    return nn.Sequential(embedding, nn.Sequential(*(Mixer() for _ in range(3))), head)

class Attention(nn.Module):
    def forward(self, x):
        whole = nn.functional.scaled_dot_product_attention(x, x, x)
        return whole + nn.functional.scaled_dot_product_attention(x[0], x[0], x[0])

def attention_without_heads():
    return nn.Sequential(nn.Embedding(256, 8), Attention(), nn.Linear(8, 256))

def alone():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
"""


def planned(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def rows(output: str) -> dict[str, list[str]]:
    """The table's cells, by the first of each row."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_a_preset_of_any_size_is_planned_without_its_memory() -> None:
    output = planned("--model", "7b", "--ranks", "8", "--batch", "8", "--device", "cuda")
    found = rows(output)

    # 6.45 billion parameters in float32 over 8 ranks, and twice that for AdamW.
    assert found["parameter shards"][0] == "3.0 GiB"
    assert found["optimizer state"][0] == "6.0 GiB"
    assert "33 units, on 8 ranks (cuda)" in output


def test_the_plan_in_the_documents_is_what_is_printed() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    before, shown = text.split("```text\nGPT of 6,454,648,832 ")
    command = before.rpartition("```\nfullshard plan ")[2].partition("\n```")[0]

    output = planned(*command.replace("\\\n", " ").split())

    expected = ("GPT of 6,454,648,832 " + shown.partition("\n```")[0]).splitlines()
    assert output.splitlines() == expected


def test_a_model_of_your_own_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_to_plan.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    output = planned(
        *("--model", "own_model_to_plan:build", "--wrap", "Linear", "--ranks", "2"),
        *("--batch", "2", "--sequence", "1"),
    )

    # 2 x 512 x 4096 weights and their biases, in float32, half of them on each rank.
    assert rows(output)["parameter shards"][0] == "8.0 MiB"
    assert "Sequential of 4,198,912 parameters in 3 units" in output


@pytest.mark.parametrize(
    ("function", "units", "chosen"),
    [
        # Of linears and of what holds them, the latter: it has the same parameters, and is outside.
        ("mixers", 4, "Without --wrap, each Mixer is a unit; to change that: --wrap CLASS,CLASS"),
        ("build", 3, "Without --wrap, each Linear is a unit; to change"),
        ("alone", 1, "Without --wrap, no module class is repeated, so the model is one unit; to"),
    ],
)
def test_what_is_repeated_becomes_units_where_nothing_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, units: int, chosen: str
) -> None:
    (tmp_path / "own_model_to_plan.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    output = planned("--model", f"own_model_to_plan:{function}", "--batch", "2", "--ranks", "2")

    assert f" in {units} unit{'s' * (units > 1)}, on 2 ranks" in output
    assert chosen in output
    assert "Without --wrap" not in planned(
        *("--model", f"own_model_to_plan:{function}", "--wrap", "none", "--batch", "2"),
        *("--ranks", "2"),
    )


def test_attention_of_any_number_of_dimensions_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model_to_plan.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert " in 1 unit," in planned(
        *("--model", "own_model_to_plan:attention_without_heads", "--batch", "2", "--ranks", "2")
    )


@pytest.mark.parametrize(
    ("memory", "verdict", "status"),
    [
        ("h100", "Fits h100", 0),
        ("40 MiB", "Barely fits 40 MiB", 0),
        ("1MB", "Does not fit 1MB", 3),
    ],
)
def test_it_says_whether_it_fits_to_people_and_to_scripts(
    memory: str, verdict: str, status: int
) -> None:
    # The default takes 36 to 40 MiB.
    words = ["--device", "cpu", "--batch", "14", "--device-memory", memory]
    assert verdict in planned(*words, status=status)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("1.5 gb", 1.5e9), ("512 B", 512), ("16Mi", 2**24), ("L4", 24 * 2**30)],
)
def test_memory_is_given_as_a_size_or_a_name(text: str, size: float) -> None:
    assert bytes_of_device(text) == size


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("16", "expects a size with a unit, but got '16'; write 16GiB for gibibytes"),
        ("1.5", "write 1.5GiB"),
        ("16GiBs", "expects a size with a unit, such as 80GiB, or one of a10, "),
        ("0GiB", "expects more than 0 bytes, but got '0GiB'"),
    ],
)
def test_memory_without_a_unit_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        bytes_of_device(text)

    assert complaint in str(caught.value)


def test_a_preset_is_planned_with_the_vocabulary_of_a_tokenizer() -> None:
    words = ["--model", "7b", "--sequence", "2048", "--batch", "2", "--ranks", "2"]

    bytes_alone, output = planned(*words), planned(*words, "--vocabulary", "128256")

    assert "GPT of 6,454,648,832 parameters (vocabulary 256)" in bytes_alone
    # Two matrices of 4,096 numbers for each token: the embedding and the head.
    expected = 6_454_648_832 + 2 * 4096 * (128_256 - 256)
    assert f"GPT of {expected:,} parameters (vocabulary 128,256)" in output


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--vocabulary", "0"], "vocabulary expects 1 or more tokens, less than 2**31, but got 0"),
        (["--model", "a:b", "--vocabulary", "9"], "--vocabulary changes a preset, but 'a:b' is a"),
        (["--model", "a:b", "--layers", "9"], "--layers changes a preset, but 'a:b' is a model of"),
    ],
)
def test_a_size_that_changes_nothing_is_refused(words: list[str], complaint: str) -> None:
    refused = CliRunner().invoke(app, ["plan", *words])

    assert isinstance(refused.exception, BadInput)
    assert complaint in str(refused.exception)


def test_offloading_moves_what_rests_to_the_host() -> None:
    output = planned("--offload", "--device", "cuda", "--ranks", "2")

    assert rows(output)["optimizer state"][0] == "0 B"
    # Shards, gradients and AdamW's two numbers: four times 875,264 / 2 numbers.
    assert "Host memory: 6.7 MiB per rank." in output
