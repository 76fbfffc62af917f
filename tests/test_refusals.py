# ruff: noqa: E501
"""Mistakes in Python, as a user makes them: one line that says what is wrong, before work starts.

Run in a process of its own, because the suite's type checker would be faster than our own checks.
"""

import json
import subprocess
import sys

SETUP = """
import json, jax, jax.numpy as jnp, numpy as np, optax, fedpa
from fedpa.objectives import least_squares
local = fedpa.LocalTraining(optax.sgd(0.1), batch_size=5)
side = fedpa.Server(fedpa.server.sgd(1.0))
clients = {"a": {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}}
def fit(method=fedpa.fedavg(local, side), loss=least_squares.loss, clients=clients, params=np.zeros(2), **options):
    options = {"rounds": 1, "clients_per_round": 1, "progress": False} | options
    return fedpa.fit(loss, params, clients, method, **options)
"""

MISTAKES = {
    "fedpa.fedavg(local, fedpa.server.sgd(1.0))": "must be a Server, for example fedpa.Server(",
    "fedpa.fedavg(optax.sgd(0.1), side)": "must be a LocalTraining, for example",
    "fedpa.fedavg(fedpa.LocalTraining(-0.1, 5), side)": "optimizer = -0.1",
    "fedpa.fedpa(local, side._replace(weighting='equal'), rho=0.1)": "weighting = 'equal'",
    "fedpa.mb_sgd(local, side._replace(averaging='polyak'))": "averaging = 'polyak'",
    "fedpa.fedavg(local._replace(order='shuffled'), side)": "order = 'shuffled'",
    "fedpa.fedpa(local, side, rho=0.1, burn_in_rounds=1.5)": "burn_in_rounds = 1.5",
    "fedpa.fedpa(local, side, rho='lw')": "'oas' or 'rblw'",
    "fedpa.mean_control(local, side, rho='oas')": "rho = 'oas': must be a finite number",
    "fit(method='fedavg')": "method = 'fedavg': must be an algorithm",
    "fit(method=side)": "takes a Server",
    "fit(method=local)": "must be an algorithm: fedpa.fedavg(local, server) takes a LocalTraining",
    "fit(method=fedpa.fedpa)": "method = fedpa: must be called with its settings, fedpa.fedpa(local, server)",
    "fit(method=fedpa.centralized)": "fedpa.centralized(local)",
    "fit(method=lambda a, b: a)": "must be called with its settings",
    "fit(params=np.zeros(2, np.complex64))": "params: array has type complex64",
    "fit(params={'w': np.zeros(2), 'n': np.array([2**40])})": "params: ['n'][0] = 1099511627776",
    "fit(clients={'a': clients['a'] | {'y': np.full(4, 2**40 + 7)}})": "client 'a': y[0] = 1099511627783",
    "fit(clients=fedpa.data.FederatedData(['a'], lambda name: 4, lambda name: clients['a'] | {'y': np.array(list('uvwx'))}))": "client 'a': y is of type <U1",
    "fit(clients=fedpa.data.FederatedData(['a'], lambda name: 4, lambda name: clients['a'] | {'y': np.full(4, 1j)}))": "client 'a': y is of type complex128",
    "fedpa.objectives.client_data({'y': np.full(4, 2**40)})": "examples: y[0] = 1099511627776",
    "fit(method=fedpa.fedavg(local, side)(fedpa.Objective(least_squares.loss)))": "method = Algorithm(",
    "fit(method=lambda objective: 3)": "method's answer = 3: must return an algorithm",
    "fit(engine=fedpa.engines.vectorized)": "engine = vectorized: must be called, fedpa.engines.vectorized()",
    "fit(engine=lambda cohort: cohort)": "engine = <function <lambda>",
    "fit(loss=lambda p, b: b['y'] * p[0])": "must be a function of (params, batch, key)",
    "fit(loss=fedpa.Objective(3))": "loss = 3: must be a function",
    "fit(loss=lambda p, b, k: b['label'] * p[0])": "loss: no 'label' (<string>, line 1: ): the batch has 'x', 'y'",
    "fit(params={'w': np.zeros(2)}, loss=lambda p, b, k: b['y'] * p['v'])": "params has 'w'",
    "fit(callbacks=print)": "callbacks = <built-in function print>: must be a list",
    "fit(callbacks=fedpa.early_stopping('eval/mse', 3))": "callbacks = Remembering(",
    "fit(callbacks=[3])": "callbacks = 3: must be a function of (event)",
    "fit(callbacks=[lambda: None])": "must be a function of (event)",
    "fit(evaluate={'mse': 3})": "evaluate = {'mse': 3}: must be a function of (params)",
    "fit(evaluate=lambda p, b: {})": "must be a function of (params)",
    "fit(out=3)": "out = 3: must be a directory",
    "fit(engine='debug')": "engine = 'debug': must be an engine",
    "fit(rounds=2.5)": "rounds = 2.5: must be a whole number",
    "fit(seed=None)": "seed = None: must be a whole number",
    "fit(clients=[clients['a']])": "clients is a list: must be a mapping",
    "fit(clients={'a': {'x': [[1.0, 2.0]], 'y': [1.0]}})": "must be an array",
    "fit(loss=lambda p, b, k: jnp.mean(b['y']))": "wrap a loss of the whole batch in fedpa.per_example",
    "fit(loss=lambda p, b, k: (b['y'] > 0).astype(int))": "must be floating-point",
    "fit(params={'n': 3})": "params has no floating-point arrays",
    "fit(evaluate=lambda p: 0.5)": "evaluate's answer = 0.5: must be metrics by name",
    "fit(callbacks=[lambda e: True])": "callback's answer = True",
    "fit(eval_every=0, evaluate=lambda p: {})": "eval_every = 0",
    "fit(loss=fedpa.Objective(least_squares.loss, regularizer=lambda p: jnp.ones(3)))": "regularizer returns shape (3,)",
    "fit(prior=2.0)": "prior = 2.0: must be a prior",
    "fit(prior=fedpa.normal_prior(sd=np.ones(3)))": "prior.precision has shape (3,)",
    "fit(prior=fedpa.normal_prior(sd={'w': 1.0}))": "prior.precision has leaves ['w']",
    "fit(loss=fedpa.Objective(least_squares.loss, prior=fedpa.normal_prior(sd=1.0)), prior=fedpa.normal_prior(sd=1.0))": "prior = NormalPrior(",
    "fit(loss=3)": "loss = 3: must be a function",
    "fit(recording='run')": "recording = 'run': must be a RecordingOptions",
    "fit(recording=fedpa.RecordingOptions(label=''))": "label = ''",
    "fit(recording=fedpa.RecordingOptions(best=3))": "best = 3: must be a metric",
    "fit(recording=fedpa.RecordingOptions(keep_checkpoints=0))": "keep_checkpoints = 0",
    "fit(min_success=2)": "min_success = 2",
    "fedpa.early_stopping('eval/mse', patience=1.5)": "patience = 1.5: must be a whole number",
    "fedpa.max_minutes('5')": "max_minutes = '5': must be a finite number",
    "fedpa.train(fedpa.fedavg(local, side)(None), np.zeros(2), fedpa.data.FederatedData([], len, dict), rounds=1, clients_per_round=1)": "no clients",
}
FINE = {
    "fit(loss=fedpa.Objective(least_squares.loss, regularizer=lambda p: 0.0))": "",
    "fit(params={'w': np.zeros(2), 'names': np.array(['u', 'v'])}, loss=lambda p, b, k: b['x'] @ p['w'])": "",
}


def test_mistakes_are_one_line_errors(tmp_path):
    cases = json.dumps([*MISTAKES, *FINE])
    code = (
        SETUP
        + f"""
answers = []
for case in json.loads({cases!r}):
    try:
        eval(case)
        answers.append("")
    except fedpa.FedpaError as error:
        answers.append(str(error))
    except Exception as error:
        answers.append(f"TRACEBACK {{type(error).__name__}}: {{error}}")
print(json.dumps(answers))
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for (case, expected), answer in zip((MISTAKES | FINE).items(), answers, strict=True):
        assert expected in answer, (case, answer)
        assert "\n" not in answer, (case, answer)
        assert len(answer) < 400, (case, answer)
        assert bool(answer) == (case in MISTAKES), (case, answer)
