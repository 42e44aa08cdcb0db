"""Sentiment of reviews: a small BERT, dynamic padding, batches of similar length."""

import argparse
import random

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

GOOD = "great fine lovely superb warm bright honest clever".split()
BAD = "awful dull bleak poor clumsy cold tired weak".split()
FILLER = [a + b for a in "ba co du fi go ha ju ka lo mi".split() for b in "ran tel sun mor vik pad".split()]


def make_reviews(count: int) -> list[tuple[str, int]]:
    rng = random.Random(0)
    reviews = []
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices(FILLER, k=int(rng.lognormvariate(3.4, 0.6)) + 4)
        words[:: max(2, len(words) // 3)] = rng.choices(
            GOOD if label else BAD, k=len(words[:: max(2, len(words) // 3)])
        )
        reviews.append((" ".join(words), label))
    return reviews


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tok = Tokenizer(models.BPE(unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=["[UNK]", "[PAD]", "[CLS]"]))
    return PreTrainedTokenizerFast(tokenizer_object=tok, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]")


class ReviewDataset(Dataset):
    def __init__(self, reviews, tokenizer, max_length=128):
        self.reviews, self.tokenizer, self.max_length = reviews, tokenizer, max_length

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, idx):
        text, label = self.reviews[idx]
        item = self.tokenizer(text, truncation=True, max_length=self.max_length)
        item["labels"] = label
        return item


class BucketSampler(Sampler):
    """Batches of similar length, in random order."""

    def __init__(self, lengths, batch_size):
        self.lengths, self.batch_size = lengths, batch_size

    def __len__(self):
        return len(self.lengths) // self.batch_size

    def __iter__(self):
        by_length = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        batches = [by_length[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]
        for i in torch.randperm(len(batches)).tolist():
            yield batches[i]


class Sentiment(L.LightningModule):
    def __init__(self, vocab_size: int, pad_id: int):
        super().__init__()
        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            pad_token_id=pad_id,
        )
        self.bert = BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        out = self.bert(**batch)
        self.log("train_loss", out.loss, batch_size=len(batch["labels"]))
        return out.loss

    def validation_step(self, batch, batch_idx):
        out = self.bert(**batch)
        self.log("val_loss", out.loss, prog_bar=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=5e-4)
        warmup = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=50)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--reviews", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    hp = parser.parse_args()

    L.seed_everything(13)
    data = make_reviews(hp.reviews)
    tokenizer = build_tokenizer([text for text, _ in data])
    split = len(data) * 9 // 10
    train_set, val_set = ReviewDataset(data[:split], tokenizer), ReviewDataset(data[split:], tokenizer)
    collator = DataCollatorWithPadding(tokenizer)
    train_loader = DataLoader(
        train_set,
        batch_sampler=BucketSampler([len(text.split()) for text, _ in data[:split]], hp.batch_size),
        collate_fn=collator,
        num_workers=hp.num_workers,
    )
    val_loader = DataLoader(val_set, batch_size=hp.batch_size, collate_fn=collator)
    trainer = L.Trainer(max_epochs=hp.epochs, accelerator="cpu", logger=CSVLogger("logs"), gradient_clip_val=1.0)
    trainer.fit(Sentiment(len(tokenizer), tokenizer.pad_token_id), train_loader, val_loader)
