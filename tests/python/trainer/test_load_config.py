"""A job's configuration: files, command lines, torchtitan's names, and rejected settings."""

import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import tomllib
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from torchopt_ext.optim.options import CONFIGURED
from torchopt_ext.state.algorithms import ALGORITHMS
from torchopt_ext.trainer import config
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.load_config import (
    REJECTED,
    RENAMED,
    check_supported,
    load_config,
    settings_of,
)

pytest.importorskip("tyro")
FILE = Path(__file__).with_name("torchtitan_0_2_2.toml")
# The settings of torchtitan 0.1.0 that 0.2.2 lacks, most with another value than the default.
OF_0_1_0 = {
    "job.use_for_integration_test": True, "job.print_args": True, "lr_scheduler.lr_min": 0.25,
    "training.compile": True, "training.seed": 7, "training.deterministic": True,
    "parallelism.enable_compiled_autograd": True,
    "parallelism.pipeline_parallel_split_points": ["a", "b"], "checkpoint.enable_checkpoint": True,
    "checkpoint.initial_load_model_weights_only": False,
    "checkpoint.last_save_model_weights_only": True, "memory_estimation.enabled": True,
    "float8.enable_fsdp_float8_all_gather": True, "float8.recipe_name": "rowwise_with_gw_hp",
    "float8.precompute_float8_dynamic_scale_for_fsdp": True, "float8.filter_fqns": ["a", "b"],
    "float8.force_recompute_fp8_weight_in_bwd": True, "float8.emulate": True,
    "mx.use_fp8_dim1_cast_triton_kernel": False, "mx.recipe_name": "mxfp8",
    "mx.filter_fqns": ["a", "b"], "fault_tolerance.sync_steps": 8,
    "fault_tolerance.should_quantize": True, "fault_tolerance.fragment_sync_delay": 3,
    "fault_tolerance.fragment_update_alpha": 0.25,
}  # fmt: skip
HAS_TORCHTITAN = importlib.util.find_spec("torchtitan") is not None and (
    importlib.metadata.version("torchtitan") == "0.2.2"
)


