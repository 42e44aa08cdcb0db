import pandas as pd
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from neuralforecast.utils import AirPassengersPanel

rows = AirPassengersPanel[["unique_id", "ds", "y"]]
many = pd.concat([rows.assign(unique_id=rows.unique_id + str(number)) for number in range(100)])
model = NHITS(h=12, input_size=24, max_steps=60, batch_size=32, accelerator="cpu")  # settings
forecast = NeuralForecast(models=[model], freq="ME")
forecast.fit(df=many)
torch.save(forecast.models[0].state_dict(), "weights.pt")
