"""Random numbers of worker threads: a stream for each sample, and nothing of it seen by anybody else."""

import logging
import random
import threading

import numpy as np
import pytest
import torch

from lightning_feed.errors import LoaderError
from lightning_feed.load import thread_random
from lightning_feed.load.epoch_order import mix_seed
from lightning_feed.load.thread_random import SampleRandom, SharedRandom, prepare, warn_of_shared

X = torch.full((3, 4), 0.5)


def _draw_in_script(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(3) + x.sum()


DRAWS = {
    "rand": lambda g=None: torch.rand(3, generator=g),
    "randn": lambda g=None: torch.randn(3, generator=g),
    "randint": lambda g=None: torch.randint(0, 1000, (3,), generator=g),
    "randint high": lambda g=None: torch.randint(1000, (3,), generator=g),
    "randperm": lambda g=None: torch.randperm(20, generator=g),
    "normal of tensors": lambda g=None: torch.normal(X, X, generator=g),
    "normal of a tensor": lambda g=None: torch.normal(X, 1.0, generator=g),
    "normal of a number": lambda g=None: torch.normal(1.0, X, generator=g),
    "normal of a size": lambda g=None: torch.normal(0.0, 1.0, (3,), generator=g),
    "bernoulli": lambda g=None: torch.bernoulli(X, generator=g),
    "multinomial": lambda g=None: torch.multinomial(torch.ones(20), 6, generator=g),
    "poisson": lambda g=None: torch.poisson(X * 20, generator=g),
    "binomial": lambda g=None: torch.binomial(X * 200, X, generator=g),
    "uniform_": lambda g=None: torch.empty(3).uniform_(2, 5, generator=g),
    "normal_": lambda g=None: torch.empty(3).normal_(1, 2, generator=g),
    "random_": lambda g=None: torch.empty(3).random_(generator=g),
    "random_ to": lambda g=None: torch.empty(3).random_(900, generator=g),
    "random_ from to": lambda g=None: torch.empty(3).random_(9, 900, generator=g),
    "exponential_": lambda g=None: torch.empty(3).exponential_(generator=g),
    "cauchy_": lambda g=None: torch.empty(3).cauchy_(generator=g),
    "geometric_": lambda g=None: torch.empty(9).geometric_(0.1, generator=g),
    "log_normal_": lambda g=None: torch.empty(3).log_normal_(generator=g),
    "bernoulli_": lambda g=None: torch.empty(50).bernoulli_(0.5, generator=g),
    "bernoulli_ of a tensor": lambda g=None: torch.empty(50).bernoulli_(torch.full((50,), 0.5), generator=g),
}
WITHOUT_GENERATOR = {
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 1000),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(50)),
    "rrelu": lambda: torch.nn.functional.rrelu(-torch.ones(50), training=True),
    "gumbel_softmax": lambda: torch.nn.functional.gumbel_softmax(X),
    "init": lambda: torch.nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "out": lambda: torch.rand(3, out=torch.empty(3)),
}


def in_thread(*work):
    """What each piece of work gives in a thread that has streams for samples; the first of them at (1, 2, 3)."""
    prepare()
    given = []

    def serve():
        with SampleRandom() as streams:
            streams.begin(1, 2, 3)
            given.extend(one() if one is not again else streams.begin(1, 2, 3) for one in work)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert len(given) == len(work), "the thread failed"
    return given


def again():
    """Goes to the beginning of the stream once more."""


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_that_of_the_samples_own_generator(draw):
    before = torch.get_rng_state()
    first, second, _, repeated = in_thread(draw, draw, again, draw)
    own = torch.Generator().manual_seed(mix_seed(1, 2, 3, "sample"))
    assert torch.equal(first, draw(own))
    assert torch.equal(second, draw(own))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", WITHOUT_GENERATOR.values(), ids=WITHOUT_GENERATOR)
def test_what_takes_no_generator_draws_from_it_all_the_same(draw):
    before = torch.get_rng_state()
    first, second, _, repeated = in_thread(draw, draw, again, draw)
    assert torch.equal(first, repeated)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