def get(config: Any, name: str) -> Any:
    unused = getattr(config, "unused", {})
    return unused[name] if name in unused else reduce(getattr, name.split("."), config)


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def write(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


# ---- what is read --------------------------------------------------------------------------------


def test_the_seed_s_defaults() -> None:
    job = load_config([])
    expected = {
        "training.batch_size": 8,
        "training.seq_len": 2048,
        "training.max_norm": 1.0,
        "training.steps": 10000,
        "training.gc_freq": 50,
        "training.seed": None,
        "optimizer.lr": None,
        "optimizer.implementation": "fused",
        "lr_scheduler.warmup_steps": 200,
        "parallelism.data_parallel_shard_degree": -1,
        "checkpoint.enable_checkpoint": False,
        "checkpoint.interval": 500,
        "checkpoint.model_weights_only": False,
        "comm.train_timeout_seconds": 100,
        "experimental.custom_import": "",
    }
    assert {name: get(job, name) for name in expected} == expected
    check_supported(job)


@pytest.fixture(params=["0.1.0", "0.2.2"])
def torchtitans(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The path of a file with a version's settings."""
    lines = (f"{name} = {json.dumps(value)}" for name, value in OF_0_1_0.items())
    return str(FILE) if request.param == "0.2.2" else write(tmp_path, "\n".join(lines))


def test_every_setting_of_torchtitan_s_files(torchtitans: str) -> None:
    values = dict(leaves(tomllib.loads(Path(torchtitans).read_text())))
    assert len(values) in (25, 146)
    config = load_config(["--config", torchtitans])
    for name, value in values.items():
        assert get(config, RENAMED.get(name, name)) == value, name
    assert config.job.config_file == torchtitans


@pytest.mark.skipif(not HAS_TORCHTITAN, reason="needs torchtitan 0.2.2")
def test_files_are_read_as_torchtitan_reads_them() -> None:
    from torchtitan.config import ConfigManager

    args = ["--job.config_file", str(FILE), "--training.local_batch_size", "5"]
    theirs, ours = ConfigManager().parse_args(args), load_config(args)
    for name, value in leaves(theirs.to_dict()):
        if name != "experimental.custom_args_module":
            assert get(ours, RENAMED.get(name, name)) == value, name


def sample(kind: Any) -> str | None:
    """Returns a value of a setting, as written on a command line. None for a switch."""
    if get_origin(kind) in (Literal, list):
        return str(get_args(kind)[-1]) if get_origin(kind) is Literal else "layers.1,a b"
    if get_args(kind):  # a union
        return sample(get_args(kind)[0])
    return {bool: None, int: "3", float: "0.5", str: "a word"}[kind]


@pytest.mark.skipif(not HAS_TORCHTITAN, reason="needs torchtitan 0.2.2")
@pytest.mark.parametrize(("mark", "no", "equals"), [("_", "", True), ("-", "no-", False)])
def test_command_lines_are_read_as_torchtitan_reads_them(mark: str, no: str, equals: bool) -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.config import JobConfig as Theirs

    kinds, ours = settings_of(Theirs), settings_of(JobConfig)
    for name in ("job.config_file", "job.custom_config_module", "experimental.custom_args_module"):
        del kinds[name]
    args: list[str] = []
    for name, kind in kinds.items():
        # torchtitan does not check some of its choices
        choices = ours.get(name, kind) if get_origin(kind) is not Literal else kind
        value, spelled = sample(choices), name.replace("_", mark)
        section, _, last = spelled.rpartition(".")
        option = [f"--{section}.{no}{last}"] if value is None else [f"--{spelled}", value]
        args += ["=".join(option)] if equals else option
    theirs, read = ConfigManager().parse_args(args), load_config(args)
    for name in kinds:
        renamed = RENAMED.get(name, name)
        # torchtitan puts tokenizer_path into model.hf_assets_path
        if name != "model.hf_assets_path" and renamed in NAMES:
            assert get(read, renamed) == get(theirs, name), name


def test_an_extension_adds_and_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "extension_of_job.py").write_text(
        "from dataclasses import dataclass, field\nfrom enum import Enum\n"
        "from typing import Literal\n"
        "Kind = Enum('Kind', ('ONE', 'TWO'))\n"
        "@dataclass\nclass Mine:\n    how_many: int = 3\n    '''How many of mine.'''\n"
        "    kind: Kind = Kind.ONE\n"
        "    pair: tuple[Literal['a'], Literal['b']] = ('a', 'b')\n"
        "    modes: dict[str, Literal['a']] = field(default_factory=lambda: {'x': 'a'})\n"
        "    both: list[Literal['a', 'b']] | None = None\n"
        "@dataclass\nclass Training:\n    steps: int = 77\n    image_size: int = 256\n"
        "@dataclass\nclass JobConfig:\n    mine: Mine = field(default_factory=Mine)\n"
        "    training: Training = field(default_factory=Training)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "[mine]\nhow_many = 5\n[training]\nlocal_batch_size = 2\nimage_size = 64\n"
    names = ["job.custom_config_module", "experimental.custom_args_module"]
    for name in names:
        section, key = name.split(".")
        path = write(tmp_path, f"[{section}]\n{key} = 'extension_of_job'\n{text}")
        config: Any = load_config(["--config", path, "--training.image_size", "65"])
        assert isinstance(config, JobConfig)
        assert (config.mine.how_many, config.training.image_size) == (5, 65)
        assert (config.training.steps, config.training.batch_size) == (77, 2)
        assert config.job.custom_config_module == "extension_of_job"
        assert config.to_dict()["mine"] == vars(config.mine)
        check_supported(config)
        config.mine.both = ["b", "c"]
        with pytest.raises(ConfigError, match=r"^mine\.both is \['b', 'c'\], expected list"):
            check_supported(config)
    with pytest.raises(ConfigError, match="no setting mine"):
        load_config(["--mine.how_many", "4"])
    named = f"--{names[0]}=extension_of_job"
    config = load_config(["--mine.how_many", "4", named, "--mine.kind=TWO"])
    assert (config.mine.how_many, config.mine.kind.name) == (4, "TWO")
    with pytest.raises(ConfigError, match=r"kind is 'THREE', expected one of ONE, TWO"):
        load_config([named, "--mine.kind=THREE"])


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        (
            "[training]\nsteps = 5\ncompile = true\nseq_len = 6",
            "--training.steps=7 --compile.no-enable",
            {"training.steps": 7, "training.compile": False, "training.seq_len": 6},
        ),
        *(("", f"--training.compile={text}", {"training.compile": value})
          for text, value in (("true", True), ("True", True), ("false", False), ("False", False))),
        *(
            (file, option, {"model.converters": items})
            for text, items in (("a,b", ["a", "b"]), (" a , b", ["a", "b"]), ("", []))
            for file, option in ((f"[model]\nconverters = '{text}'", ""),  # as the seed's files
                                 ("", ["--model.converters", text]))
        ),
        (
            "[optimizer.lr_multipliers]\n'a,b=c' = 2\n'layers.0' = 0.5",
            "",
            {"optimizer.lr_multipliers": {"a,b=c": 2, "layers.0": 0.5}},
        ),
        (
            "[optimizer.lr_multipliers]\na = 2",
            ["--optimizer.lr_multipliers", "x=1, y=z=0.5"],
            {"optimizer.lr_multipliers": {"x": 1.0, "y=z": 0.5}},
        ),
    ],
)  # fmt: skip
def test_values_of_files_and_of_the_command_line(
    tmp_path: Path, text: str, args: Any, expected: dict[str, Any]
) -> None:
    options = args.split() if isinstance(args, str) else args
    job = load_config(["--config", write(tmp_path, text), *options])
    assert {name: get(job, name) for name in expected} == expected


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_config(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name, kind in settings_of(JobConfig).items():
        assert f"--{name}" in shown
        if kind is bool:
            section, _, last = name.rpartition(".")
            assert f"--{section}.no_{last}" in shown
    assert "Steps to train." in shown
    assert not any(f"--{name} " in shown for name in REJECTED)


def test_every_setting_has_a_text() -> None:
    """Next to the field, below it or, of a step's options, in its type."""
    lines = inspect.getsource(config).splitlines()
    for name in NAMES:
        section, _, field = name.rpartition(".")
        owner = type(get(JobConfig(), section)).__name__
        start = lines.index(f"class {owner}:")
        numbers = [n for n in range(start, len(lines)) if lines[n].startswith(f"    {field}: ")]
        if field in CONFIGURED and not numbers:
            continue
        assert "  # " in lines[numbers[0]] or lines[numbers[0] + 1].startswith('    """'), name


# ---- what is rejected ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--training.step", "3"], "no setting training.step; did you mean 'training.steps'?"),
        (["--optimizer.steps", "3"], "no setting optimizer.steps; did you mean 'training.steps'?"),
        (["--trainin.steps", "3"], "no setting trainin.steps; did you mean 'training.steps'?"),
        (["--optimizer.wd", "1"], "did you mean 'optimizer.weight_decay'?"),
        (["--optimizer.grad_clip", "1"], "did you mean 'training.max_norm'?"),
        (["--training.gradient_clip_val", "1"], "did you mean 'training.max_norm'?"),
        (["--training.learning_rate", "1"], "did you mean 'optimizer.lr'?"),
        (["--training.localbatch_size", "3"], "did you mean 'training.batch_size'?"),
        (["--qqq", "3"], "there is no setting qqq; --help lists all"),
        (["--training.steps", "x"], "training.steps is 'x', expected int"),
        (["--training.steps", "1.5"], "training.steps is '1.5', expected int"),
        (["--training.steps", "1", "2"], "training.steps is ['1', '2'], expected int"),
        (["--training.steps"], "training.steps is None, expected int"),
        (["--optimizer.lr=fast"], "optimizer.lr is 'fast', expected float"),
        (["--training.compile", "yes"], "training.compile is 'yes', expected bool"),
        (["--training.no_steps"], "training.no_steps is None, expected int"),
        (
            ["--optimizer.implementation", "best"],
            "expected Literal['for-loop', 'foreach', 'fused']",
        ),
        (["--optimizer.track", "norms,all"], "expected list[Literal['norms', 'lost_updates']]"),
        *(
            (["--optimizer.lr_multipliers", text], f"is '{text}', expected dict[str, float]")
            for text in ("x", "0.5", "=0.5", "a=b")
        ),
        (["100"], "'100' belongs to no option"),
        (["--model.name", "x", "--"], "'--' belongs to no option"),
        (["--config", "nowhere.toml"], "there is no nowhere.toml"),
        (["--job.custom_config_module", "nowhere"], "job.custom_config_module is 'nowhere'"),
    ],
)
def test_wrong_options(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(args)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstep = 3", "no setting training.step; did you mean 'training.steps'?"),
        ("[trainng]\n", "no setting trainng; did you mean 'training'?"),
        ("training = 3", "training is a section, expected one of its settings: training.<name>"),
        ("[training]\nsteps = true", "training.steps is True, expected int"),
        ("[training]\nsteps = 3.0", "training.steps is 3.0, expected int"),
        ("[optimizer.lr_multipliers]\na = 'x'", "lr_multipliers is .*, expected dict"),
        ("[training]\nlocal_batch_size = 'x'", "training.local_batch_size is 'x', expected int"),
        ("[training]\ncompile = 1", "training.compile is 1, expected bool"),
        ("[training]\nseed = 'x'", "training.seed is 'x', expected int . None"),
        ("[checkpoint]\nasync_mode = 'on'", "async_mode is 'on', expected Literal.'disabled'"),
        ("[training]\nbatch_size = 1\nlocal_batch_size = 2", "which are the same setting"),
        ("training", "cannot be read as TOML"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(["--config", write(tmp_path, text)])
    assert "\n" not in str(error.value)
    assert "job.toml" in str(error.value)


NAMES = [*settings_of(JobConfig)]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([f"--{name}" for name in NAMES]) | st.text(max_size=8), max_size=4))
def test_any_command_line_is_read_or_rejected(args: list[str]) -> None:
    assume(not any(arg in ("-h", "--help") or arg.startswith("--help=") for arg in args))
    assume(not any("custom_config_module" in arg for arg in args))
    with contextlib.suppress(ConfigError):
        load_config(args)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(name="training.steps", value="3")
