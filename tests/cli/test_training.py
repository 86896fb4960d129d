"""Training on ranks: what it leaves, and that a run that is continued is the same run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import StopRequest, latest
from fullshard.cli.data import read_text
from fullshard.cli.model import GPT, next_token_loss
from fullshard.cli.options import Options
from fullshard.cli.problems import BadInput
from fullshard.cli.trainer.optimization import learning_rate
from fullshard.cli.trainer.reports import draw_losses
from fullshard.cli.trainer.resumption import resumption_in_words
from fullshard.cli.trainer.run_folder import RunFolder
from fullshard.cli.trainer.train import Request, nothing_to_do, prepare
from fullshard.cli.trainer.training import materializer, train
from fullshard.testing import RanksFailed, device, run_on_ranks

OPTIONS = Options(
    layers=2,
    heads=2,
    width=16,
    sequence=32,
    batch=8,
    steps=8,
    warmup=2,
    log_every=1,
    save_every=4,
    keep=9,
    sample=8,
)


def run(
    folder: Path, ranks: int = 2, resume: bool = False, stop_rank: int = -1, **given: Any
) -> list[dict[str, Any]]:
    """Train on real ranks; returns the metrics that are in the folder afterwards."""
    options = dataclasses.replace(OPTIONS, device=device().type, **given)
    run_on_ranks(ranks, train_on_rank, options, folder, resume, stop_rank)
    return RunFolder(folder).read_metrics()


def train_on_rank(options: Options, path: Path, resume: bool, stop_rank: int) -> None:
    folder = RunFolder(path)
    if dist.get_rank() == 0:
        folder.write_options(options)
    with StopRequest() as stop:
        if dist.get_rank() == stop_rank:
            stop.signal = signal.SIGTERM
        train(options, folder, resume, stop)


def losses(metrics: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in metrics]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "complete"
    run(folder)
    return folder


def half(complete: Path, folder: Path) -> Path:
    """The same run as if it had been killed after its fifth step."""
    shutil.copytree(complete, folder)
    for later in (folder / "checkpoints").glob("step-*8"):
        shutil.rmtree(later)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    return folder


def test_a_run_leaves_options_metrics_a_picture_checkpoints_and_a_sample(complete: Path) -> None:
    metrics = RunFolder(complete).read_metrics()

    assert [line["step"] for line in metrics] == [*range(1, 9)]
    assert losses(metrics)[0] > losses(metrics)[-1]
    assert metrics[-1]["memory_bytes"] is None or metrics[-1]["memory_bytes"] > 0
    assert metrics[-1]["memory_bytes_predicted"] > 0
    if importlib.util.find_spec("matplotlib"):
        assert (complete / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (complete / "sample.txt").read_text().startswith("def ")
    assert RunFolder(complete).options().steps == 8
    assert len([*(complete / "checkpoints").glob("step-*")]) == 2


def test_losses_are_those_of_the_bare_model_on_the_whole_batch(complete: Path) -> None:
    options, text = OPTIONS, read_text("")
    with torch.device("meta"):
        model = GPT(options.size(), options.sequence)
    for module in model.modules():
        if module._parameters:
            materializer(model, options.seed, torch.device("cpu"))(module)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    expected = []
    for step in range(1, 9):
        loss = next_token_loss(model, text.batch(0, step, range(8), options.sequence))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    found = losses(RunFolder(complete).read_metrics())

    # Another device draws other initial values; there the first loss alone is compared, roughly.
    if device().type == "cpu":
        assert found == pytest.approx(expected, rel=1e-4)
    assert found[0] == pytest.approx(expected[0], rel=0.05)


def test_parameters_that_are_lost_in_a_step_are_not_saved(tmp_path: Path) -> None:
    # A rate at which gradients, and with them parameters, are lost before the loss is. The step in
    # which that happens depends on how the processor rounds.
    with pytest.raises(RanksFailed, match="the gradient norm is nan at step") as failed:
        run(tmp_path, save_every=1, learning_rate=1000.0, warmup=1, keep=1)

    lost = re.search(r"at step (\d+), which was not saved", str(failed.value))
    assert lost is not None
    assert latest(tmp_path / "checkpoints").step == int(lost[1]) - 1


def test_a_checkpoint_of_another_model_is_refused(complete: Path) -> None:
    request = Request({"width": 32}, name=complete.name, runs=complete.parent, resume=True)
    before = (complete / "config.toml").read_text()

    with pytest.raises(BadInput, match="another model: its width is 16, but --width 32 was given"):
        prepare(request, ranks=2)
    assert (complete / "config.toml").read_text() == before


def damage(checkpoint: Path) -> Path:
    """Turn a bit in a checkpoint's data, which shows when it is read."""
    largest = max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return largest


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    complete: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(complete, tmp_path / "damaged"))
    newest = folder / "checkpoints" / "step-00000008"
    damage(newest)
    before = {file.name: file.read_bytes() for file in newest.iterdir()}

    prepare(Request({}, name="damaged", runs=tmp_path, resume=True), ranks=2)
    metrics = run(folder, resume=True)

    # Steps 5 to 8 were made again, and the last was saved beside the damaged one.
    assert losses(metrics) == losses(RunFolder(complete).read_metrics())
    after = {file.name: file.read_bytes() for file in newest.iterdir()}
    assert str(newest) in after.pop("damaged.txt").decode()
    assert after == before
    saved = latest(folder / "checkpoints")
    assert saved is not None
    assert saved.path.name == "step-00000008.1"
    again = {file.name: file.read_bytes() for file in saved.path.iterdir()}
    assert again == files_of(complete, 8)


