"""The tutorial's job through Accelerate, in the shape of its examples: everything prepared, its own loaders, metrics
gathered by gather_for_metrics, the state saved after each epoch."""

from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from benchmarks.marked_net import MarkedNet
from benchmarks.peers.job import BATCH_SIZE, LEARNING_RATE, answer, arguments, mnist, workers

WORKERS = 4  # the vision example's


def evaluate(accelerator, model, loader):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == labels).sum().item()
        total += len(labels)
    return correct / total


def main():
    options = arguments()
    accelerator = Accelerator(cpu=True)
    set_seed(options.seed)
    model = MarkedNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loading = {"batch_size": BATCH_SIZE, "num_workers": workers(WORKERS)}
    train_loader = DataLoader(mnist(train=True), shuffle=True, **loading)
    test_loader = DataLoader(mnist(train=False), **loading)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for epoch in range(options.epochs):
        model.train()
        for images, labels in islice(train_loader, options.steps):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        top1 = evaluate(accelerator, model, test_loader)
        accelerator.save_state(Path(options.output) / f"epoch_{epoch}")
        accelerator.print(f"epoch {epoch}: {100 * top1:.2f}")
    answer(top1)


if __name__ == "__main__":
    main()
