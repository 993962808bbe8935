"""configs/mnist.yaml through Accelerate, in the shape of its vision example: the same net, recipe and number of epochs,
in fp32; augmentation by torchvision in loader workers."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks.peers.accelerate_example import WORKERS, evaluate
from benchmarks.peers.job import answer, arguments, workers
from trainer.models import MnistCNN

EPOCHS = 3
BATCH_SIZE = 256
PEAK_RATE = 0.01
WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.25
SHIFT = 2
SMOOTHING = 0.1
MEAN, STD = (0.1307,), (0.3081,)


def load(train):
    """Shifted in training by up to two pixels, filled with zeros."""
    augment = [transforms.RandomCrop(28, padding=SHIFT)] if train else []
    transform = transforms.Compose([*augment, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    dataset = datasets.MNIST("data", train=train, transform=transform)
    return DataLoader(dataset, shuffle=train, batch_size=BATCH_SIZE, num_workers=workers(WORKERS))


def decayed(model):
    """Norms and biases do not decay."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def main():
    options = arguments()
    accelerator = Accelerator(cpu=True)
    set_seed(options.seed)
    model = MnistCNN(num_classes=10, image_shape=(1, 28, 28)).to(memory_format=torch.channels_last)
    train_loader, test_loader = load(True), load(False)
    optimizer = torch.optim.AdamW(decayed(model), lr=PEAK_RATE)
    length = {"total_steps": EPOCHS * len(train_loader), "pct_start": WARMUP_FRACTION}
    scheduler = OneCycleLR(optimizer, max_lr=PEAK_RATE, cycle_momentum=False, **length)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        top1 = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: {100 * top1:.2f}")
    answer(top1)


if __name__ == "__main__":
    main()
