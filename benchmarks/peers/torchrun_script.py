"""A plain DistributedDataParallel script for torchrun, as PyTorch's documentation shows one: the tutorial's net on
MNIST, a global batch of 64, two steps."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.marked_net import MarkedNet
from benchmarks.peers.job import BATCH_SIZE, LEARNING_RATE, mnist

STEPS = 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = mnist(train=True)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(MarkedNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    sampler.set_epoch(0)
    model.train()
    for step, (images, labels) in enumerate(loader):
        if step == STEPS:
            break
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    print(f"rank {os.environ['RANK']}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
