import numpy as np
import torch
from darts import TimeSeries
from darts.models import NBEATSModel

series = [TimeSeries.from_values(np.sin(np.arange(500, dtype=np.float32) / (5 + number))) for number in range(4)]
model = NBEATSModel(
    input_chunk_length=24, output_chunk_length=12, n_epochs=1, batch_size=32, random_state=1, num_stacks=2,
    layer_widths=64, pl_trainer_kwargs={"accelerator": "cpu", "logger": True},
)  # fmt: skip
model.fit(series)  # settings
torch.save(model.model.state_dict(), "weights.pt")
