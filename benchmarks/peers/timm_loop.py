"""The tutorial's job with timm's data set, loader, optimizer, scheduler and meters.

timm's training script is not in its package, so the loop around these is ours, in the script's shape: the meter is
updated in every step and the scheduler is asked after it. Its loader drops the last, smaller batch of an epoch.
"""

import torch
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, accuracy, random_seed
from torch import nn

from benchmarks.marked_net import MarkedNet
from benchmarks.peers.job import BATCH_SIZE, LEARNING_RATE, answer, arguments, workers

WORKERS = 4  # the script's default
LOG_EVERY = 50


def load(train, device):
    """Without augmentation; its resize and crop to 28x28 leave the images as they are."""
    dataset = create_dataset("torch/mnist", root="data", split="train" if train else "validation", is_training=train)
    shape = {"input_size": (1, 28, 28), "mean": (0.5,), "std": (0.5,), "crop_pct": 1.0}
    loading = {"batch_size": BATCH_SIZE, "num_workers": workers(WORKERS), "device": device}
    return create_loader(dataset, is_training=train, no_aug=True, **shape, **loading)


def train_epoch(model, criterion, optimizer, scheduler, loader, epoch):
    model.train()
    losses = AverageMeter()
    updates = epoch * len(loader)
    for step, (images, target) in enumerate(loader):
        loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.update(loss.item(), len(images))
        updates += 1
        if step % LOG_EVERY == 0:
            rate = optimizer.param_groups[0]["lr"]
            print(f"train: {epoch} [{step}/{len(loader)}] loss: {losses.val:.4f} ({losses.avg:.4f}) lr: {rate:.1e}")
        scheduler.step_update(num_updates=updates, metric=losses.avg)


@torch.inference_mode()
def validate(model, criterion, loader):
    model.eval()
    losses, top1 = AverageMeter(), AverageMeter()
    for images, target in loader:
        output = model(images)
        losses.update(criterion(output, target).item(), len(images))
        acc1, _ = accuracy(output, target, topk=(1, 5))
        top1.update(acc1.item(), len(images))
    print(f"test: loss: {losses.avg:.4f} acc1: {top1.avg:.3f}")
    return top1.avg / 100


def main():
    options = arguments()
    random_seed(options.seed)
    device = torch.device("cpu")
    train_loader, test_loader = load(True, device), load(False, device)
    model, criterion = MarkedNet(), nn.CrossEntropyLoss()
    # `momentum` is its SGD without Nesterov; of 0, that of the tutorial.
    optimizer = create_optimizer_v2(model, opt="momentum", lr=LEARNING_RATE, momentum=0.0)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="constant", num_epochs=options.epochs, updates_per_epoch=len(train_loader)
    )
    for epoch in range(options.epochs):
        train_epoch(model, criterion, optimizer, scheduler, train_loader, epoch)
        top1 = validate(model, criterion, test_loader)
        scheduler.step(epoch + 1, top1)
    answer(top1)


if __name__ == "__main__":
    main()