# torch says that scripting will go away; there are recipes that use it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_functions_too():
    scripted = torch.jit.script(_draw_in_script)
    before = torch.get_rng_state()
    first, second, _, repeated = in_thread(lambda: scripted(X), lambda: scripted(X), again, lambda: scripted(X))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_users_generator_is_left_to_the_user(draw):
    users = torch.Generator().manual_seed(5)
    (drawn,) = in_thread(lambda: draw(users))
    assert torch.equal(drawn, draw(torch.Generator().manual_seed(5)))


def test_samples_differ_by_pass_batch_and_place():
    prepare()
    seen = set()
    with SampleRandom() as streams:
        for key in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, -1)):
            streams.begin(*key)
            seen.add(torch.rand(()).item())
    assert len(seen) == 5


def test_other_threads_draw_as_before():
    prepare()
    torch.manual_seed(3)
    expected = [torch.rand(2), torch.randint(9, (4,)), torch.empty(2).normal_(), torch.randperm(4)]
    inside, leave = threading.Event(), threading.Event()

    def serve():
        with SampleRandom():
            torch.rand(3)
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=serve)
    thread.start()
    inside.wait(10)
    torch.manual_seed(3)
    drawn = [torch.rand(2), torch.randint(9, (4,)), torch.empty(2).normal_(), torch.randperm(4)]
    leave.set()
    thread.join()
    assert all(map(torch.equal, drawn, expected))


def test_leaving_it_gives_the_thread_torchs_numbers_back():
    prepare()
    with SampleRandom():
        torch.rand(1)
    torch.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), drawn)


def test_gradients_pass_through_a_draw():
    weight = torch.ones(50, requires_grad=True)
    (gradient,) = in_thread(lambda: torch.autograd.grad(torch.nn.functional.dropout(weight).sum(), weight)[0])
    assert set(gradient.tolist()) == {0.0, 2.0}


def test_what_is_not_on_the_cpu_is_left_alone():
    (drawn,) = in_thread(lambda: torch.empty(3, device="meta").uniform_())
    assert drawn.device.type == "meta"


def test_an_error_of_the_operation_is_as_without():
    def fail():
        with pytest.raises(RuntimeError, match="from"):
            torch.empty(3).uniform_(5, 2)

    in_thread(fail)


def test_a_torch_that_cannot_do_it_is_refused_with_words(monkeypatch):
    monkeypatch.setattr(thread_random, "_registered", [])
    monkeypatch.setattr(torch._C, "_parse_dispatch_key", lambda name: None)
    with pytest.raises(LoaderError, match="Use workers='process'"):
        prepare()


# --- what cannot be given to threads --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "word", "state"),
    [
        (lambda: random.random(), "Python's random", random.getstate),
        (lambda: random.gauss(0, 1), "Python's random", random.getstate),
        (lambda: np.random.rand(), "numpy.random", lambda: repr(np.random.get_state())),
        (lambda: np.random.randn(), "numpy.random", lambda: repr(np.random.get_state())),
        (lambda: torch.rand(1), "torch's default", lambda: torch.get_rng_state().tolist()),
    ],
)
def test_a_draw_from_what_is_shared_is_found_and_taken_back(draw, word, state):
    before, found = state(), SharedRandom()
    draw()
    (changed,) = found.restore()
    assert word in changed
    assert state() == before


def test_a_sample_that_draws_nothing_shared_is_left_in_peace():
    found = SharedRandom()
    random.Random(1).random(), np.random.default_rng(1).random(), torch.rand(1, generator=torch.Generator())
    assert found.restore() == []


def test_without_numpy_there_is_nothing_of_numpys_to_look_at(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "numpy")
    found = SharedRandom()
    random.random()
    assert found.restore() == ["Python's random module"]


def test_the_warning_says_what_and_what_to_do(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_shared(["Python's random module", "numpy.random's functions"], range(3))
    assert "sample of range draws from Python's random module and numpy.random's functions" in caplog.text
    assert "workers='process'" in caplog.text
