"""A client: its own data, its own training step, FedPA's answer."""

import numpy as np
from flwr.clientapp import ClientApp

from fedpa.numpy_client import reply
from numpy_app.model import loss, site_data, with_one_epoch

app = ClientApp()


@app.train()
def train(message, context):
    site = int(context.node_config["partition-id"])
    x, y = site_data(site)
    rng = np.random.default_rng([site, int(message.content["config"]["server-round"])])
    before = loss(message.content["arrays"].to_numpy_ndarrays(), x, y)
    return reply(message, lambda arrays: with_one_epoch(arrays, x, y, rng), len(x), loss=before)
