from pathlib import Path

import pytest
from data import is_held_out, load_text, source_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for i in range(60):
        path = tmp_path / f"package{i % 7}" / f"module{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x{i:02d};")
    for skipped in ("test/a.py", "package1/tests/b.py", "site-packages/c.py", "package2/d.txt"):
        path = tmp_path / skipped
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("skip")
    return tmp_path


def test_every_file_is_in_one_part_and_the_order_is_that_of_the_paths(tree: Path) -> None:
    files = source_files(tree)
    assert len(files) == 60
    parts = [bytes(part.numpy()).decode() for part in load_text(tree, min_bytes=0)]
    for held_out, part in enumerate(parts):
        expected = [f for f in files if is_held_out(f.relative_to(tree).as_posix()) == held_out]
        assert part == "".join(f.read_text() for f in expected)
        assert expected == sorted(expected, key=Path.as_posix)
        assert expected


def test_too_little_text_is_refused_with_both_sizes(tree: Path) -> None:
    with pytest.raises(RuntimeError, match=r"found 240 bytes .* at least 5,000,000"):
        load_text(tree)


def test_the_standard_library_suffices_and_is_read_alike_twice() -> None:
    train, held_out = load_text()
    assert train.numel() > 4_500_000
    assert held_out.numel() > 100_000
    for part, again in zip((train, held_out), load_text(), strict=True):
        assert part.equal(again)
