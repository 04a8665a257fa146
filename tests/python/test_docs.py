"""The code of README and docs runs, the commands they name exist, and links have targets.

Pages control the tests by HTML comments, which readers do not see:

    <!-- setup ... -->           Python that runs at this place: names that the next blocks use
    <!-- not run: reason -->     before a block: the block is compiled, not run
    <!-- old side not run: reason -->    before a diff: only the diff's result runs
    <!-- not Python: what -->    before a diff: nothing is checked
    <!-- needs: packages -->     before a block: compiled, not run, if a package is not installed
    <!-- not a job: reason -->   before a toml block: parsed, not loaded as a job of the Trainer

The python and diff blocks of a page run in order, in one namespace and a temporary directory. Both
sides of a diff run, each in a copy of the namespace.
"""

import ast
import contextlib
import functools
import io
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchopt_ext.__main__ import COMMANDS
from torchopt_ext.__main__ import main as torchopt_ext_main
from torchopt_ext.state.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"])
RESULTS = ROOT / "benchmarks/results"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SHELLS = ("sh", "bash", "console")
RUNS = ("python", "diff", "setup")

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)
SETUP = re.compile(r"^( *)<!-- setup\n(.*?)^\1-->", re.M | re.S)
COMMENT = re.compile(r"<!-- ([a-zA-Z ]+): ((?:(?!-->).)+) -->\s*\Z", re.S)


@dataclass
class Block:
    page: str
    line: int  # of the first line of code
    language: str  # "setup" for a setup comment
    code: str
    comment: tuple[str, str] | None  # kind and reason


@functools.cache
def blocks(page: str) -> list[Block]:
    """Returns all code blocks and setup comments of a page, in order."""
    text = (ROOT / page).read_text()
    found = []
    for match in [*FENCE.finditer(text), *SETUP.finditer(text)]:
        fence = match.re is FENCE
        language, code = match.group(2, 3) if fence else ("setup", match.group(2))
        code = re.sub(f"^{match.group(1)}", "", code, flags=re.M)
        comment = COMMENT.search(text[: match.start()]) if fence else None
        line = text.count("\n", 0, match.start()) + 2
        kind = (comment.group(1), comment.group(2)) if comment else None
        found.append(Block(page, line, language, code, kind))
    return sorted(found, key=lambda block: block.line)


def side(diff: str, other: str) -> str:
    """Returns one side of a diff: its lines without the lines that begin with ``other``."""
    return "".join(line[1:] for line in diff.splitlines(True) if not line.startswith(other))


def run(block: Block, code: str, namespace: dict[str, Any], only_compile: bool) -> None:
    compiled = compile("\n" * (block.line - 1) + code, str(ROOT / block.page), "exec")
    if not only_compile:
        exec(compiled, namespace)


def lacking(block: Block) -> list[str]:
    """Returns the packages that a block needs and this environment lacks."""
    kind, names = block.comment or ("", "")
    return [n for n in names.split(", ") if kind == "needs" and find_spec(n) is None]


@pytest.fixture
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT), str(ROOT / "examples")])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def with_languages(*languages: str) -> list[str]:
    return [name for name in NAMES if any(b.language in languages for b in blocks(name))]


@pytest.mark.parametrize("page", with_languages(*RUNS))
@pytest.mark.usefixtures("_workplace")
def test_python_blocks_run(page: str) -> None:
    namespace: dict[str, Any] = {"__name__": page}
    without: set[str] = set()
    for block in blocks(page):
        without.update(lacking(block))
        kind = block.comment[0] if block.comment else ""
        if kind == "not Python":
            continue
        if block.language == "diff":
            old, new = side(block.code, "+"), side(block.code, "-")
            run(block, old, dict(namespace), kind in ("not run", "old side not run"))
            run(block, new, dict(namespace), kind == "not run")
        elif block.language in RUNS:
            run(block, block.code, namespace, kind == "not run" or bool(lacking(block)))
    if without:
        pytest.skip(f"all blocks ran but those that need {', '.join(sorted(without))}")


