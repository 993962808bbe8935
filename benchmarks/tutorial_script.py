"""The beginner's tutorial that this project grew from, as a plain PyTorch script: MNIST, a fully connected net, SGD.

python benchmarks/tutorial_script.py --seed 0
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def load(root, train):
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    dataset = datasets.MNIST(root, train=train, transform=transform)
    return DataLoader(dataset, batch_size=64, shuffle=train)


def build():
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
        nn.LogSoftmax(dim=1),
    )
    return model, nn.NLLLoss(), torch.optim.SGD(model.parameters(), lr=0.003)


def train_batch(model, criterion, optimizer, images, labels):
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def test(model, loader):
    correct = 0
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, criterion, optimizer = build()
    train_loader, test_loader = load(args.root, train=True), load(args.root, train=False)
    for epoch in range(args.epochs):
        model.train()
        running_loss = 0.0
        for images, labels in train_loader:
            running_loss += train_batch(model, criterion, optimizer, images, labels)
        print(f"Epoch {epoch + 1} - Training loss: {running_loss / len(train_loader)}")
    print(f"Test accuracy: {test(model, test_loader)}")


if __name__ == "__main__":
    main()
