"""Every file in examples/ runs, as a user would run it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.marks import in_long_runs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


FILES = sorted(EXAMPLES.glob("*.py"))
Printed = dict[str, Future[str]]


def run_example(file: Path) -> str:
    finished = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def printed() -> Iterator[Printed]:
    """What each example prints; all of them run at the same time."""
    with ThreadPoolExecutor() as pool:
        yield {file.name: pool.submit(run_example, file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_runs(file: Path, printed: Printed) -> None:
    assert printed[file.name].result()


def test_training_on_two_ranks_learns_the_sum(printed: Printed) -> None:
    losses = re.findall(r"loss ([\d.]+)", printed["train_two_ranks.py"].result())

    first, *_, last = map(float, losses)
    assert last < first / 5


def test_adapters_learn_and_cost_gradients_and_optimizer_state_of_their_own_size_only(
    printed: Printed,
) -> None:
    output = printed["lora.py"].result()

    for name in ("LoRA", "full fine-tuning"):
        losses = [float(x) for x in re.findall(rf"{name} +step +\d+ +loss ([\d.]+)", output)]
        assert losses[-1] < losses[0] / 5, name
    rows = dict(re.findall(r"^(\w[\w ,]+?) {2,}.* ([\d.]+)$", output, re.MULTILINE))
    # Adapters are in float32 beside a base of bfloat16: twice the bytes of their share.
    share = float(rows["trainable parameters, whole model"])
    assert share < 0.05
    assert float(rows["gradients"]) <= 2 * share + 0.01
    assert float(rows["optimizer state"]) <= 2 * share + 0.01
    assert float(rows["parameter shards"]) < 1.1


def test_adapters_beside_quantised_weights_learn_as_in_one_process(printed: Printed) -> None:
    for needed in ("bitsandbytes", "peft", "transformers"):
        pytest.importorskip(needed)
    output = printed["qlora.py"].result()

    assert output.count("as in one process") == 2
    for kept, whole in re.findall(r"(\d+) KiB per rank, of (\d+)", output):
        assert float(kept) <= float(whole) / 2 + 1
    first, last, *_ = map(float, re.findall(r"\d\.\d+", output))
    assert last < first * 0.75
    beside, merged = map(float, re.findall(r"\d\.\d+", output.splitlines()[-1]))
    assert merged == pytest.approx(beside, rel=0.05)


@pytest.mark.parametrize(
    "document", ["README.md", pytest.param("docs/index.md", marks=in_long_runs)]
)
def test_the_first_example_of_a_document_runs_as_it_says(document: str, tmp_path: Path) -> None:
    text = (EXAMPLES.parent / document).read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert "fullshard run --ranks 2 first.py" in text
    (tmp_path / "first.py").write_text(code[1])

    launcher = [sys.executable, "-m", "fullshard.cli.launcher.run", "--ranks", "2", "first.py"]
    finished = subprocess.run(launcher, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    for rank in range(2):
        printed = re.findall(rf"rank {rank}: step (\d), loss ([\d.]+)", finished.stdout)
        assert [step for step, _ in printed] == ["0", "1", "2"]
        assert float(printed[-1][1]) < float(printed[0][1])
    said = re.findall(r"^rank \d: step \d, loss [\d.]+$", text, re.MULTILINE)
    # Ranks that print at the same time may share a line.
    assert sorted(said) == sorted(re.findall(r"rank \d: step \d, loss [\d.]+", finished.stdout))