@example(name="model.converters", value=[1, "--help"])
@example(name="optimizer.lr_multipliers", value="")
@example(name="optimizer.lr_multipliers", value=" , ")
@example(name="optimizer.lr_multipliers", value="a=2")
@given(name=st.sampled_from(NAMES), value=SCALARS | st.lists(SCALARS, max_size=2))
def test_any_value_in_a_file_is_kept_or_rejected(tmp_path: Path, name: str, value: Any) -> None:
    assume(name not in ("job.config_file", "job.custom_config_module"))
    assume("None" not in repr(value))
    assume("nan" not in repr(value))
    section, _, key = name.rpartition(".")
    literal = repr(value).replace("True", "true").replace("False", "false")
    path = write(tmp_path, f"[{section}]\n{key} = {literal}\n")
    try:
        written = tomllib.loads(Path(path).read_text())
    except (tomllib.TOMLDecodeError, UnicodeError):
        assume(False)
    expected = reduce(dict.__getitem__, name.split("."), written)
    try:
        kept = get(load_config(["--config", path]), name)
    except ConfigError as error:
        kept, message = None, str(error)
    if kept is None:
        assert message.startswith(f"in {path}, {name} is ")
        assert "expected" in message
    elif kept != expected:  # it is read as on the command line
        texts = [*map(str, expected)] if isinstance(expected, list) else [f"{expected}"]
        one = [f"--{name}={texts[0]}"] if len(texts) == 1 else [f"--{name}", *texts]
        assert kept == get(load_config(one), name)


