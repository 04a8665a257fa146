"""A byte-level decoder-only transformer of the llama family: RMSNorm, rotary positions, SwiGLU."""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

VOCABULARY = 256  # one token per byte value


def rotary_tables(seq_len: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the rotation angles, each fp32 [seq_len, head_dim / 2]."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions (Su et al., arXiv:2104.09864) to x [..., seq_len, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        # [batch, seq_len, dim] -> [batch, heads, seq_len, head_dim]; a tensor-parallel rank has
        # some of the heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        cos, sin = freqs_cis[: q.shape[-2]].unbind(1)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202); the hidden width keeps 4 * dim's parameter count."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 32 * round(8 * dim / 3 / 32)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, n_heads)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Bytes int64 [batch, seq_len] -> logits fp32 [batch, seq_len, 256] of each next byte.

    A pipeline stage lacks some layers, and embedding or norm and output, which are then None.
    Without an embedding its input, and without an output its result, are activations
    [batch, seq_len, dim].

    Args:
        seed: seed of the initial weights; None: `torch.initial_seed()`.
    """

    embedding: nn.Embedding | None
    norm: nn.RMSNorm | None
    output: nn.Linear | None
    freqs_cis: Tensor

    def __init__(
        self, dim: int, n_layers: int, n_heads: int, max_seq_len: int, seed: int | None = None
    ) -> None:
        super().__init__()
        if dim % (2 * n_heads):
            raise ValueError(f"model.dim {dim} is not a multiple of 2 * model.n_heads {n_heads}")
        self.n_layers, self.n_heads, self.seed = n_layers, n_heads, seed
        self.head_dim, self.max_seq_len = dim // n_heads, max_seq_len
        self.embedding = nn.Embedding(VOCABULARY, dim)
        # By name, so that a layer keeps its name in a stage without the layers before it.
        self.layers = nn.ModuleDict({str(i): Block(dim, n_heads) for i in range(n_layers)})
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, VOCABULARY, bias=False)
        # [max_seq_len, 2, head_dim / 2]: cosines, sines. Context parallelism shards it as tokens.
        self.register_buffer("freqs_cis", torch.empty(0), persistent=False)
        if not self.output.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initializes parameters and buffers.

        A parameter's values depend on the seed and its name, not on how the model is sharded. Each
        parameter is drawn whole on the CPU, and a rank keeps its shard, without communication.

        Args:
            buffer_device: the buffer's device; None: its current device.
        """
        seed = torch.initial_seed() if self.seed is None else self.seed
        for name, weight in self.named_parameters():
            weight.copy_(_part_like(weight, self._initial(name, weight.shape, seed)))
        tables = torch.stack(rotary_tables(self.max_seq_len, self.head_dim), dim=1)
        self.freqs_cis = tables.to(buffer_device or self.freqs_cis.device)

    def _initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device="cpu")
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8]))
        # Projections back into the residual stream start smaller, as in GPT-2.
        residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        std = 0.02 / math.sqrt(2 * self.n_layers) if residual else 0.02
        return torch.empty(shape, device="cpu").normal_(std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x, self.freqs_cis)
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def build() -> Transformer:
    """Builds examples/demo.toml's model, for `python -m torchopt_ext plan --model` and `bench`."""
    return Transformer(dim=192, n_layers=5, n_heads=4, max_seq_len=128)


def _part_like(weight: Tensor, whole: Tensor) -> Tensor:
    """Returns this rank's shard of `whole`, sharded as `weight`."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
