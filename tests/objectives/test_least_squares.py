import numpy as np
import pytest

from fedpa import FedpaError
from fedpa.objectives import make_regression


def test_arguments_do_what_they_say():
    sizes = [50, 80]
    exact = make_regression(0, sizes=sizes, dim=4, noise=0.0, heterogeneity=0.0)
    for client, optimum in zip(exact.clients.values(), exact.optima, strict=True):
        np.testing.assert_allclose(client["x"] @ optimum, client["y"], atol=1e-4)
    np.testing.assert_allclose(exact.optima[0], exact.optima[1])
    assert [len(c["y"]) for c in exact.clients.values()] == sizes

    low = make_regression(0, sizes=sizes, dim=4, rank=2)
    ranks = [np.linalg.matrix_rank(c["x"], tol=1e-4) for c in low.clients.values()]
    assert ranks == [2, 2]

    white = make_regression(0, sizes=[20_000], dim=4, skew=0.0)
    np.testing.assert_allclose(np.cov(white.clients["client-0000"]["x"].T), np.eye(4), atol=0.05)

    apart = make_regression(0, sizes=[5] * 200, dim=4, heterogeneity=3.0)
    assert np.std(apart.optima, axis=0) == pytest.approx(3.0, rel=0.2)


def test_same_seed_same_federation():
    one, same, other = (make_regression(s, sizes=[5], dim=2).clients for s in (1, 1, 2))
    np.testing.assert_array_equal(one["client-0000"]["x"], same["client-0000"]["x"])
    assert not np.array_equal(one["client-0000"]["x"], other["client-0000"]["x"])


@pytest.mark.parametrize(
    ("options", "field"),
    [({"rank": 9}, "rank = 9"), ({"noise": -1.0}, "noise"), ({"skew": np.nan}, "skew")],
)
def test_bad_arguments_are_refused(options, field):
    with pytest.raises(FedpaError, match=field):
        make_regression(0, sizes=[5], dim=4, **options)
