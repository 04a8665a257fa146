"""python -m torchopt_ext: commands, their exit codes, and the calls of `train`."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from torchopt_ext.__main__ import COMMANDS, main
from torchopt_ext.cli import train
from torchopt_ext.trainer.config import ConfigError, JobConfig

pytest.importorskip("tyro")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Stands in for the Trainer's class and its instance, and records their calls."""
    spy = MagicMock(stopped_by=None)
    spy.build.return_value = spy
    monkeypatch.setattr(train, "Trainer", spy.build)
    monkeypatch.setattr(dist, "destroy_process_group", spy.destroy)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return spy


def called(trainer: MagicMock) -> list[str]:
    return [name for name, *_ in trainer.mock_calls]


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["--help"]):
        assert main(args) == 0
        shown = capsys.readouterr().out
        assert all(name in shown and does in shown for name, (_, does) in COMMANDS.items())
    assert main(["trian"]) == 2
    assert "no command 'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_a_missing_package_is_named(
    trainer: MagicMock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["train"]) == 2
    assert "needs tyro" in capsys.readouterr().err


@pytest.mark.parametrize(("stopped_by", "code"), [(None, 0), ("data", 0), ("SIGTERM", 143)])
def test_train(trainer: MagicMock, stopped_by: str | None, code: int) -> None:
    trainer.stopped_by = stopped_by
    assert main(["train", "--training.steps", "7"]) == code
    assert called(trainer) == ["build", "train", "close", "destroy"]
    assert trainer.build.call_args.args[0].training.steps == 7


def test_modules_are_found_in_the_current_folder(
    trainer: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command `torchopt-ext` starts without the current folder in the path."""
    (tmp_path / "own_settings.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass JobConfig:\n    own: int = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert main(["train", "--job.custom_config_module=own_settings", "--own=2"]) == 0


def test_the_trainer_is_gone_before_the_process_group(
    trainer: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the group's threads would outlive the interpreter."""
    built: list[weakref.ref[MagicMock]] = []
    held_at_end = []

    def build(job_config: JobConfig) -> MagicMock:
        trainer = MagicMock(stopped_by=None)  # is part of a cycle
        built.append(weakref.ref(trainer))
        return trainer

    monkeypatch.setattr(train, "Trainer", build)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: held_at_end.append(built[0]()))
    assert main(["train"]) == 0
    assert held_at_end == [None]


def test_a_seed_checkpoint_is_saved_instead_of_training(trainer: MagicMock) -> None:
    assert main(["train", *SEED]) == 0
    assert called(trainer) == ["build", "checkpointer.save", "close", "destroy"]
    trainer.checkpointer.save.assert_called_with(0, force=True)


SEED = ["--checkpoint.create_seed_checkpoint", "--checkpoint.enable"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--training.step", "3"], "did you mean 'training.steps'?"),
        (["--comm.mode", "local_tensor"], "comm.mode is 'local_tensor'"),
        (SEED, "needs one process: WORLD_SIZE is 2"),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_path=/no/step-7"],
            "checkpoint.initial_load_path is /no/step-7, which is not a folder",
        ),
        (
            ["--checkpoint.enable", "--checkpoint.load_step", "7", "--job.dump_folder", "/no"],
            "checkpoint.load_step is 7, but there is no /no/checkpoint/step-7",
        ),
    ],
)
def test_wrong_configurations_end_with_one_sentence(
    args: list[str],
    message: str,
    trainer: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchopt_ext train: ")
    assert message in error
    assert error.count("\n") == 1
    assert called(trainer) == []


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("training.global_batch_size", "7", "global_batch_size is 7, expected a multiple of 8"),
        ("parallelism.tensor_parallel_degree", "2", "tp 2 = 2 ranks, but the world size is 1"),
        ("training.seq_len", "100000000", "has 0 samples of seq_len 100000000"),
        ("optimizer.rounding_seed", "3", "rounding_seed has no effect without stochastic_roun"),
        ("checkpoint.exclude_from_loading", "rgn", "exclude_from_loading has ['rgn'], expected"),
        ("experimental.custom_import", "examples.none", "there is no module 'examples.none' in"),
        ("job.config_file", "none.toml", "there is no none.toml"),
        ("job.save_config_file", "/dev/null/x", "job.save_config_file cannot be written: [Errno"),
        ("job.dump_folder", "/dev/null/out", "dump_folder cannot be created: [Errno 20] N"),
    ],
)
def test_wrong_configurations_that_the_trainer_finds(
    setting: str,
    value: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores them
        monkeypatch.delenv(name)
    config = ["--config", str(ROOT / "examples/debug.toml"), "--job.dump_folder", str(tmp_path)]
    assert main(["train", *config, f"--{setting}", value]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("torchopt_ext train: ")
    assert message in last
    assert not dist.is_initialized()


def test_a_folder_of_checkpoints_is_not_a_checkpoint(
    trainer: MagicMock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 10):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / ".metadata").touch()
    load = f"--checkpoint.initial_load_path={tmp_path}"
    assert main(["train", "--checkpoint.enable", load]) == 2
    assert f"name one of them, such as {tmp_path}/step-10" in capsys.readouterr().err


def test_errors_of_a_job(
    trainer: MagicMock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    trainer.train.side_effect = RuntimeError("gone wrong")
    with pytest.raises(RuntimeError, match="gone wrong"):
        main(["train"])
    assert called(trainer) == ["build", "train", "close"]
    assert "gone wrong" in error_file.read_text()  # torchrun shows what @record writes
    assert [*tmp_path.iterdir()] == [error_file]
    trainer.build.side_effect = ConfigError("model.name is wrong")
    assert main(["train"]) == 2
    assert "torchopt_ext train: model.name is wrong" in capsys.readouterr().err
    assert main(["train", "--lr", "3e-4"]) == 2
    assert "there is no setting lr" in error_file.read_text()


def test_what_ends_while_it_writes_its_error_leaves_no_file(
    trainer: MagicMock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(json, "dump", MagicMock(side_effect=KeyboardInterrupt))
    trainer.train.side_effect = RuntimeError("gone wrong")
    assert main(["train"]) == 130
    assert not file.exists()


def test_importing_the_package_imports_neither_tyro_nor_the_trainer() -> None:
    code = (
        "import sys, torchopt_ext; print([m for m in sys.modules if m == 'tyro' "
        "or m.startswith(('torchopt_ext.trainer', 'torchopt_ext.cli'))])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert ran.stdout.strip() == "[]"
