from __future__ import annotations

import torch

from cadenza.training.device import DirectCopies, LateCopies, copies_for, describe, on_cuda


def test_late_copies_are_made_at_the_wait_and_not_before() -> None:
    source, target = torch.tensor([1.0, 2.0]), torch.zeros(2)
    copies = LateCopies()
    copies.to_host(target, source)
    assert target.tolist() == [0, 0]
    source[0] = 5.0  # nothing was remembered of the source
    copies.wait()
    assert target.tolist() == [5, 2]


def test_late_copies_are_made_once_and_in_order() -> None:
    first, second, target = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(0.0)
    copies = LateCopies()
    copies.to_device(target, first)
    copies.to_device(target, second)
    copies.wait()
    assert target.item() == 2
    target.zero_()
    copies.wait()
    assert target.item() == 0


def test_direct_copies_are_made_at_once() -> None:
    target = torch.zeros(2)
    DirectCopies().to_device(target, torch.ones(2))
    assert target.tolist() == [1, 1]


def test_tensors_on_the_cpu_are_copied_directly() -> None:
    tensors = [torch.zeros(1)]
    assert isinstance(copies_for(tensors), DirectCopies)
    assert not on_cuda(tensors)
    assert describe(tensors[0]) == "cpu"