def test_a_run_of_whose_checkpoints_none_is_whole_does_not_begin_again(
    complete: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(complete, tmp_path / "damaged"))
    damaged = [damage(checkpoint) for checkpoint in (folder / "checkpoints").glob("step-*")]
    files = [folder / name for name in ("metrics.jsonl", "config.toml")]
    before = [file.read_bytes() for file in files]

    request = Request({"steps": 99}, name="damaged", runs=tmp_path, resume=True)
    prepare(request, ranks=2)[1].unlock()
    with pytest.raises(BaseException, match=r"BadInput: No checkpoint in .* is whole") as caught:
        run(folder, resume=True)

    assert len(damaged) == 2
    for file in damaged:
        assert f"{file} is damaged" in str(caught.value)
    assert [file.read_bytes() for file in files] == before
    for file in damaged:
        file.unlink()
    with pytest.raises(BadInput, match=r"No checkpoint in .* is whole: .* is missing"):
        prepare(request, ranks=2)


def test_a_damaged_index_is_not_a_reason_to_remove_checkpoints(
    complete: Path, tmp_path: Path
) -> None:
    shutil.copytree(complete, tmp_path / "damaged")
    (tmp_path / "damaged" / "checkpoints" / "checkpoints.json").write_text("")
    with pytest.raises(BadInput, match="remove the index") as caught:
        prepare(Request({}, name="damaged", runs=tmp_path, resume=True), ranks=2)
    assert "folder to continue" not in str(caught.value)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_unasked(
    complete: Path, tmp_path: Path
) -> None:
    shutil.copytree(complete, tmp_path / "lost")
    for checkpoint in (tmp_path / "lost" / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(BadInput, match=r"lists step-.*, but no checkpoint is there"):
        prepare(Request({}, name="lost", runs=tmp_path, resume=True), ranks=2)


def test_a_run_that_another_process_trains_is_refused(complete: Path, tmp_path: Path) -> None:
    shutil.copytree(complete, tmp_path / "busy")
    request = Request({}, name="busy", runs=tmp_path, resume=True)
    refused = pytest.raises(BadInput, match=r"another process is training in .*busy; stop it")
    before = (tmp_path / "busy" / "config.toml").read_text()
    _, folder = prepare(request, ranks=2)
    with refused:
        prepare(dataclasses.replace(request, flags={"steps": 99}), ranks=2)
    assert folder.options() == dataclasses.replace(OPTIONS, device=device().type)
    assert (tmp_path / "busy" / "config.toml").read_text() == before
    folder.unlock()
    prepare(request, ranks=2)


def test_a_folder_is_made_by_one_of_two_that_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_while_another_starts(*_: Any) -> None:
        monkeypatch.setattr("fullshard.cli.trainer.train.check_run", lambda *_: None)
        other.append(prepare(request, ranks=2)[1])

    other: list[RunFolder] = []
    for name in ("same", None):
        request = Request({}, name=name, runs=tmp_path)
        monkeypatch.setattr("fullshard.cli.trainer.train.check_run", check_while_another_starts)
        if name is not None:
            with pytest.raises(BadInput, match="already exists"):
                prepare(request, ranks=2)
        else:
            assert prepare(request, ranks=2)[1].path != other[-1].path


def test_a_link_that_leads_nowhere_is_no_place_for_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullshard.cli.trainer.train.check_run", lambda *_: None)
    (tmp_path / "runs").symlink_to("/nowhere/at/all")
    with pytest.raises(BadInput, match="cannot be written"):
        prepare(Request({}, runs=tmp_path / "runs"), ranks=2)
    (tmp_path / "run-1").symlink_to("/nowhere/at/all")
    assert prepare(Request({}, runs=tmp_path), ranks=2)[1].path.name == "run-2"
    with pytest.raises(BadInput, match="already exists"):
        prepare(Request({}, name="run-1", runs=tmp_path), ranks=2)


def test_metrics_that_something_else_damaged_do_not_end_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b'{"step": 1}\n{}\n[2]\n\xff\n{"step": 2}\n{"step": 3}\n{"st')
    folder.drop_metrics_after(2)
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_remembered_once(name: str) -> None:
    number = signal.Signals[name]
    # Whoever started the tests may ignore it, as shells do for what runs in the background.
    before = signal.signal(number, signal.default_int_handler)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            assert stop.signal is number
            os.kill(os.getpid(), number)  # from the launcher, which passes on what it is sent
            assert stop.exit_status == 128 + number
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_folder_knows_what_leads_to_it(tmp_path: Path) -> None:
    assert RunFolder(Path("runs/first")).flags == ["--name", "first"]
    assert RunFolder(tmp_path / "a b").flags == ["--name", "a b", "--runs", str(tmp_path)]


