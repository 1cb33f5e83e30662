"""An image classifier in DistributedDataParallel, with batch norm and an evaluation.

Imports no Plait.
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_one_epoch(model, loader, optimizer, criterion):
    model.train()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model, images, labels):
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.randn(32, 3, 8, 8)
    labels = torch.randint(0, 4, (32,))
    sampler = DistributedSampler(TensorDataset(images, labels), seed=3)
    loader = DataLoader(sampler.dataset, batch_size=4, sampler=sampler)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        losses += train_one_epoch(model, loader, optimizer, nn.CrossEntropyLoss())
        schedule.step()
    mean = model.module[1].running_mean.double().sum().item()
    print(
        "\nRESULT " + json.dumps([dist.get_rank(), losses, evaluate(model, images, labels), mean]),
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
