"""Data of the Trainer: which rank gets which sample, exact resume, and refused inputs."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from torchopt_ext.trainer import data as data_module
from torchopt_ext.trainer import windows
from torchopt_ext.trainer.checkpoint_states import DataPosition
from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.config import DataLoader as Workers
from torchopt_ext.trainer.data import build_dataloader, register_dataset
from torchopt_ext.trainer.trainer import Trainer
from torchopt_ext.trainer.windows import FileBytes, TokenWindows

SAMPLES, SEQ_LEN = 23, 3
TEXT = bytes(i % 256 for i in range(SAMPLES * (SEQ_LEN + 1) + 2))


@pytest.fixture
def job_config(tmp_path: Path) -> JobConfig:
    """A job on files of unequal lengths, some of them empty, that add up to TEXT."""
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    names, ends = ("a", "b/0", "b/1", "b/2", "c"), (1, 50, 50, 57, len(TEXT))
    for name, start, end in zip(names, (0, *ends), ends, strict=False):
        (folder / name).write_bytes(TEXT[start:end])
    config = JobConfig()
    config.training.dataset, config.training.dataset_path = "text", str(folder)
    config.training.seq_len, config.training.batch_size = SEQ_LEN, 2
    config.training.epochs = 1
    return config


@pytest.fixture
def _no_groups(request: pytest.FixtureRequest) -> None:
    """Or a forked worker may destroy another test's gloo group, without its threads."""
    if request.node.callspec.params.get("workers", 2):
        gc.collect()


forks = pytest.mark.usefixtures("_no_groups")


@pytest.fixture(autouse=True)
def _forget_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module._DATASETS, "values", dict(data_module._DATASETS.values))


def build(config: JobConfig, rank: int = 0, ranks: int = 1, tokenizer: Any = None) -> Any:
    return build_dataloader(
        dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, job_config=config
    )


def samples(batches: Any) -> list[list[int]]:
    """Returns the window numbers of each batch, after checks of shapes and labels."""
    numbers = []
    for inputs, labels in batches:
        assert inputs.keys() == {"input"}
        both = torch.cat([inputs["input"], labels[:, -1:]], dim=1)
        assert (both.dtype, labels.dtype) == (torch.int64, torch.int64)
        assert torch.equal(both[:, 1:], labels)
        assert bytes(both.flatten().tolist()) == b"".join(
            TEXT[row[0] : row[0] + SEQ_LEN + 1] for row in both.tolist()
        )
        numbers.append([row[0] // (SEQ_LEN + 1) for row in both.tolist()])
    return numbers


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 1), (1, 4), (2, 2), (3, 2), (4, 5)])
def test_ranks_share_an_epoch_without_overlap(
    job_config: JobConfig, ranks: int, batch_size: int
) -> None:
    job_config.training.batch_size = batch_size
    job_config.training.epochs = 2
    whole = SAMPLES // (ranks * batch_size)
    shares = [samples(build(job_config, rank, ranks)) for rank in range(ranks)]
    assert [len(share) for share in shares] == [2 * whole] * ranks
    epochs = [
        flat([flat(share[epoch * whole : (epoch + 1) * whole]) for share in shares])
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == whole * ranks * batch_size
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1]


def test_order_depends_on_the_seed_and_not_on_the_layout(job_config: JobConfig) -> None:
    training, orders = job_config.training, []
    training.batch_size = 4
    for training.seed in (None, 0, 1):
        orders.append(samples(build(job_config)))
    assert orders[0] == orders[1] != orders[2]
    training.batch_size = 2
    two = zip(*(samples(build(job_config, rank, 2)) for rank in range(2)), strict=True)
    assert [flat(list(step)) for step in two] == orders[2]


def test_endless_and_single_tokens(job_config: JobConfig) -> None:
    """Starting to read leaves the model's random numbers alone."""
    job_config.training.epochs, job_config.training.seq_len = 0, 1
    count, before = 3 * len(TEXT), torch.get_rng_state()
    batches = list(itertools.islice(build(job_config), count))
    assert len(batches) == count
    assert torch.equal(torch.get_rng_state(), before)
    for inputs, labels in batches:
        assert inputs["input"].shape == labels.shape == (2, 1)
        assert torch.equal((inputs["input"] + 1) % 256, labels)


