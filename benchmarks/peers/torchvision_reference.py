"""The tutorial's job in the shape of torchvision's reference script: loader workers, meters smoothed over a window,
accuracy and loss read from the device in every step, a line now and then."""

import time
from collections import deque
from statistics import fmean

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from benchmarks.marked_net import MarkedNet
from benchmarks.peers.job import BATCH_SIZE, LEARNING_RATE, answer, arguments, mnist, workers

WORKERS = 16  # the script's default
PRINT_EVERY = 100


class Meter:
    """A value's mean over the last steps, and over all of them."""

    def __init__(self, window=20):
        self.recent, self.total, self.count = deque(maxlen=window), 0.0, 0

    def update(self, value, count=1):
        self.recent.append(value)
        self.total += value * count
        self.count += count

    def __str__(self):
        return f"{fmean(self.recent):.4f} ({self.total / self.count:.4f})"


def top_k(output, target, topk):
    """Percent of `target` that is among the k largest."""
    with torch.inference_mode():
        _, found = output.topk(max(topk), 1, True, True)
        hits = found.t().eq(target[None])
        return [hits[:k].flatten().sum(dtype=torch.float32) * (100.0 / len(target)) for k in topk]


def train_epoch(model, criterion, optimizer, loader, epoch):
    model.train()
    meters = {name: Meter() for name in ("loss", "acc1", "acc5", "img/s")}
    for step, (images, target) in enumerate(loader):
        start = time.time()
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        acc1, acc5 = top_k(output, target, topk=(1, 5))
        meters["loss"].update(loss.item())
        meters["acc1"].update(acc1.item(), len(images))
        meters["acc5"].update(acc5.item(), len(images))
        meters["img/s"].update(len(images) / (time.time() - start))
        if step % PRINT_EVERY == 0:
            print(f"epoch {epoch} [{step}/{len(loader)}]", *(f"{name}: {meter}" for name, meter in meters.items()))


def evaluate(model, criterion, loader):
    model.eval()
    loss_meter, top1 = Meter(), Meter()
    with torch.inference_mode():
        for images, target in loader:
            output = model(images)
            loss_meter.update(criterion(output, target).item())
            acc1, _ = top_k(output, target, topk=(1, 5))
            top1.update(acc1.item(), len(images))
    print(f"test loss: {loss_meter} acc1: {top1}")
    return top1.total / top1.count / 100


def main():
    options = arguments()
    torch.manual_seed(options.seed)
    train, test = mnist(train=True), mnist(train=False)
    loading = {"batch_size": BATCH_SIZE, "num_workers": workers(WORKERS)}
    train_loader = DataLoader(train, sampler=RandomSampler(train), **loading)
    test_loader = DataLoader(test, sampler=SequentialSampler(test), **loading)
    model, criterion = MarkedNet(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    for epoch in range(options.epochs):
        train_epoch(model, criterion, optimizer, train_loader, epoch)
        scheduler.step()
        top1 = evaluate(model, criterion, test_loader)
    answer(top1)


if __name__ == "__main__":
    main()
