from pathlib import Path

import pytest
import torch
from data import TrainingData, is_held_out, load_text, source_files, windows
from hypothesis import given, settings
from hypothesis import strategies as st


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


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 60),
    seq_len=st.integers(1, 9),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_an_epoch_deals_every_window_once(
    n: int, seq_len: int, batch_size: int, world_size: int, seed: int
) -> None:
    text = torch.arange(n * (seq_len + 1) + seq_len, dtype=torch.int64)
    ranks = [
        TrainingData(
            text, batch_size=batch_size, seq_len=seq_len, seed=seed, rank=r, world_size=world_size
        )
        for r in range(world_size)
    ]
    batches = -(-n // (batch_size * world_size))
    drawn = torch.cat([data.next_batch() for _ in range(batches) for data in ranks])[:n]
    assert drawn.sort(dim=0).values.equal(windows(text, seq_len))
    assert drawn.shape == (n, seq_len + 1)


def test_a_saved_position_goes_on_with_the_next_batch() -> None:
    def make() -> TrainingData:
        text = torch.randint(256, (1000,), generator=torch.Generator().manual_seed(1))
        return TrainingData(text, batch_size=2, seq_len=7, seed=3, rank=1, world_size=2)

    data, resumed = make(), make()
    for _ in range(5):
        data.next_batch()
    resumed.load_state_dict(data.state_dict())
    assert not make().next_batch().equal(resumed.next_batch())
    assert resumed.position == 6
    data.next_batch()
    assert data.next_batch().equal(resumed.next_batch())
