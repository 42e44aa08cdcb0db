"""Keyword spotting: wav files, random crops, mel spectrograms in the workers."""

import math
import wave
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

RATE, SECONDS, WORDS = 16_000, 1.5, 6


def record_words(folder: Path, count: int = 1200) -> None:
    rng = np.random.default_rng(17)
    t = np.arange(int(RATE * SECONDS)) / RATE
    for i in range(count):
        word = i % WORDS
        (folder / f"word{word}").mkdir(parents=True, exist_ok=True)
        tone = np.sin(2 * np.pi * (180 + 90 * word) * t * (1 + 0.1 * np.sin(2 * np.pi * 3 * t)))
        sound = 0.4 * tone + 0.1 * rng.standard_normal(len(t))
        with wave.open(str(folder / f"word{word}" / f"{i:05d}.wav"), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(RATE)
            out.writeframes((sound * 20_000).astype("<i2").tobytes())


def mel_filters(n_fft=512, bands=64):
    mel = torch.linspace(0, 2595 * math.log10(1 + RATE / 2 / 700), bands + 2)
    bins = (700 * (10 ** (mel / 2595) - 1)) / (RATE / 2) * (n_fft // 2)
    frequency = torch.arange(n_fft // 2 + 1).unsqueeze(1)
    up = (frequency - bins[:-2]) / (bins[1:-1] - bins[:-2])
    down = (bins[2:] - frequency) / (bins[2:] - bins[1:-1])
    return torch.minimum(up, down).clamp(min=0)


class SpeechCommands(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.rglob("*.wav"))
        self.window, self.mel = torch.hann_window(512), mel_filters()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with wave.open(str(self.files[i]), "rb") as sound:
            samples = torch.frombuffer(bytearray(sound.readframes(sound.getnframes())), dtype=torch.int16) / 32768
        start = int(torch.randint(0, len(samples) - RATE, ()))
        samples = samples[start : start + RATE] + 0.005 * torch.randn(RATE)
        power = torch.stft(samples, 512, 128, window=self.window, return_complex=True).abs().square()
        spectrogram = (self.mel.T @ power + 1e-6).log()
        return spectrogram.unsqueeze(0), int(self.files[i].parent.name[4:])


class SpeechData(L.LightningDataModule):
    def __init__(self, folder=Path("speech"), batch_size=24):
        super().__init__()
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self):
        if not self.folder.exists():
            record_words(self.folder)

    def setup(self, stage):
        everything = SpeechCommands(self.folder)
        held_back = len(everything) // 10
        self.train, self.val = random_split(
            everything, [len(everything) - held_back, held_back], torch.Generator().manual_seed(0)
        )

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=2, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=2)


class KeywordNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 12, 5, stride=2),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(384, WORDS),
        )

    def step(self, batch, name):
        spectrogram, word = batch
        loss = nn.functional.cross_entropy(self.net(spectrogram), word)
        self.log(f"{name}_loss", loss, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 2e-3)


if __name__ == "__main__":
    L.seed_everything(6, workers=True)
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", deterministic=True)
    trainer.fit(KeywordNet(), datamodule=SpeechData())
