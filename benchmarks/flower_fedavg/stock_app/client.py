"""Flower's usual client."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from stock_app.model import client_data, train_locally

app = ClientApp()


@app.train()
def train(message, context):
    x, y = client_data(int(context.node_config["partition-id"]))
    rng = np.random.default_rng()
    epochs = int(context.run_config["epochs"])
    orders = np.stack([rng.permutation(len(x)) for _ in range(epochs)]).astype(np.int32)
    params = message.content["arrays"].to_numpy_ndarrays()
    params = [np.asarray(array) for array in train_locally(params, x, y, orders)]
    metrics = MetricRecord({"num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(params), "metrics": metrics})
    return Message(content, reply_to=message)
