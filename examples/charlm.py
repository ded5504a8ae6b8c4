"""A small character transformer learns CPython's own language reference (``pydoc_data.topics``).

As a job: ``cadenza submit examples/charlm.yaml --watch``. Alone, on one machine: ``python examples/charlm.py``.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import cadenza

HELD_OUT_SHARE = 0.1
CONTEXT = 64
WIDTH = 160
DEPTH = 4
HEADS = 4
HELD_OUT_WINDOWS = 256
HELD_OUT_BATCH = 32


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every stretch of ``CONTEXT`` characters that starts at a multiple of ``stride``, with its next characters.

    An item is (input, target), both int64 [CONTEXT]; the target is the input one character later.
    """

    def __init__(self, codes: Tensor, stride: int) -> None:
        self.codes = codes
        self.stride = stride

    def __len__(self) -> int:
        return max(0, (len(self.codes) - 1 - CONTEXT) // self.stride + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        return self.codes[start : start + CONTEXT], self.codes[start + 1 : start + CONTEXT + 1]


def load() -> tuple[Tensor, Tensor, int]:
    """The training text and the held-out tail as character codes, int64, and the size of the vocabulary."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    code = {character: number for number, character in enumerate(sorted(set(text)))}
    head, tail = _split(text)
    return _encode(head, code), _encode(tail, code), len(code)


def _split(text: str) -> tuple[str, str]:
    """Cut off the held-out tail; paragraphs that it shares with the rest, which quotes itself, stay out of training."""
    cut = int(len(text) * (1 - HELD_OUT_SHARE))
    tail = text[cut:]
    unseen = set(tail.split("\n\n"))
    head = (paragraph for paragraph in text[:cut].split("\n\n") if paragraph not in unseen)
    return "\n\n".join(head), tail


def _encode(text: str, code: dict[str, int]) -> Tensor:
    return torch.tensor([code[character] for character in text], dtype=torch.int64)


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each on a normalised copy that is added back."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, length, WIDTH] to the same shape."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        out: Tensor = hidden + self.feed_forward(hidden)
        return out

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        joint = self.query_key_value(hidden).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class CharacterModel(nn.Module):
    """A decoder-only transformer: character codes [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.apply(_initialise)

    def forward(self, codes: Tensor) -> Tensor:
        """Logits of the next character at each place; ``codes`` has at most ``CONTEXT`` columns."""
        places = torch.arange(codes.shape[1], device=codes.device)
        hidden = self.blocks(self.characters(codes) + self.positions(places))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy per character, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Mean cross entropy per character over equal batches of held-out windows, always the same ones."""
    model.eval()
    losses = [cross_entropy(model, inputs, targets).item() for inputs, targets in batches]
    model.train()
    return sum(losses) / len(losses)


def held_out_batches(tail: Tensor, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """``HELD_OUT_WINDOWS`` windows, evenly spaced over the held-out tail, in equal batches."""
    windows = Windows(tail, stride=(len(tail) - 1 - CONTEXT) // (HELD_OUT_WINDOWS - 1))
    pairs = [windows[index] for index in range(HELD_OUT_WINDOWS)]
    inputs, targets = (
        torch.stack(column).to(device).split(HELD_OUT_BATCH) for column in zip(*pairs, strict=True)
    )
    return list(zip(inputs, targets, strict=True))


def train(config: dict[str, Any]) -> None:
    """Train on leased windows; ``config`` may hold lr, batch_size, stride (characters) and seed."""
    torch.manual_seed(config.get("seed", 0))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head, tail, vocabulary = load()
    held_out = held_out_batches(tail, device)
    model = CharacterModel(vocabulary).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 1e-3))

    with cadenza.join(model, optimizer) as session:

        def evaluate_if_due() -> None:
            if session.evaluation_due():
                session.report(eval_loss=evaluate(model, held_out))

        windows = Windows(head, config.get("stride", CONTEXT))
        for inputs, targets in session.batches(windows, batch_size=config.get("batch_size", 8), shuffle=True):
            loss = cross_entropy(model, inputs.to(device), targets.to(device))
            loss.backward()
            session.step(loss)
            evaluate_if_due()
        evaluate_if_due()  # whoever ends last is asked for the final weights, unless it just was


if __name__ == "__main__":
    train({})
