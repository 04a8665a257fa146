"""The installed package: when it refuses to load, what it ships, and what it imports."""

import ast
import importlib
import importlib.metadata
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import torchopt_ext
from torchopt_ext import _C, _build_info, _library

PACKAGE = Path(torchopt_ext.__file__).parent


def import_again(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Imports `_library` again, for this test only; the import repeats the checks and the load."""
    monkeypatch.delitem(sys.modules, "torchopt_ext._library")
    monkeypatch.setattr(torchopt_ext, "_library", _library)
    return importlib.import_module("torchopt_ext._library")


class TestVersionCheck:
    def test_other_torch_minor_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
        with pytest.raises(ImportError) as caught:
            import_again(monkeypatch)
        message = str(caught.value)
        assert f"built against torch {_build_info.TORCH_VERSION}" in message
        assert "torch 2.10.1+cpu" in message
        assert "pip install --no-build-isolation" in message
        assert "\n" not in message

    def test_another_patch_of_the_minor_is_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        minor = ".".join(torch.__version__.split(".")[:2])
        monkeypatch.setattr(torch, "__version__", f"{minor}.9+elsewhere")
        assert import_again(monkeypatch).cuda_built() == torchopt_ext.cuda_built()

    @pytest.mark.parametrize(
        ("built_cuda", "torch_cuda", "fits"),
        [
            (None, None, True),
            (None, "13.2", True),
            ("13.0.88", "13.2", True),
            ("13.0.88", "12.9", False),
            ("13.0.88", None, False),
        ],
    )
    def test_cuda_counts_by_its_major_and_only_if_built_with(
        self, built_cuda: str | None, torch_cuda: str | None, fits: bool
    ) -> None:
        reason = _library.mismatch("2.15.0+cu132", built_cuda, "2.15.1", torch_cuda)
        assert (reason is None) == fits
        if reason is not None:
            assert f"torch 2.15.0+cu132 and CUDA {built_cuda}" in reason
            assert f"torch 2.15.1 and {'CUDA 12.9' if torch_cuda else 'no CUDA'}" in reason

    def test_minors_are_compared_whole(self) -> None:
        assert _library.mismatch("2.1.0", None, "2.15.0", None) is not None


FROM_A_CLONE = """
import importlib, os, pathlib, re, subprocess, sys, torch

def fails():
    try:
        import torchopt_ext
    except ImportError as error:
        print(error)
    sys.modules.pop("torchopt_ext._build_info", None)
    importlib.invalidate_caches()

sys.dont_write_bytecode = True  # it would stand for a file that changes within the second
path, init = sys.path, pathlib.Path("torchopt_ext/__init__.py")
text = init.read_text()
sys.path = [p for p in path if not p or not os.path.exists(f"{p}/torchopt_ext")]
fails()
sys.path = path
init.write_text(re.sub('__version__ = ".*"', '__version__ = "0.0.7"', text))
fails()
init.write_text(text)
pathlib.Path("setup.py").touch()
os.mkdir("torchopt_ext/lib")
pathlib.Path("torchopt_ext/_C.cpython-30-x86_64-linux-gnu.so").touch()
for version in "2.1.0", torch.__version__:
    info = f"TORCH_VERSION, CUDA_VERSION = '{version}', None"
    pathlib.Path("torchopt_ext/_build_info.py").write_text(info)
    fails()
subprocess.run(["sh", "-c", sys.argv[2]], check=True)
model, data, loss = torch.nn.Linear(2, 2), [torch.ones(2)], lambda model, batch: model(batch).sum()
exec(sys.argv[1])
import torchopt_ext.ops
print(torchopt_ext.ops.__file__)
"""


@pytest.mark.slow
def test_from_the_root_of_a_clone(tmp_path: Path) -> None:
    """The clone's sources run with the installed libraries, or the message says how to build.

    Libraries that an earlier ``pip install -e .`` left beside the sources come first. The message
    about those that do not fit has the command that removes them.
    """
    clone = Path(__file__).parents[2]
    built = shutil.ignore_patterns("_build_info.py", "*.so", "lib", "__pycache__")
    shutil.copytree(clone / "torchopt_ext", tmp_path / "torchopt_ext", ignore=built)
    snippet = (clone / "README.md").read_text().split("```")[1].removeprefix("python")
    left = [tmp_path / "torchopt_ext" / name for name in (
        "_C.cpython-30-x86_64-linux-gnu.so", "_build_info.py", "lib")]  # fmt: skip
    remove = f"rm -r {shlex.join(map(str, left))}"
    none, other, *stale, norm, file = run(FROM_A_CLONE, snippet, remove, cwd=tmp_path)
    advice = "build it in its source directory with: pip install"
    assert f"no compiled library, and none is installed for {sys.executable}; {advice}" in none
    assert f"{PACKAGE} is not of its version, 0.0.7; {advice}" in other
    cause = "pip install -e . left its libraries beside the sources, where they come before an"
    cure = f"remove them with {remove}, or build them again with pip install"
    assert "was built against torch 2.1.0" in stale[0]
    assert f"not built for this Python, {sys.implementation.cache_tag}; {cause}" in stale[1]
    assert all(cure in message for message in stale)
    assert norm.startswith("tensor(")
    assert Path(file) == tmp_path / "torchopt_ext" / "ops.py"


class TestContents:
    @pytest.mark.parametrize(
        "name",
        [
            "py.typed",
            "_C.pyi",
            "lib/libtorchopt_ext.so",
            "include/torchopt_ext/optim.h",
            "share/cmake/torchopt_ext/torchopt_extConfig.cmake",
        ],
    )
    def test_ships(self, name: str) -> None:
        assert (PACKAGE / name).is_file()

    def test_says_where_cmake_finds_it(self) -> None:
        assert Path(torchopt_ext.cmake_prefix_path) == PACKAGE / "share" / "cmake"

    def test_requires_the_torch_minor_it_was_built_against(self) -> None:
        minor = ".".join(_build_info.TORCH_VERSION.split(".")[:2])
        assert f"torch=={minor}.*" in (importlib.metadata.requires("torchopt_ext") or [])

    def test_versions_agree(self) -> None:
        public, _, built_for = importlib.metadata.version("torchopt_ext").partition("+")
        assert public == torchopt_ext.__version__
        minor = ".".join(_build_info.TORCH_VERSION.split(".")[:2])
        cuda = "".join((_build_info.CUDA_VERSION or "").split(".")[:2])
        assert built_for == f"pt{minor}.{f'cu{cuda}' if cuda else 'cpu'}"

    def test_stub_lists_exactly_what_the_module_has(self) -> None:
        stub = ast.parse((PACKAGE / "_C.pyi").read_text()).body
        classes = [node for node in stub if isinstance(node, ast.ClassDef)]
        assert defined(stub) == public(_C)
        for node in classes:
            assert defined(node.body) == public(getattr(_C, node.name))


def defined(body: list[ast.stmt]) -> set[str]:
    names = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}  # type: ignore
    names |= {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


def public(owner: object) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def run(program: str, *arguments: str, cwd: Path | None = None) -> list[str]:
    """Runs a program in its own process, in ``cwd`` if given, and returns the printed lines."""
    command = [sys.executable, *([] if cwd else ["-P"]), "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class TestImport:
    def test_brings_little_beside_torch_in_at_most_three_tenths_of_a_second(self) -> None:
        """Importing must not load torch._dynamo or DCP with its sympy, which takes a second."""
        seconds, *more = run(
            "import sys, time, torch\n"
            "before, start = set(sys.modules), time.process_time()\n"
            "import torchopt_ext\n"
            "print(time.process_time() - start)\n"
            "import torchopt_ext.mixed_precision\n"
            "for name in {name.partition('.')[0] for name in {*sys.modules} - before}: print(name)"
        )
        assert float(seconds) < 0.3
        assert set(more) <= {"torchopt_ext", *sys.stdlib_module_names}

    def test_the_trainer_leaves_dynamo_to_models_and_pipelines(self) -> None:
        imported = "import sys, torchopt_ext.trainer; print('torch._dynamo' in sys.modules)"
        assert run(imported) == ["False"]

    def test_everything_works_without_numpy(self, tmp_path: Path) -> None:
        run(Path(__file__).with_name("without_numpy.py").read_text(), str(tmp_path / "checkpoint"))


def test_the_environment_has_what_is_pinned_for_it() -> None:
    """Every pinned package is installed, so `make test` skips no test that needs a package."""
    version = torch.__version__.partition("+")[0]
    file = Path(__file__).parents[2] / f".ci/requirements-{version}.txt"
    if not file.exists():
        pytest.skip(f"no environment is pinned for torch {version}")
    pinned = [line.partition("==")[0] for line in file.read_text().splitlines() if "==" in line]
    for name in pinned:
        importlib.metadata.distribution(name)


class TestThreads:
    def test_one_openmp_library_is_loaded(self) -> None:
        paths = run(
            "import torchopt_ext\n"
            "for path in {line.split()[-1] for line in open('/proc/self/maps')}: print(path)"
        )
        assert len([p for p in paths if Path(p).name.startswith(("libgomp", "libomp"))]) == 1

    def test_an_operator_uses_the_threads_it_is_given(self) -> None:
        """An operator on n threads starts n - 1 workers, in OpenMP's first parallel region."""
        started = run(
            "import os, torch\n"
            "from torchopt_ext import ops\n"
            "torch.set_num_threads(1)\n"
            "gradient, accumulator = torch.ones(1000, 1000), ops.new_accumulator()\n"
            "before = len(os.listdir('/proc/self/task'))\n"
            "for threads in (1, 2):\n"
            "    torch.set_num_threads(threads)\n"
            "    ops.grad_sumsq_([gradient], accumulator)\n"
            "    print(len(os.listdir('/proc/self/task')) - before)"
        )
        assert [int(threads) for threads in started] == [0, 1]
