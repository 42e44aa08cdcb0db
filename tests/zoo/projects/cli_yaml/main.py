"""``python main.py fit --config config.yaml``"""

from lightning.pytorch.cli import LightningCLI
from toxicity import TextData, TextModel

if __name__ == "__main__":
    LightningCLI(TextModel, TextData)
