"""DeepSpeed's CIFAR example, small.

`training_data`, its loader, an optimizer and a schedule of the configuration. Imports no Plait.
"""

import argparse
import json
import sys

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(8 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    images = torch.randn(32, 3, 32, 32)
    labels = torch.randint(0, 10, (32,))
    data = torch.utils.data.TensorDataset(images, labels)
    net = Net()
    parameters = [p for p in net.parameters() if p.requires_grad]
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=data
    )
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            outputs = engine(inputs.to(engine.local_rank if torch.cuda.is_available() else "cpu"))
            loss = criterion(outputs, targets.to(outputs.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    print(
        "\nRESULT "
        + json.dumps([engine.global_rank, losses, float(engine.get_global_grad_norm())]),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
