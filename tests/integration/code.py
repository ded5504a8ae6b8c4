"""The code of the jobs that the tests submit: a small regression, with a hole for what a test wants to happen."""

from __future__ import annotations

TRAIN = """
import time

import torch
from torch import nn

import cadenza


def dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, x @ torch.arange(8.0)[:, None])


def train(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.001))
    with cadenza.join(model, optimizer) as session:
        steps = 0
        for x, y in session.batches(dataset(), batch_size=8):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            session.step(loss)
            steps += 1
            time.sleep(config.get("pause_s", 0))
            if config.get("raise_at") == steps and session.worker == 1:
                raise ValueError("no luck at all")
            if session.evaluation_due():
                session.report(evaluated=1.0)
        print(f"worker {session.worker} took {steps} steps")


def returns_early(config):
    return "nothing to do"


def never_steps(config):
    model = nn.Linear(2, 1)
    with cadenza.join(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        pass


def shows_its_gpu(config):
    import os
    print("this worker's cards:", os.environ.get("CUDA_VISIBLE_DEVICES"))
    train(config)


def imports_helpers(config):
    import helpers
    print("helpers say", helpers.GREETING)
    train(config)
"""
"""A module ``regression``."""
