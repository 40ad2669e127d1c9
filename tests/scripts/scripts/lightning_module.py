"""A LightningModule that a Trainer fits: clipping, accumulation, a scheduler, validation and checkpoints are the Trainer's."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.loss(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100)}


if __name__ == "__main__":
    lightning.seed_everything(0)
    x, y = torch.randn(512, 16), torch.randint(4, (512,))
    train = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    validation = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=200, accelerator="cpu", gradient_clip_val=1.0, accumulate_grad_batches=2, enable_progress_bar=False
    )
    trainer.fit(Classifier(), train, validation)