def test_a_run_cannot_be_continued_to_a_step_behind_it(complete: Path) -> None:
    request = Request({"steps": 5}, name=complete.name, runs=complete.parent, resume=True)

    with pytest.raises(BadInput, match=r"is already at step 8, past --steps 5; pass more than 8"):
        prepare(request, ranks=2)


def test_a_finished_run_has_nothing_to_do_unless_its_sample_is_wanted(
    complete: Path, tmp_path: Path
) -> None:
    shutil.copytree(complete, tmp_path / "done")
    request = Request({}, name="done", runs=tmp_path, resume=True)

    said = nothing_to_do(request)

    assert said is not None
    assert "done is finished, at step 8 of 8: there is nothing to do" in said
    assert said.endswith(f"fullshard train --resume --name done --runs {tmp_path} --steps 16")
    for flags in ({"steps": 9}, {"sample": 9}):
        assert nothing_to_do(dataclasses.replace(request, flags=flags)) is None
    (tmp_path / "done" / "sample.txt").unlink()
    assert nothing_to_do(request) is None


@pytest.mark.parametrize(
    ("given", "done", "said"),
    [
        ({}, 100, None),
        ({"batch": 32}, 50, None),
        ({"schedule": "constant", "learning_rate": 0.1}, 100, None),
        # About half of the way from 1 down to 0.1.
        (
            {"steps": 200},
            100,
            "up from 0.1 to 0.543: the cosine schedule now ends at step 200, not",
        ),
        (
            {"steps": 60},
            30,
            "down from 0.815 to 0.526: the cosine schedule now ends at step 60, no",
        ),
        ({"learning_rate": 2.0}, 100, "up from 0.1 to 0.2: by the new options"),
        ({"schedule": "constant", "learning_rate": 0.55}, 50, "stays at 0.55: by the new options"),
    ],
    ids=str,
)
def test_a_continued_run_says_where_its_learning_rate_jumps(
    given: dict[str, Any], done: int, said: str | None
) -> None:
    before = Options(steps=100, warmup=0, learning_rate=1.0)

    rows = resumption_in_words(before, dataclasses.replace(before, **given), done)

    assert rows["resuming"] == f"after step {done}"
    assert rows.get("rate", "")[: len(said or "")] == (said or "")
    assert ("rate" in rows) == (said is not None)


def test_options_given_to_a_resumed_run_are_kept_once_its_checkpoint_is_loaded(
    complete: Path, tmp_path: Path
) -> None:
    shutil.copytree(complete, tmp_path / "longer")
    folder = RunFolder(tmp_path / "longer")

    run(folder.path, resume=True, steps=9)

    assert folder.values()["steps"] == 9
    assert [metrics["step"] for metrics in folder.read_metrics()] == list(range(1, 10))
    assert not folder.proposed.exists()


