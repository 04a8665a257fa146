from pathlib import Path

import pytest
from config import load_config


@pytest.fixture
def demo(examples: Path) -> str:
    return (examples / "demo.toml").read_text()


def write(path: Path, text: str) -> Path:
    file = path / "job.toml"
    file.write_text(text)
    return file


def test_the_demo_job_reads_into_nested_objects(examples: Path) -> None:
    config = load_config(examples / "demo.toml")
    assert config.optimizer.name == "AdamW"
    assert config.optimizer.implementation == "fused"
    assert config.optimizer.early_step_in_backward is False
    assert config.optimizer.max_grad_norm > 0
    assert config.parallelism.pipeline_parallel_degree == 1
    assert config.training.steps >= 2 * config.checkpoint.interval


def test_a_whole_number_serves_as_a_float_and_an_absent_option_as_none(
    demo: str, tmp_path: Path
) -> None:
    text = demo.replace("max_grad_norm = 1.0", "max_grad_norm = 2").replace("decay_ratio", "#")
    config = load_config(write(tmp_path, text))
    assert config.optimizer.max_grad_norm == 2
    assert isinstance(config.optimizer.max_grad_norm, float)
    assert config.lr_scheduler.decay_ratio is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 400", "", r"training\.steps is missing"),
        ("steps = 400", "stepz = 500", r"training\.stepz is not a known key; known: steps, "),
        ("steps = 400", "steps = 5e2", r"training\.steps is 500\.0 \(float\), expected int"),
        ("steps = 400", "steps = true", r"training\.steps is True \(bool\), expected int"),
        ("lr = 1.2e-3", "lr = '1.2e-3'", r"optimizer\.lr is '1\.2e-3' \(str\), expected float"),
        ("decay_ratio = 0.4", "decay_ratio = 'no'", r"lr_scheduler\.decay_ratio is 'no'"),
        ("[checkpoint]", "[checkpoints]", r"checkpoints is not a known key"),
        ("[parallelism]", "[training.parallelism]", r"training\.parallelism is not a known key"),
        ("eps = 1e-8", "eps = ", r"Invalid value"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_key(
    demo: str, tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in demo
    path = write(tmp_path, demo.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"job\.toml: .*{message}"):
        load_config(path)


def test_a_value_in_place_of_a_section_is_refused(demo: str, tmp_path: Path) -> None:
    start = demo.index("[checkpoint]")
    text = "checkpoint = 3\n" + demo[:start] + demo[demo.index("[validation]") :]
    with pytest.raises(ValueError, match=r"checkpoint is 3, expected a table"):
        load_config(write(tmp_path, text))