@forks
@pytest.mark.parametrize(
    ("stop", "workers"),
    [
        *((stop, 0) for stop in (0, 1, 10, 11, 12, 22)),
        (3, 2),
    ],
)
def test_resume_is_exact(job_config: JobConfig, stop: int, workers: int) -> None:
    """Resume is exact at any batch of two epochs of eleven, through a checkpoint's packing.

    Workers have read further than training has.
    """
    job_config.training.epochs = 2
    undisturbed = samples(build(job_config))
    job_config.training.dataloader.num_workers = workers
    loader = build(job_config)
    begun = samples(itertools.islice(loader, stop))
    packed = DataPosition(loader).state_dict()
    job_config.training.seed = 5  # the saved seed counts
    resumed = build(job_config)
    DataPosition(resumed).load_state_dict(packed)
    assert begun + samples(resumed) == undisturbed
    assert samples(resumed) == []


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_loaded_during_iteration_counts(job_config: JobConfig, workers: int) -> None:
    """A replica group that returns takes its peers' position while its loop runs."""
    undisturbed = samples(build(job_config))
    ahead = build(job_config)
    samples(itertools.islice(ahead, 7))
    job_config.training.dataloader.num_workers = workers
    loader = build(job_config)
    batches = iter(loader)
    begun = samples(itertools.islice(batches, 2))
    loader.load_state_dict(ahead.state_dict())
    assert begun + samples(batches) == undisturbed[:2] + undisturbed[7:]


def test_resume_with_other_ranks_repeats_nothing(job_config: JobConfig) -> None:
    loaders = [build(job_config, rank, 2) for rank in range(2)]
    seen = [flat(samples(itertools.islice(loader, 3))) for loader in loaders]
    (state, other) = (loader.state_dict() for loader in loaders)
    assert state == other  # saved once
    job_config.training.batch_size = 1
    for rank in range(3):
        loader = build(job_config, rank, 3)
        loader.load_state_dict(copy.deepcopy(state))
        seen.append(flat(samples(loader)))
        assert len(seen[-1]) == (SAMPLES - 12) // 3
    assert len(set(flat(seen))) == len(flat(seen)) == 21


def test_changed_data_is_reported(job_config: JobConfig, caplog: pytest.LogCaptureFixture) -> None:
    """A name that does not change the order does not matter."""
    folder = Path(str(job_config.training.dataset_path))
    loader = build(job_config)
    next(iter(loader))
    state, other = loader.state_dict(), "has other bytes, or its files another order"
    for change, reported in (
        (lambda: (folder / "c").rename(folder / "d"), ""),
        (lambda: (folder / "d").rename(folder / "0"), other),
        (lambda: (folder / "0").rename(folder / "c"), ""),
        (lambda: (folder / "c").write_bytes((folder / "c").read_bytes()[::-1]), other),
        (lambda: (folder / "d").write_bytes(bytes(40)), "23 samples when the .*, and has 33 now"),
    ):
        change()
        caplog.clear()
        changed = build(job_config)
        changed.load_state_dict(state)
        assert bool(caplog.text) == bool(reported)
        assert re.search(reported, caplog.text)
    assert len(list(changed)) == 15


def test_long_texts_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_BLOCK", 2)
    monkeypatch.setattr(windows, "_BLOCKS", 4)
    tokens, sums = torch.zeros(40, dtype=torch.int32), []
    for at in range(40):
        tokens[at] = 1
        sums.append(TokenWindows(tokens, 3).crc32)
        tokens[at] = 0
    assert len(set(sums)) == 1 + 4 * 2


def test_windows_of_any_tensor_and_spans_of_files(job_config: JobConfig) -> None:
    windows = TokenWindows(torch.arange(70_000, dtype=torch.int32), 4)
    assert len(windows) == 14_000
    assert windows[13_999].tolist() == list(range(69_995, 70_000))
    content = FileBytes(Path(str(job_config.training.dataset_path)))
    assert len(content) == len(TEXT)
    for start, stop in itertools.combinations(range(0, len(TEXT) + 1, 7), 2):
        assert bytes(content[start:stop].tolist()) == TEXT[start:stop]


