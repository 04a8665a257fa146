"""Writes a small, fixed tokenizer and text dataset for torchtitan. Usage: assets.py FOLDER"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

WORDS = [f"word{i}" for i in range(60)]


def make_tokenizer(folder: Path) -> Path:
    """Writes a word-level tokenizer.json and its tokenizer_config.json (vocabulary under 2,048)."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["<unk>", "<bos>", "<eos>", *WORDS, "."]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"})
    )
    return folder


def make_dataset(folder: Path, documents: int = 64, words: int = 60) -> Path:
    """Writes data.json like torchtitan's c4_test: one {"text": ...} object per line."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    with open(folder / "data.json", "w") as file:
        for _ in range(documents):
            text = " ".join(rng.choice(WORDS) for _ in range(words)) + " ."
            file.write(json.dumps({"text": text}) + "\n")
    return folder


if __name__ == "__main__":
    make_tokenizer(Path(sys.argv[1]) / "tokenizer")
    make_dataset(Path(sys.argv[1]) / "data")
