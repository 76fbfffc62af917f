"""A model and a table of your own: 442 patients, whose clinic is a column, and a flax network.

    pip install 'fedpa[tables]' flax
    python examples/own_model.py runs/own-model

Run it again: it gives back what is finished. Interrupt it (Ctrl-C, or `kill -9`) and run it again:
it is resumed from its last checkpoint, and ends with the same numbers, bit for bit.
"""

import sys

import flax.linen as nn
import jax
import numpy as np
import optax
import pandas as pd
from sklearn.datasets import load_diabetes

import fedpa
from fedpa.data.readers import open_table


def main(out: str, rounds: int = 60) -> fedpa.Fit:
    # A table with a client column. Here clinics differ by the age of their patients.
    table = load_diabetes(as_frame=True).frame
    table["clinic"] = "clinic-" + pd.qcut(table["age"], 12, labels=False).astype(str)
    features = [name for name in table.columns if name not in ("target", "clinic")]
    scale = table["target"].std()

    def arrays(clinic, rows):  # the columns of one clinic → what the loss is given
        x = np.stack([rows[name] for name in features], axis=-1).astype(np.float32)
        return {"x": 20 * x, "y": ((rows["target"] - 152) / scale).astype(np.float32)}

    held_out = table.index % 5 == 0
    clients = fedpa.data.map_examples(open_table(table[~held_out], "clinic"), arrays)
    test = arrays("all", {name: table[held_out][name].to_numpy() for name in table.columns})

    # Any model will do: a function of parameters, which are a pytree of arrays.
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))[..., 0]

    network = Network()
    params = network.init(jax.random.key(0), test["x"][:1])

    def loss(params, batch, key):  # one number per example
        return (network.apply(params, batch["x"]) - batch["y"]) ** 2

    def evaluate(params):
        error = network.apply(params, test["x"]) - test["y"]
        return {"mse": float((error**2).mean())}

    method = fedpa.fedpa(
        fedpa.LocalTraining(optax.sgd(0.02), batch_size=8, epochs=5),
        fedpa.Server(fedpa.server.sgd(0.5)),
        rho=0.1,
        burn_in_rounds=10,
    )
    result = fedpa.fit(
        loss,
        params,
        clients,
        method,
        rounds=rounds,
        clients_per_round=6,
        evaluate=evaluate,
        out=out,
        recording=fedpa.RecordingOptions(best="eval/mse"),
        callbacks=[fedpa.early_stopping("eval/mse", patience=20)],
    )
    print(result)
    print(result.history.to_pandas()[["phase", "train/loss", "eval/mse"]].iloc[::10])
    best = fedpa.load(out, "best", params=params)
    print(f"best: round {best.round}, test error {evaluate(best.params)['mse']:.3f} of variance 1")
    return result


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own-model")