class Words:
    """A tokenizer with one token per word."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_tokenizer(job_config: JobConfig, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "0").write_text("a bb ccc")
    (tmp_path / "words" / "1").write_text("dddd é")
    job_config.training.dataset_path = str(tmp_path / "words")
    job_config.training.seq_len, job_config.training.batch_size = 4, 1
    ((inputs, labels),) = build(job_config, tokenizer=Words())
    assert inputs["input"].tolist() == [[1, 2, 3, 4]]
    assert labels.tolist() == [[2, 3, 4, 1]]
    (tmp_path / "words" / "2").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"reads UTF-8, but .*words/2 is not: .*0xff"):
        build(job_config, tokenizer=Words())


class Pairs(Dataset[Any]):
    """Samples as the contract defines them, without collate_fn."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"input": torch.full((3,), index)}, torch.full((3,), index + 1)


class Stream(IterableDataset[Any]):
    """An endless stream of a rank's numbers, with its own state."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.position, self.step = rank, ranks

    def __iter__(self) -> Iterator[Any]:
        while True:
            value = torch.full((3,), self.position)
            self.position += self.step
            yield {"input": value}, value + 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def test_registered_data_sets(job_config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    register_dataset("pairs", lambda **_: Pairs())
    register_dataset(
        "stream", lambda *, dp_rank, dp_world_size, **_: Stream(dp_rank, dp_world_size)
    )
    job_config.training.dataset = "pairs"
    assert isinstance(build(job_config).dataset, Pairs)
    numbers = [batch[0]["input"] for batch in build(job_config)]
    assert {n.shape for n in numbers} == {(2, 3)}
    assert sorted(torch.cat(numbers)[:, 0].tolist()) == list(range(8))
    shuffled = build(job_config).state_dict()

    job_config.training.dataset = "stream"
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "torchdata.stateful_dataloader", None)
        with pytest.raises(ImportError, match=r"needs torchdata.* install 'torchopt_ext\[trainer"):
            build(job_config)
    loader = build(job_config, 1, 2)
    assert isinstance(loader.dataset, Stream)
    first = [labels[:, 0].tolist() for _, labels in itertools.islice(loader, 2)]
    assert first == [[2, 4], [6, 8]]
    packed = DataPosition(loader).state_dict()
    assert packed.keys() == {"dp_rank_1", "world_size", "passes"}
    resumed = build(job_config, 1, 2)
    DataPosition(resumed).load_state_dict(packed)
    assert next(iter(resumed))[1][:, 0].tolist() == [10, 12]

    register_dataset("drawing", lambda **_: Drawing(12))
    job_config.training.dataset = "drawing"
    with pytest.raises(ValueError, match="does not say how many samples were taken"):
        build(job_config, 1, 2).load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"of 2 data-parallel ranks, expected 'dp_rank_1' of 3"):
        build(job_config, 1, 3).load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"\['crc32', 'position'\] of unknown data-parallel ranks"):
        build(job_config, 1, 2).load_state_dict(shuffled)
    job_config.training.dataset = "pairs"
    with pytest.raises(ValueError, match=r"expected 'position'"):
        build(job_config).load_state_dict(loader.state_dict())


class Mask:
    """An entry of a batch that is no tensor."""

    def to(self, device: torch.device, *, non_blocking: bool) -> str:
        return f"on {device}"


def test_every_entry_of_a_batch_is_moved() -> None:
    trainer = MagicMock(gradient_accumulation_steps=1, device=torch.device("cpu"))
    batch = {"input": torch.ones(1), "mask": Mask()}, torch.zeros(1)
    inputs, labels = Trainer.next_batch(trainer, [batch])
    assert inputs == {"input": batch[0]["input"], "mask": "on cpu"}
    assert torch.equal(labels, batch[1])


class Augmented(Pairs):
    """Samples with random numbers, read one by one or as a batch."""

    def __init__(self, together: bool) -> None:
        if together:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        draws = [int(torch.randint(1 << 30, ())), random.getrandbits(30)]
        return {"input": torch.tensor([index, *draws])}, torch.tensor([index])


class Drawing(IterableDataset[Any]):
    """`count` numbers, each with a random one, divided between workers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        for number in range(worker.id if worker else 0, self.count, 2 if worker else 1):
            yield {"input": torch.tensor([number])}, torch.randint(1 << 30, (1,))


def drawn(batches: Any) -> list[list[int]]:
    return [[*inputs["input"].flatten().tolist(), *labels.flatten()] for inputs, labels in batches]


