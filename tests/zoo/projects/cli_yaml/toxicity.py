"""Toxic comments, character by character."""

import random
import re
import unicodedata

import lightning as L
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

ALPHABET = "abcdefghijklmnopqrstuvwxyz '.!?"


class Comments(Dataset):
    def __init__(self, count: int, seed: int, max_length: int):
        rng = random.Random(seed)
        kind, rude = "thank you nice work i agree well done".split(), "idiot stupid shut up go away fool".split()
        self.max_length = max_length
        self.rows = []
        for _ in range(count):
            toxic = rng.random() < 0.3
            words = [rng.choice(rude if toxic and rng.random() < 0.4 else kind) for _ in range(rng.randrange(5, 60))]
            self.rows.append((" ".join(words).title() + "!" * rng.randrange(4), int(toxic)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, toxic = self.rows[i]
        text = unicodedata.normalize("NFKD", text).lower()
        text = re.sub(r"(.)\1{2,}", r"\1\1", re.sub(r"[^a-z '.!?]", " ", text))[: self.max_length]
        return torch.tensor([ALPHABET.index(c) + 1 for c in text]), toxic


def collate(samples):
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


class TextData(L.LightningDataModule):
    def __init__(self, count: int = 6000, batch_size: int = 32, num_workers: int = 0, max_length: int = 200):
        super().__init__()
        self.save_hyperparameters()

    def _loader(self, count, seed, shuffle):
        hp = self.hparams
        dataset = Comments(count, seed, hp.max_length)
        return DataLoader(
            dataset, batch_size=hp.batch_size, shuffle=shuffle, num_workers=hp.num_workers, collate_fn=collate
        )

    def train_dataloader(self):
        return self._loader(self.hparams.count, 0, True)

    def val_dataloader(self):
        return self._loader(self.hparams.count // 10, 1, False)


class TextModel(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(len(ALPHABET) + 1, width, padding_idx=0)
        self.conv = nn.Sequential(
            nn.Conv1d(width, 64, 5, padding=2), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveMaxPool1d(1)
        )
        self.out = nn.Linear(64, 2)

    def loss(self, batch):
        tokens, labels = batch
        features = self.conv(self.embed(tokens).transpose(1, 2)).squeeze(-1)
        return nn.functional.cross_entropy(self.out(features), labels)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)
