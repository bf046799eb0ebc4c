"""Trains the autoencoder of Lightning's first example, with a validation and a checkpoint."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 28 * 28))

    def _loss(self, batch):
        x = batch[0].view(batch[0].size(0), -1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss)
        print(f"step {self.global_step} loss {loss.item():.6f}")
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


L.seed_everything(7)
train = DataLoader(TensorDataset(torch.randn(128, 1, 28, 28)), batch_size=32, shuffle=True)
val = DataLoader(TensorDataset(torch.randn(32, 1, 28, 28)), batch_size=32)
trainer = L.Trainer(
    max_epochs=2, accelerator="auto", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(dirpath="checkpoints", monitor="val_loss")], default_root_dir=".",
)  # fmt: skip
trainer.fit(LitAutoEncoder(), train, val)
print(f"best {trainer.checkpoint_callback.best_model_path.rsplit('/', 1)[-1]}")
