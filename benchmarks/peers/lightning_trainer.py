"""The tutorial's job by Lightning's Trainer with its defaults, as its documentation shows a first training."""

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.marked_net import MarkedNet
from benchmarks.peers.job import BATCH_SIZE, LEARNING_RATE, answer, arguments, mnist


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = MarkedNet()
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch, batch_index):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_index):
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("top1", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def main():
    options = arguments()
    L.seed_everything(options.seed)
    trainer = L.Trainer(max_epochs=options.epochs, accelerator="cpu", default_root_dir=options.output)
    model = Classifier()
    trainer.fit(model, DataLoader(mnist(train=True), batch_size=BATCH_SIZE, shuffle=True))
    (metrics,) = trainer.test(model, DataLoader(mnist(train=False), batch_size=BATCH_SIZE))
    answer(metrics["top1"])


if __name__ == "__main__":
    main()
