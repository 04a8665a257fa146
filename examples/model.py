"""A byte-level decoder-only transformer of the llama family: RMSNorm, rotary positions, SwiGLU."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte value


def rotary_tables(seq_len: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, each fp32 [seq_len, head_dim / 2]."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., arXiv:2104.09864) of x [..., seq_len, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # [batch, seq_len, dim] -> [batch, n_heads, seq_len, head_dim]
        q, k, v = (
            w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Bytes int64 [batch, seq_len] -> logits fp32 [batch, seq_len, 256] of each next byte."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, n_layers: int, n_heads: int, max_seq_len: int) -> None:
        super().__init__()
        if dim % (2 * n_heads):
            raise ValueError(f"model.dim {dim} is not a multiple of 2 * model.n_heads {n_heads}")
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, VOCABULARY, bias=False)
        cos, sin = rotary_tables(max_seq_len, dim // n_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights(n_layers)

    def _init_weights(self, n_layers: int) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Projections back into the residual stream start smaller, as in GPT-2.
                residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * n_layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        seq_len = tokens.shape[1]
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))
