"""A small residual network with batch norm in fp16, evaluated after each epoch."""

import torch
from torch import nn

from roundpipe import GradScaler, OptimizerCtx, RoundPipe
from roundpipe.optim import Adam


class BasicBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x) if self.downsample else x
        return self.relu(out)


def build_resnet(num_classes=5):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        BasicBlock(8, 8),
        BasicBlock(8, 16, 2),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


torch.manual_seed(0)
data = [(torch.randn(16, 3, 8, 8), torch.randint(5, (16,))) for _ in range(3)]
model = RoundPipe(build_resnet().to(torch.float16), optim_dtype=torch.float32)
with OptimizerCtx():
    optimizer = Adam(model.parameters(), lr=1e-2)
scaler = GradScaler(init_scale=1024.0)
criterion = nn.CrossEntropyLoss()


def optimizer_step():
    scaler.step(optimizer)
    optimizer.zero_grad()


def evaluate():
    model.synchronize()
    model.eval()
    loss_sum, total = 0, 0
    with torch.no_grad():
        for images, labels in data:
            outputs = model(images.to(torch.float16))
            loss_sum += criterion(outputs.float(), labels).item() * labels.size(0)
            total += labels.size(0)
    return loss_sum / total


train_losses, test_losses, correct = [], [], 0
for _ in range(3):
    model.train()
    running_loss, total = 0, 0
    for images, labels in data:
        loss, outputs = model.forward_backward(
            input_args=(images.to(torch.float16),),
            label=labels,
            loss_fn=lambda outputs, labels: (
                scaler.scale(criterion(outputs.float(), labels)) / (torch.cuda.device_count() + 1)
            ),
            return_outputs=True,
        )
        model.step(optimizer_step)
        scaler.update()
        running_loss += loss.item() / scaler.get_scale() * labels.size(0)
        _, predicted = outputs.max(1)
        correct += predicted.eq(labels).sum().item()
        total += labels.size(0)
    train_losses.append(running_loss / total)
    test_losses.append(evaluate())
statistics = {name: b.clone() for name, b in model.named_buffers()}
