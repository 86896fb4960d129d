"""``fullshard plan``: a table, and whether it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.cli.plan import bytes_of_device

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


def planned(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
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
        ("mixers", 4, "Without --wrap, a unit is a Mixer; others: --wrap CLASS,CLASS"),
        ("build", 3, "Without --wrap, a unit is a Linear; others"),
        ("alone", 1, "Without --wrap, nothing is repeated, so it is one unit; others"),
    ],
)
def test_what_is_repeated_becomes_units_where_nothing_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, units: int, chosen: str
) -> None:
    (tmp_path / "own_model_to_plan.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    output = planned("--model", f"own_model_to_plan:{function}", "--batch", "2", "--ranks", "2")

    assert f" in {units} units" in output
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

    assert " in 1 units" in planned(
        *("--model", "own_model_to_plan:attention_without_heads", "--batch", "2", "--ranks", "2")
    )


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [("h100", "Fits h100"), ("40 MiB", "Hardly fits 40 MiB"), ("1MB", "Does not fit 1MB")],
)
def test_it_says_whether_it_fits(memory: str, verdict: str) -> None:
    # The default takes 36 to 40 MiB.
    assert verdict in planned("--device", "cpu", "--batch", "14", "--device-memory", memory)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("1.5 gb", 1.5e9), ("512", 512), ("16Mi", 2**24), ("L4", 24 * 2**30)],
)
def test_memory_is_given_as_a_size_or_a_name(text: str, size: float) -> None:
    assert bytes_of_device(text) == size


def test_offloading_moves_what_rests_to_the_host() -> None:
    output = planned("--offload", "--device", "cuda", "--ranks", "2")

    assert rows(output)["optimizer state"][0] == "0 B"
    # Shards, gradients and AdamW's two numbers: four times 875,264 / 2 numbers.
    assert "Host memory: 6.7 MiB per rank." in output