def test_a_resumed_run_on_the_same_ranks_is_the_same_to_the_bit(
    complete: Path, tmp_path: Path
) -> None:
    folder = half(complete, tmp_path / "half")

    metrics = run(folder, resume=True)

    assert losses(metrics) == losses(RunFolder(complete).read_metrics())
    assert [line["step"] for line in metrics] == [*range(1, 9)]
    # Parameters and the optimizer's state, as every rank wrote them.
    assert files_of(complete, 8) == files_of(folder, 8)


def files_of(folder: Path, step: int) -> dict[str, bytes]:
    (found,) = (folder / "checkpoints").glob(f"step-*{step}")
    files = {file.name: file.read_bytes() for file in found.iterdir()}
    assert len(files) > 2
    return files


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_resumed_run_on_other_ranks_goes_on_as_it_would_have(
    complete: Path, tmp_path: Path, ranks: int
) -> None:
    folder = half(complete, tmp_path / "half")

    metrics = run(folder, ranks=ranks, resume=True)

    assert losses(metrics) == pytest.approx(losses(RunFolder(complete).read_metrics()), rel=1e-4)


@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "shard_grad_op"},
        {"strategy": "no_shard"},
        {"strategy": "hybrid_shard"},
        {"checkpoint_activations": True},
        {"accumulate": 2},
        {"wrap": "size=1000"},
        {"wrap": "none", "offload": True},
        {"capture": True},
    ],
    ids=str,
)
def test_how_a_model_is_sharded_does_not_change_what_it_learns(
    complete: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    metrics = run(tmp_path / "run", **given)

    assert losses(metrics) == pytest.approx(losses(RunFolder(complete).read_metrics()), rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_with_muon_that_is_resumed_on_other_ranks_goes_on_as_it_would_have(
    tmp_path: Path, ranks: int
) -> None:
    run(tmp_path / "muon", optimizer="muon")
    found = losses(RunFolder(tmp_path / "muon").read_metrics())
    assert found[-1] < found[0]
    folder = half(tmp_path / "muon", tmp_path / "half")

    metrics = run(folder, ranks=ranks, resume=True, optimizer="muon")

    # The matrices are orthogonalized in bfloat16, which enlarges differences in the last bits.
    assert losses(metrics)[:4] == found[:4]
    assert losses(metrics) == pytest.approx(found, rel=1e-3)


def test_low_precision_learns_nearly_the_same(complete: Path, tmp_path: Path) -> None:
    metrics = run(tmp_path / "run", precision="bfloat16")

    assert losses(metrics) == pytest.approx(losses(RunFolder(complete).read_metrics()), rel=0.02)


def test_when_one_rank_is_asked_to_stop_all_save_the_same_step(tmp_path: Path) -> None:
    metrics = run(tmp_path / "run", stop_rank=1)

    assert [line["step"] for line in metrics] == [1]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) == 1


def test_a_picture_that_cannot_be_drawn_ends_no_training(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "run" / "loss.png").mkdir(parents=True)

    metrics = run(tmp_path / "run")

    assert len(metrics) == 8
    assert (tmp_path / "run" / "sample.txt").exists()


def test_a_picture_says_why_it_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = {"step": 1, "loss": 1.0, "learning_rate": 0.1}
    (tmp_path / "loss.png").mkdir()

    assert "matplotlib failed with IsADirectoryError" in draw_losses([line], tmp_path / "loss.png")
    assert "matplotlib failed with KeyError: 'loss'" in draw_losses([{"step": 1}], tmp_path / "a")
    assert draw_losses([], tmp_path / "a.png") == "there are no metrics"


def test_the_name_of_a_run_is_no_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / r"price $\frac{$"
    folder.mkdir()

    assert draw_losses([{"step": 1, "loss": 1.0, "learning_rate": 0.1}], folder / "loss.png") == ""


def test_a_complete_run_that_is_resumed_trains_no_more(complete: Path, tmp_path: Path) -> None:
    shutil.copytree(complete, tmp_path / "again")

    metrics = run(tmp_path / "again", resume=True)

    assert json.dumps(metrics) == json.dumps(RunFolder(complete).read_metrics())
