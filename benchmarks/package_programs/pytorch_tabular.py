import numpy as np
import pandas as pd
import torch
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

draw = np.random.default_rng(1)
columns = [f"x{number}" for number in range(8)]
table = pd.DataFrame(draw.normal(size=(6000, 8)), columns=columns)
table["y"] = (table.x0 > 0).astype(int)
model = TabularModel(
    data_config=DataConfig(target=["y"], continuous_cols=columns),  # settings
    model_config=CategoryEmbeddingModelConfig(task="classification", layers="64-32"),
    optimizer_config=OptimizerConfig(),
    trainer_config=TrainerConfig(batch_size=64, max_epochs=1, accelerator="cpu", load_best=False, checkpoints=None),
)
model.fit(train=table, seed=1)
torch.save(model.model.state_dict(), "weights.pt")