@forks
@pytest.mark.parametrize("together", [False, True])
def test_random_numbers_of_workers(job_config: JobConfig, together: bool) -> None:
    """Random numbers differ by seed, rank and sample, and a resumed job draws the same."""
    register_dataset("augmented", lambda **_: Augmented(together))
    training = job_config.training
    training.dataset, training.dataloader.num_workers = "augmented", 2
    undisturbed = drawn(build(job_config))
    loader = build(job_config)
    begun = drawn(itertools.islice(loader, 1))
    resumed = build(job_config)
    resumed.load_state_dict(loader.state_dict())
    assert begun + drawn(resumed) == undisturbed
    ranks = flat([drawn(build(job_config, rank, 2)) for rank in range(2)])
    training.seed, training.epochs = 1, 2
    others = [*undisturbed, *drawn(build(job_config))]
    for numbers in flat(ranks), flat(others):
        draws = [number for number in numbers if number >= 8]  # smaller numbers are indices
        assert len(set(draws)) == len(draws) > 0


@forks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epochs", [1, 3])
def test_passes_over_a_stream(job_config: JobConfig, epochs: int, workers: int) -> None:
    """Repeated resumes with the saved generator state give the undisturbed stream."""
    register_dataset("drawing", lambda **_: Drawing(12))
    training = job_config.training
    training.dataset, training.dataloader.num_workers = "drawing", workers
    training.epochs = epochs
    torch.manual_seed(0)
    undisturbed = drawn(build(job_config))
    assert len(undisturbed) == 6 * epochs
    torch.manual_seed(0)
    loader, read = build(job_config), []
    for _ in range(5):
        read += drawn(itertools.islice(loader, 4))
        packed, random_numbers = DataPosition(loader).state_dict(), torch.get_rng_state()
        loader = build(job_config)
        DataPosition(loader).load_state_dict(packed)
        torch.set_rng_state(random_numbers)
    assert read == undisturbed


class Counter(Iterator[Any]):
    def __init__(self, reads: list[int]) -> None:
        self.at, self.reads = 0, reads

    def __next__(self) -> Any:
        self.at += 1
        self.reads.append(self.at)
        return {"input": torch.tensor([self.at])}, torch.tensor([0])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_an_iterator_with_a_state_is_not_read_again(job_config: JobConfig) -> None:
    reads: list[int] = []
    stream = type("Counting", (IterableDataset,), {"__iter__": lambda _: Counter(reads)})
    register_dataset("counting", lambda **_: stream())
    job_config.training.dataset = "counting"
    loader = build(job_config)
    assert len(drawn(itertools.islice(loader, 2))) == 2
    packed = DataPosition(loader).state_dict()
    reads.clear()
    loader = build(job_config)
    DataPosition(loader).load_state_dict(packed)
    assert drawn(itertools.islice(loader, 1)) == [[5, 6, 0, 0]]
    assert reads == [5, 6]


def test_endless_and_empty_streams(job_config: JobConfig) -> None:
    job_config.training.epochs = 0
    for count, expected in ((4, 7), (1, 0)):
        register_dataset(f"drawing{count}", lambda count=count, **_: Drawing(count))
        job_config.training.dataset = f"drawing{count}"
        assert len(list(itertools.islice(build(job_config), 7))) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "c4"}, "'c4' is not registered .*'text'.*call .*ter_dataset"),
        ({"dataset_path": None}, "under dataset_path, which is not set"),
        ({"dataset_path": "/no"}, "dataset_path is /no, which does not exist"),
        ({"dataloader": Workers(prefetch_factor=2)}, "prefetch_factor .*num_workers"),
        ({"batch_size": 12}, "'text' has 23 samples of seq_len 3, expected .* 24"),
        ({"seq_len": 500}, "'text' has 0 samples of seq_len 500"),
    ],
)
def test_refused(job_config: JobConfig, settings: dict[str, Any], message: str) -> None:
    vars(job_config.training).update(settings)
    with pytest.raises(ConfigError, match=message):
        build(job_config, 1, 2)


def test_refused_files_and_names(job_config: JobConfig) -> None:
    folder = Path(str(job_config.training.dataset_path))
    os.mkfifo(folder / "y")  # a reader would wait for a writer
    assert len(build(job_config).dataset) == SAMPLES
    (folder / "z").symlink_to("gone")
    with pytest.raises(FileNotFoundError, match="text/z"):
        build(job_config)
    with pytest.raises(ValueError, match="'text' is registered already"):
        register_dataset("text", lambda **_: Pairs())
