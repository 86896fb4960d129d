"""Models of users' own in ``fullshard plan``: whatever their forward takes and returns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fullshard
from fullshard import FullyShardedDataParallel
from fullshard.cli.main import app
from fullshard.cli.options import Options
from fullshard.cli.planner.measure import watch_step
from fullshard.cli.planner.own_model import own_subject
from fullshard.cli.planner.prediction import predict_memory
from fullshard.cli.sharding import wrap_policy
from fullshard.testing import device, run_on_ranks

TRANSFORMERS = """
from transformers import (
    BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, GPT2Config,
    GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration,
)

BERT = BertConfig(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=100
)

def llama():
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1000,
    ))

def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=100))

def bert():
    return BertForMaskedLM(BERT)

def bert_classifier():
    return BertForSequenceClassification(BERT)

def bert_without_a_head():
    return BertModel(BERT)

def t5():
    return T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, vocab_size=100)
    )
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Plans a function of a module with the given text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "models_to_plan", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def call(text: str, function: str, *words: str) -> Any:
        (tmp_path / "models_to_plan.py").write_text(text)
        command = ["plan", "--model", f"models_to_plan:{function}", "--ranks", "2", *words]
        return CliRunner().invoke(app, command)

    return call


@pytest.mark.parametrize("words", [[], ["--checkpoint-activations", "--precision", "bfloat16"]])
@pytest.mark.parametrize(
    ("function", "units"),
    [
        ("llama", "LlamaForCausalLM of 239,040 parameters in 4 units"),
        ("gpt2", "in 4 units"),
        ("bert", "in 4 units"),
        ("bert_classifier", "in 4 units"),
        ("t5", "in 7 units"),
    ],
)
def test_models_of_transformers_are_planned_as_they_are(
    plan, function: str, units: str, words: list[str]
) -> None:
    pytest.importorskip("transformers")

    planned = plan(TRANSFORMERS, function, "--sequence", "32", *words)

    assert planned.exception is None, planned.exception
    assert units in planned.output


def test_a_model_without_loss_or_logits_is_refused_with_what_it_returned(plan) -> None:
    pytest.importorskip("transformers")

    refused = str(plan(TRANSFORMERS, "bert_without_a_head").exception)

    assert "with last_hidden_state, pooler_output, but a tensor, or 'loss' or 'logits'" in refused
    assert refused.endswith("; return the model and loss(model, sequences, length)")


OUTPUTS = """
from dataclasses import dataclass
from torch import Tensor, nn

@dataclass
class Output:
    logits: Tensor

class Model(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.tokens, self.head, self.output = nn.Embedding(256, 64), nn.Linear(64, 256), output

    def forward(self, tokens):
        return self.output(self.head(self.tokens(tokens)))

def tensor():
    return Model(lambda logits: logits)

def tuple_with_logits_first():
    return Model(lambda logits: (logits, None, logits.mean()))

def dictionary():
    return Model(lambda logits: {"hidden": None, "logits": logits})

def instance():
    return Model(Output)

def one_number():
    return Model(lambda logits: logits.logsumexp(-1).mean())

def loss_in_a_dictionary():
    return Model(lambda logits: {"loss": logits.logsumexp(-1).mean(), "logits": logits})

class WithTargets(Model):
    def forward(self, tokens, targets=None):
        logits = super().forward(tokens)
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def takes_targets():
    return WithTargets(lambda logits: logits)

class Peculiar(Model):
    def backward_fails(self, gradient):
        raise ValueError("not backward")

    def forward(self, tokens):
        logits = super().forward(tokens)
        logits.register_hook(self.backward_fails)
        return logits

def fails_in_backward():
    return Peculiar(lambda logits: logits)

def nothing():
    return Model(lambda logits: {"hidden": logits})

def vector():
    return Model(lambda logits: logits.mean((1, 2)))
"""


def activations(planned: Any) -> str:
    (row,) = [line for line in planned.output.splitlines() if line.startswith("│ activations")]
    return row


@pytest.mark.parametrize(
    "function", ["tuple_with_logits_first", "dictionary", "instance", "takes_targets"]
)
def test_logits_are_found_in_what_a_model_returns(plan, function: str) -> None:
    expected = plan(OUTPUTS, "tensor")

    found = plan(OUTPUTS, function)

    assert found.exit_code == 0, found.exception
    assert activations(found) == activations(expected)


@pytest.mark.parametrize("function", ["one_number", "loss_in_a_dictionary"])
def test_a_loss_that_a_model_computes_itself_is_taken(plan, function: str) -> None:
    planned = plan(OUTPUTS, function)

    assert planned.exit_code == 0, planned.exception
    # Cross entropy would keep its probabilities until backward, as large as the logits.
    assert activations(planned) != activations(plan(OUTPUTS, "tensor"))


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("nothing", "the model returned a dict with hidden, but a tensor, or 'loss' or 'logits'"),
        ("vector", "returned a tensor of shape (8,), which is neither a loss nor logits; return"),
        ("fails_in_backward", "a step of the model fails on the meta device: ValueError: not bac"),
    ],
)
def test_what_is_not_understood_is_said_in_one_line(plan, function: str, complaint: str) -> None:
    refused = str(plan(OUTPUTS, function).exception)

    assert refused.startswith(f"models_to_plan:{function}: ")
    assert complaint in refused
    assert "\n" not in refused


def test_an_ascii_terminal_shows_what_it_can_of_a_plan(tmp_path: Path) -> None:
    (tmp_path / "modeles.py").write_text(
        "from torch import nn\n"
        "class Modèle(nn.Sequential): pass\n"
        "def build(): return Modèle(nn.Embedding(256, 8), nn.Linear(8, 256))\n",
        encoding="utf-8",
    )
    ascii_alone = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    ascii_alone["PYTHONPATH"] = str(Path(fullshard.__file__).parents[1])
    command = [sys.executable, "-m", "fullshard", "plan", "--model", "modeles:build"]

    output = subprocess.check_output(command, cwd=tmp_path, env=ascii_alone, text=True)

    assert output.startswith("Mod?le of 4,352 parameters in 1 unit, ")


@dataclass(frozen=True)
class Sizes:
    batch: int
    length: int


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=2000,
            use_cache=False,
        )
    )


def measure_llama(sizes: Sizes) -> int:
    bare = llama()
    policy = wrap_policy(bare, "LlamaDecoderLayer")
    model = FullyShardedDataParallel(
        bare, auto_wrap_policy=policy, device_id=device(), use_orig_params=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        tokens = torch.randint(2000, (sizes.batch, sizes.length), device=device())
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    peaks = []
    # Threads of gloo may hold memory for a moment longer: the least of three steps counts.
    for _ in range(3):
        state = [t for entry in optimizer.state.values() for t in entry.values()]
        with watch_step(device(), [*model.parameters(), *state]) as measured:
            step()
        assert measured.peak is not None
        peaks.append(measured.peak)
    return min(peaks)


def test_the_plan_of_a_llama_is_within_a_tenth_of_what_a_step_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "module_of_a_llama", sys.modules[__name__])
    options = Options(batch=8, sequence=64, wrap="LlamaDecoderLayer")

    _, predicted = predict_memory(own_subject("module_of_a_llama:llama"), options, 2, device())
    measured = max(run_on_ranks(2, measure_llama, Sizes(batch=4, length=64)))

    assert predicted.total == pytest.approx(measured, rel=0.1)
