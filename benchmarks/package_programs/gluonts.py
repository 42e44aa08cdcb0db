import numpy as np
import pandas as pd
import torch
from gluonts.dataset.common import ListDataset
from gluonts.torch import SimpleFeedForwardEstimator
from lightning.pytorch import seed_everything

seed_everything(1)
first = pd.Period("2020-01-01", "h")
series = [{"start": first, "target": np.sin(np.arange(500) / (5 + number))} for number in range(20)]
estimator = SimpleFeedForwardEstimator(
    prediction_length=12, num_batches_per_epoch=60, trainer_kwargs={"max_epochs": 1, "accelerator": "cpu"}
)
predictor = estimator.train(ListDataset(series, freq="h"))
torch.save(predictor.prediction_net.state_dict(), "weights.pt")
