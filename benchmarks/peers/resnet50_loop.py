"""ResNet-50 on images that are on the device already, with nothing around the step: torchvision's network and torch's
optimizer, or timm's (--timm). Prints images/s, the median of a few blocks, as JSON."""

import argparse
import contextlib
import json
import statistics
import time

import torch
import torch.nn.functional as F

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, of 255
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(device, is_timm):
    """The network, channels_last, and its optimizer."""
    if is_timm:
        import timm
        from timm.optim import create_optimizer_v2

        model = timm.create_model("resnet50", num_classes=1000).to(device, memory_format=torch.channels_last)
        return model, create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
    import torchvision

    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    is_fused = {"fused": True} if device.type == "cuda" else {}
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **is_fused)


def steps(options, device):
    """An endless loop that yields after each step."""
    model, optimizer = build(device, options.timm)
    called = torch.compile(model, mode=options.compile) if options.compile else model
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
    shape = (options.batch, 3, options.size, options.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (options.batch,), device=device)
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    model.train()
    while True:
        inputs = images.float().sub_(mean).div_(std)
        with autocast(device, DTYPES[options.precision]):
            loss = F.cross_entropy(called(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield


def autocast(device, dtype):
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def wait_for(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=DTYPES, required=True)
    parser.add_argument("--compile", choices=("default", "reduce-overhead"), help="the second one uses CUDA graphs")
    parser.add_argument("--timm", action="store_true")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    loop, rates = steps(options, device), []
    for number in range(6):  # the first block warms up and compiles
        wait_for(device)
        start = time.perf_counter()
        for _ in range(options.steps):
            next(loop)
        wait_for(device)
        rates += [options.batch * options.steps / (time.perf_counter() - start)] if number else []
    print(json.dumps({"rate": statistics.median(rates)}))


if __name__ == "__main__":
    main()
