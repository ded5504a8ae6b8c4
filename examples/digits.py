"""A small convolutional network reads scikit-learn's 1,797 handwritten digits.

As a job: ``cadenza submit examples/digits.yaml --watch``. Alone, on one machine: ``python examples/digits.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import cadenza

TEST_SHARE = 0.2
SPLIT_SEED = 1797
"""The held-out images are the same for every job and seed, so that accuracies can be compared."""


def load() -> tuple[TensorDataset, TensorDataset]:
    """The training and the held-out images, [1, 8, 8] floats from 0 to 1, with their digits, int64."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=TEST_SHARE, stratify=labels, random_state=SPLIT_SEED
    )
    return _dataset(train_x, train_y), _dataset(test_x, test_y)


def _dataset(images: Any, labels: Any) -> TensorDataset:
    pixels = torch.as_tensor(images, dtype=torch.float32) / 16
    return TensorDataset(pixels.reshape(-1, 1, 8, 8), torch.as_tensor(labels, dtype=torch.int64))


def build() -> nn.Sequential:
    """The network: [batch, 1, 8, 8] images to [batch, 10] logits, about 40 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, held_out: TensorDataset, device: torch.device) -> dict[str, float]:
    """Accuracy and mean cross entropy (nats) on the held-out images."""
    images, labels = (tensor.to(device) for tensor in held_out.tensors)
    model.eval()
    logits: Tensor = model(images)
    model.train()
    return {
        "accuracy": (logits.argmax(dim=1) == labels).float().mean().item(),
        "test_loss": F.cross_entropy(logits, labels).item(),
    }


def train(config: dict[str, Any]) -> None:
    """Train on leased batches; ``config`` may hold lr, batch_size, seed, and epochs for a run outside a job."""
    torch.set_num_threads(1)  # so small a network only loses by splitting its layers over threads
    torch.manual_seed(config.get("seed", 0))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out = load()
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 2e-3))

    with cadenza.join(model, optimizer) as session:

        def evaluate_if_due() -> None:
            if session.evaluation_due():
                session.report(**evaluate(model, held_out, device))

        batch_size, epochs = config.get("batch_size", 32), config.get("epochs")
        for images, labels in session.batches(training, batch_size=batch_size, shuffle=True, epochs=epochs):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            session.step(loss)
            evaluate_if_due()
        evaluate_if_due()  # whoever ends last is asked for the final weights, unless it just was


if __name__ == "__main__":
    train({"epochs": 15})
