"""Next-event prediction from server logs that are read as a stream. The stream does not divide itself among workers."""

import argparse
import gzip
import json
import random
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

EVENTS = ["login", "search", "view", "cart", "buy", "logout", "error", "help"]
WINDOW = 32


def write_logs(folder: Path, lines: int) -> None:
    rng = random.Random(11)
    folder.mkdir(parents=True)
    for day in range(4):
        with gzip.open(folder / f"2024-05-{day + 1:02d}.jsonl.gz", "wt") as out:
            for i in range(lines // 4):
                event = EVENTS[(i * 3 + rng.randrange(3)) % len(EVENTS)]
                out.write(json.dumps({"id": f"{day}-{i}", "event": event, "ms": rng.lognormvariate(3, 1)}) + "\n")


class LogStream(IterableDataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.jsonl.gz"))

    def __iter__(self):
        recent = []
        for file in self.files:
            with gzip.open(file, "rt") as lines:
                for line in lines:
                    row = json.loads(line)
                    recent.append((EVENTS.index(row["event"]), row["ms"]))
                    if len(recent) == WINDOW + 1:
                        yield {
                            "event": torch.tensor([event for event, _ in recent[:-1]]),
                            "log_ms": torch.tensor([ms for _, ms in recent[:-1]]).log(),
                            "next": recent[-1][0],
                        }
                        del recent[:2]


class NextEvent(L.LightningModule):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(len(EVENTS), width - 1)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, len(EVENTS))

    def training_step(self, batch, batch_idx):
        x = torch.cat([self.embed(batch["event"]), batch["log_ms"].unsqueeze(-1)], dim=-1)
        states, _ = self.gru(x)
        loss = nn.functional.cross_entropy(self.out(states[:, -1]), batch["next"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("logs", type=Path, nargs="?", default=Path("logs"))
    parser.add_argument("--lines", type=int, default=60_000)
    options = parser.parse_args()
    L.seed_everything(4)
    if not options.logs.exists():
        write_logs(options.logs, options.lines)
    loader = DataLoader(LogStream(options.logs), batch_size=32)
    L.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False).fit(NextEvent(), loader)
