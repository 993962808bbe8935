"""A bare Accelerate script, as its documentation shows one: MNIST, a fully connected net, two steps."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from benchmarks.marked_net import MarkedNet


def main():
    torch.manual_seed(0)
    accelerator = Accelerator()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    dataset = datasets.MNIST("data", train=True, transform=transform)
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    model = MarkedNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for step, (images, labels) in enumerate(loader):
        if step == 2:
            break
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