def test_examples_of_muon_have_adamws_learning_rates() -> None:
    """torch's default for ``adjust_lr_fn`` needs another learning rate than AdamW's."""
    calls = []
    for page in with_languages("python", "diff"):
        for block in blocks(page):
            if block.language not in ("python", "diff"):
                continue
            if block.comment and block.comment[0] == "not Python":
                continue
            code = side(block.code, "-") if block.language == "diff" else block.code
            for call in ast.walk(ast.parse(code)):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Muon"):
                    calls.append(f"{page}:{block.line} {ast.unparse(call)}")
    assert len(calls) > 3
    assert not [call for call in calls if "adjust_lr_fn='match_rms_adamw'" not in call]


@pytest.mark.parametrize("page", NAMES)
def test_what_blocks_need_is_in_the_environment_of_the_newest_torch(page: str) -> None:
    """Packages that blocks need are pinned; test_packaging.py checks the environment."""
    newest = max(ROOT.glob(".ci/requirements-2.*.txt")).read_text()
    for block in blocks(page):
        if block.comment and block.comment[0] == "needs":
            for name in block.comment[1].split(", "):
                assert f"\n{name}==" in newest, f"{page}:{block.line} needs {name}"


SCRIPTS = sorted(ROOT.glob("docs/*_drawing.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_pictures_are_what_their_scripts_draw(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("matplotlib.image", reason="pictures are drawn by matplotlib")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "examples")])
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "docs").mkdir()
    runpy.run_path(shutil.copy(script, tmp_path / "docs"), run_name="__main__")
    drawn = list(tmp_path.glob("docs/*.png"))
    assert drawn
    for file in drawn:
        ours, kept = image.imread(file), image.imread(ROOT / "docs" / file.name)
        assert ours.shape == kept.shape
        assert abs(ours - kept).mean() < 1e-3, f"python docs/{script.name} draws another picture"


@pytest.mark.parametrize("page", with_languages("toml"))
def test_toml_blocks_are_jobs(page: str, tmp_path: Path) -> None:
    pytest.importorskip("tyro", reason="the Trainer's configuration needs it")
    from torchopt_ext.trainer.load_config import load_config

    for block in blocks(page):
        if block.language == "toml":
            assert tomllib.loads(block.code), f"{page}:{block.line} is empty"
            if not (block.comment and block.comment[0] == "not a job"):
                (tmp_path / "job.toml").write_text(block.code)
                load_config(["--config", str(tmp_path / "job.toml")])


@functools.cache
def flags(command: str) -> set[str]:
    """Returns the options in the help of a command of this package."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        torchopt_ext_main([command, "--help"])
    return {flag.replace("_", "-") for flag in re.findall(r"--[\w.-]+", text.getvalue())}


@functools.cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def check_command(words: list[str], where: str) -> None:
    """Checks that the options, targets and files in a command exist."""
    if words[:1] == ["$"]:
        words = words[1:]
    for word in words:
        if re.fullmatch(r"(examples|tests|benchmarks|docs)/[\w./-]+", word):
            assert (ROOT / word).exists(), f"{where}: there is no {word}"
    if words[:1] == ["make"]:
        asked = {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)}
        assert asked <= targets(), f"{where}: no such target: {asked - targets()}"
        return
    name = next((n for n in ("torchopt_ext", "torchopt-ext") if n in words), None)
    if name is None or (name == "torchopt_ext" and words[words.index(name) - 1] != "-m"):
        return
    command, *rest = words[words.index(name) + 1 :]
    if command.startswith("-"):
        return
    assert command in COMMANDS, f"{where}: no such command: {command}"
    known = flags(command) | {"--config", "--help"}
    for word in rest:
        flag = word.partition("=")[0].replace("_", "-")
        assert not flag.startswith("--") or flag in known, f"{where}: {command} has no {flag}"


@pytest.mark.parametrize("page", with_languages(*SHELLS))
def test_commands_exist(page: str) -> None:
    for block in blocks(page):
        if block.language in SHELLS:
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                check_command(words, f"{page}:{block.line}")


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub, and the site's `toc` extension, give to headings."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h).lower() for h in headings]
    return {re.sub(r"[^\w -]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), f"{page} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page} links to {link}"


def words(page: Path) -> int:
    return len(page.read_text().split())


def test_pages_are_short() -> None:
    reference = {"api.md", "numerics.md"}
    pages = [page for page in ROOT.glob("docs/*.md") if page.name not in reference]
    assert len(pages) > 20
    assert not [page.name for page in pages if words(page) > 1200]
    assert sum(map(words, pages)) <= 20_000


@pytest.mark.parametrize("page", [name for name in NAMES if name != "CHANGELOG.md"])
def test_tables_and_code_fit_a_page_of_1280_pixels(page: str) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    rows = re.findall(r"^\|(.*)\|$", text, re.M)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert not [cell for cell in cells if len(cell.split()) > 20]
    widest = 95 if page == "README.md" else 108  # on GitHub and on the site, without scrolling
    lines = [line for block in blocks(page) if block.language != "setup"
             for line in block.code.splitlines()]  # fmt: skip
    assert not [line for line in lines if len(line) > widest]


@pytest.mark.parametrize(
    "page", [name for name in NAMES if re.match("README|docs/(?!numerics)", name)]
)
def test_bullets_have_at_most_two_sentences(page: str) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    bullets = re.findall(r"^ *- (.*(?:\n(?! *- | *\n| *\d+\. ).*)*)", text, re.M)
    for bullet in bullets:
        plain = re.sub(r"`[^`]*`", "code", " ".join(bullet.split()))
        assert len(re.findall(r"[.!?](?= [A-Z`(\[*])", plain)) < 2, bullet


def test_sources_that_texts_name_exist() -> None:
    ours = r"(?:csrc|torchopt_ext|tests|benchmarks|examples)/[\w./]*\w"
    source = re.compile(rf"(?<![\w/.]){ours}\.(?:h|cpp|cu|py|toml)\b")
    texts = [*PAGES, *ROOT.glob("torchopt_ext/**/*.py")]
    texts.remove(ROOT / "CHANGELOG.md")  # also names removed files
    named = {(text, name) for text in texts for name in source.findall(text.read_text())}
    headers = ROOT / "csrc/api/include"
    gone = [
        f"{t} names {n}" for t, n in named if not ((ROOT / n).exists() or (headers / n).exists())
    ]
    assert len(named) > 50 and not gone


def test_each_operator_has_a_file_of_its_name() -> None:
    """The headers of algorithms declare their operators, which csrc/ops/update.cpp registers."""
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("torchopt_ext::")}
    assert "torchopt_ext::adam_" in names
    for name in names:
        stem = name.partition("::")[2].rstrip("_")
        file = ROOT / f"csrc/{f'kernels/{stem}.h' if stem in ALGORITHMS else f'ops/{stem}.cpp'}"
        assert f'"{name.partition("::")[2]}"' in file.read_text()


@pytest.mark.parametrize("page", NAMES)
def test_blocks_have_a_language_and_comments_a_known_kind(page: str) -> None:
    """Every block has a language, or no test would check it; `text` needs no check."""
    kinds = ("needs", "not run", "old side not run", "not Python", "not a job")
    for block in blocks(page):
        assert block.language, f"{page}:{block.line}"
        assert block.comment is None or block.comment[0] in kinds, f"{page}:{block.line}"


def test_troubleshooting_has_messages_as_they_are() -> None:
    """The words of each message, except where `...` stands for a value, occur in the sources."""
    files = [ROOT / "setup.py", ROOT / "CMakeLists.txt"]
    for folder, ending in (("torchopt_ext", "*.py"), ("csrc", "*.cpp"), ("csrc", "*.h")):
        files += (ROOT / folder).rglob(ending)
    # Join a message's pieces in adjacent literals, `"..."\n f"..."`.
    sources = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text() for file in files))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^- `(.+?)`[:,] ", page.partition("## torch's own")[0], re.M)
    assert len(messages) > 20
    for message in messages:
        for piece in message.split("..."):
            assert piece.strip() in sources, f"no message has {piece!r}: {message}"


def test_tables_of_the_benchmarks_have_the_figures_of_their_files() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    tables = runpy.run_path(str(ROOT / "benchmarks/tables.py"))
    assert tables["filled"](page) == page
    assert page.count("<!-- table: ") == page.count("<!-- end -->") == 4


def test_a_page_shows_each_result_of_the_benchmarks() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    results = [file.name for file in RESULTS.iterdir()]
    assert results
    assert not [name for name in results if f"results/{name})" not in shown]
