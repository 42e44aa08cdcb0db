"""A Ray for the tests of a file."""

import sys

import pytest

STORE = 80 << 20


@pytest.fixture(scope="module")
def one_ray(request):
    """One Ray of two CPUs for all tests of a file: it takes seconds to start, and so do its workers."""
    ray = pytest.importorskip("ray")
    for name in (request.module.__name__, "load.numbered", "recording"):  # workers cannot import test files
        if name in sys.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    ray.init(address="local", num_cpus=2, object_store_memory=STORE, include_dashboard=False, logging_level="WARNING")
    yield
    ray.shutdown()
