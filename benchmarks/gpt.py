"""What train_gpt.py trains: a GPT-2 whose attention is an argument, and a text to be learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Causal attention of query, key and value [B, H, S, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    seq: int
    vocabulary: int  # rows of the embedding; the text uses the first `words` of them
    words: int
    batch: int
    lr: float


SIZES = {
    "tiny": Size(layers=2, heads=4, width=128, seq=256, vocabulary=64, words=64, batch=8, lr=3e-3),
    "124M": Size(
        layers=12, heads=12, width=768, seq=4096, vocabulary=50304, words=512, batch=4, lr=6e-4
    ),
}

TOPICS = 4
# A word is followed by one of eight, the first of them the likeliest.
_ODDS = 1 / torch.arange(1.0, 9.0)
_ODDS /= _ODDS.sum()


def _follow(words: int, generator: torch.Generator) -> Tensor:
    """int64 [topics, words, 8]: the words that may follow a word."""
    order = torch.rand(TOPICS, words, words, generator=generator).argsort(-1)
    return order[..., : len(_ODDS)]


def make_text(rows: int, length: int, words: int, seed: int) -> Tensor:
    """int64 [rows, length]: a Markov chain in each row, the same for the same seed.

    The first word of a row is its topic, and which word follows which depends on it: a model that
    does not look back beyond the last word cannot know what comes next.
    """
    generator = torch.Generator().manual_seed(seed)
    follow = _follow(words, generator)
    topic = torch.randint(TOPICS, (rows,), generator=generator)
    draws = torch.multinomial(_ODDS, rows * length, replacement=True, generator=generator)
    columns = [topic]
    for draw in draws.view(length, rows)[1:]:
        columns.append(follow[topic, columns[-1], draw])
    return torch.stack(columns, dim=1)


def least_losses(words: int, seed: int) -> tuple[float, float]:
    """In nats a word: of a model that knows the chain, and of one that sees the last word alone.

    The second takes all words to be equally frequent, which they nearly are.
    """
    follow = _follow(words, torch.Generator().manual_seed(seed))
    seen = torch.zeros(TOPICS, words, words).scatter_(2, follow, _ODDS.expand(follow.shape))
    known, mixed = torch.special.entr(seen), torch.special.entr(seen.mean(0))
    return known.sum(-1).mean().item(), mixed.sum(-1).mean().item()


class _Block(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = size.heads, attend
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        out = self.attend(query, key, value)
        x = x + self.project(out.transpose(1, 2).reshape(batch, seq, width))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))


class GPT(nn.Module):
    """GPT-2: learned positions, norms before each part, the embedding tied to the output."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.seq, size.width)
        self.blocks = nn.Sequential(*(_Block(size, attend) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("project.weight", "narrow.weight"))
                std = 0.02 / (2 * size.layers) ** 0.5 if into_residual else 0.02
                nn.init.normal_(weight, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss, in nats a word, of predicting each next word of text [B, S + 1]."""
        given, wanted = text[:, :-1], text[:, 1:]
        positions = torch.arange(given.shape[1], device=text.device)
        x = self.norm(self.blocks(self.words(given) + self.positions(positions)))
        logits = F.linear(x, self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