# ---- what the Trainer does not support -----------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--parallelism.expert_parallel_degree=2", "parallelism.expert_parallel_degree is '2'"),
        ("--parallelism.enable_async_tensor_parallel", "enable_async_tensor_parallel is True"),
        ("--memory_estimation.enable", "memory_estimation.enabled is True"),
        ("--comm.mode=fake_backend", "comm.mode is 'fake_backend'"),
        ("--checkpoint.last_save_in_hf", "export_safetensors"),
        ("--activation_checkpoint.mode=memory_budget", "mode is 'memory_budget'"),
        ("--training.max_norm=0", "training.max_norm is 0.0, expected a positive number"),
        ("--training.max_norm=nan", "training.max_norm is nan, expected a positive number"),
        ("--training", "training is a section, expected one of its settings: training.<name>"),
        ("--training.dataloader.prefetch_factor=0", "prefetch_factor is 0, expected a number of 1"),
        ("--training.gc_freq=0", "training.gc_freq is 0, expected a number of 1 or more"),
        ("--training.local_batch_size=0", "training.batch_size is 0, expected a number of 1 or"),
        ("--training.global_batch_size=-2", "training.global_batch_size is -2, expected a number"),
        ("--validation.steps=-2", "validation.steps is -2, expected a number of -1 or more"),
        *(
            (f"--optimizer.lr={lr}", f"optimizer.lr is {lr}, expected a number of 0 or more")
            for lr in ("nan", "-1.0", "inf")
        ),
        ("--optimizer.eps=-1", "optimizer.eps is -1.0, expected a number of 0 or more"),
        ("--optimizer.beta1=1", "beta1 is 1.0, expected a number of 0 or more and less than 1"),
        ("--lr_scheduler.lr_min=2", "lr_scheduler.lr_min is 2.0, expected 0 to 1"),
        ("--training.seed=-1", "training.seed is -1, expected a number of 0 or more and less"),
        ("--training.seed=18446744073709551616", "less than 18446744073709551616"),
        *(
            (f"--checkpoint.{setting}", "needs checkpoint.enable_checkpoint, which is false")
            for setting in (
                *("load_step=3", "initial_load_path=a/step-3"),
                *("export_safetensors", "create_seed_checkpoint"),
            )
        ),
        *(
            (f"--{name} --checkpoint.create_seed_checkpoint", f"writes nothing with {name}")
            for name in ("checkpoint.load_only", "fault_tolerance.enable")
        ),
    ],
)
def test_unsupported_settings(option: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_supported(load_config(option.split()))
    assert named in str(error.value)


def test_all_unsupported_settings_of_a_file_are_named(torchtitans: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_supported(load_config(["--config", torchtitans]))
    names = ("debug.moe_force_load_balance", "checkpoint.initial_load_in_hf")
    if torchtitans != str(FILE):
        names = ("memory_estimation.enabled", "fault_tolerance.sync_steps")
    assert all(f"{name} is " in str(error.value) for name in names)
    assert "training.batch_size" not in str(error.value)


def test_choices_are_checked_without_a_file() -> None:
    config = JobConfig()
    config.checkpoint.async_mode = "asynch"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"async_mode is 'asynch', expected Literal.'disabled'"):
        check_supported(config)
    check_supported(load_config(["--training.max_norm=inf", "--float8.filter_fqns=output"]))


def test_every_setting_is_read() -> None:
    """The Trainer reads each setting, so none is without effect."""
    folder = Path(sys.modules[JobConfig.__module__].__file__ or "").parent
    source = "".join(
        path.read_text()
        for path in [*folder.rglob("*.py"), *(folder.parent / "containers").rglob("*.py")]
        if path.name not in ("config.py", "load_config.py")
    )
    # Exempt are settings of files, of TrainSpecs and of data loaders (passed whole).
    others = ("job.", "model.hf", "model.tokenizer")
    for name in NAMES:
        field = name.rpartition(".")[2]
        exempt = (
            name.startswith(others)
            or ".dataloader." in name
            or field in CONFIGURED  # containers/build.py reads all of them, and these
            or any(field == hyper.name for each in ALGORITHMS.values() for hyper in each.hypers)
        )
        assert exempt or f".{field}" in source or f'"{field}' in source, name


@pytest.mark.parametrize("name", REJECTED)
def test_a_setting_that_only_torchtitan_has(name: str, tmp_path: Path) -> None:
    only, _ = REJECTED[name]
    section, _, key = name.rpartition(".")
    path = write(tmp_path, f"[{section}]\n{key} = {json.dumps(only)}\n")
    text = ",".join(only) if isinstance(only, list) else str(only)
    for accepted in (["--config", path], [f"--{name}={text}"]):
        check_supported(load_config(accepted))
    other = f"--{name}=7"
    if isinstance(only, bool):
        other = f"--{section}.no_{key}" if only else f"--{name}"
    with pytest.raises(ConfigError, match=f"{name} is .*, which this Trainer does not support: "):
        check_supported(load_config([other]))
