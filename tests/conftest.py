"""What several test files share."""

import functools
import gc
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm


@pytest.fixture(autouse=True)
def _no_callbacks_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's LIGHTNING_FEED=1 must not add callbacks to the Trainers of the tests."""
    for name in ("LIGHTNING_FEED", "LIGHTNING_FEED_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning leaves the port of a fit with several ranks in the environment, for all such fits of this process: one
    that hangs on to it, or another program that takes it meanwhile, would hang those that follow."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quiet() -> Any:
    """A GPUStarvationCallback for short fits."""
    from lightning_feed import GPUStarvationCallback

    return GPUStarvationCallback(every_n_steps=5, report=False)


_cache_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_memory_between_tests(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is remembered between runs goes to a folder of the test's own, not to the home of whoever runs it.

    The folder is not made here: few tests need it, and ``mktemp`` looks through all folders that it has made before.
    """
    folder = tmp_path_factory.getbasetemp() / "caches" / str(next(_cache_numbers))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(autouse=True, scope="session")
def _entry_points_are_read_once() -> Iterator[None]:
    """Each Trainer looks for callbacks in the entry points of all installed packages, a fifth of the time of a short
    fit."""
    from lightning.fabric.utilities import registry
    from lightning_fabric.utilities import registry as registry_of_pl

    with pytest.MonkeyPatch.context() as patch:
        for module in (registry, registry_of_pl):
            patch.setattr(module, "entry_points", functools.cache(module.entry_points))
        yield


@pytest.fixture(autouse=True)
def _waiting_is_allowed_again() -> Iterator[None]:
    """A test that forbids to wait for the device, and fails, must not forbid it to those that follow."""
    yield
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _loaders_are_torchs_again() -> Iterator[None]:
    """Lightning watches how loaders are made while it asks for them, and does not stop where asking raises: from then
    on each loader of the process would keep, and pickle, whatever was ever set on it (_replace_dunder_methods)."""
    yield
    data: Any = sys.modules.get("torch.utils.data")
    pending = [] if data is None else [data.DataLoader, data.Sampler]
    for cls in pending:
        pending.extend(cls.__subclasses__())
        for name in [name for name in vars(cls) if name.startswith("__old__")]:
            setattr(cls, name.removeprefix("__old"), vars(cls)[name])
            delattr(cls, name)


@pytest.fixture(autouse=True, scope="session")
def _forks_may_go_backward() -> None:
    """From the first FakeTensorMode on, torch says that there is a CUDA device (``_ensureCUDADeviceGuardSet``). If the
    first backward of a process comes after that, no process that it forks can go backward."""
    import torch

    if not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
        torch.ones(1, requires_grad=True).sum().backward()


CHECK_S = 0.5
"""Seconds between two looks of torch at what it waits for; 5 by default."""


@pytest.fixture(autouse=True, scope="session")
def _short_waits_for_lost_workers() -> Iterator[None]:
    """A DataLoader's pass that is collected as part of a cycle has its queues closed before it can tell its workers to
    end, so torch waits 5 s for each of them and then kills it. Tests that raise and break off leave hundreds.

    As often, torch looks whether a worker that sends no batch is alive."""
    from torch.utils.data import _utils, dataloader

    with pytest.MonkeyPatch.context() as patch:
        for module in (_utils, _utils.worker, _utils.pin_memory):
            patch.setattr(module, "MP_STATUS_CHECK_INTERVAL", CHECK_S)
        patch.setattr(dataloader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (CHECK_S,))
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """A forked process hangs in its first loop of OpenMP where the one that forked it has used several threads:
    libgomp waits for those, which a fork leaves behind. Many tests fork the ranks of a training. And tests that run
    side by side need no more than a CPU each."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_other_programs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Verdicts depend on other programs, and the machine that runs the tests may be busy: short fits see none."""
    if request.path.name in ("test_other_programs.py", "test_cpu_times.py"):
        return
    from lightning_feed.measure import cpu_time

    monkeypatch.setattr(cpu_time.OtherPrograms, "others_pct", lambda *_: None)
    monkeypatch.setattr(cpu_time._ThreadStatistics, "read", lambda _: b"")


@pytest.fixture(autouse=True)
def no_slow_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that takes a millisecond has its step left out, and on a busy machine any may: tests count steps."""
    from lightning_feed.callbacks import starvation_loggers

    monkeypatch.setattr(starvation_loggers, "SLOW_S", float("inf"))


@pytest.fixture(autouse=True)
def _each_test_is_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Reports of runs without a logger go to a folder of the test's own; its first fit shows a whole report."""
    from lightning_feed.callbacks import starvation_reports

    monkeypatch.setattr(starvation_reports, "IN_ROOT", tmp_path_factory.getbasetemp() / "feed_reports")
    monkeypatch.setattr(starvation_reports, "_shown_fits", set())


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    """A folder of two class folders with six small JPEGs each."""
    import numpy as np
    from PIL import Image

    root = tmp_path / "photos"
    for label, name in enumerate(("cats", "dogs")):
        (root / name).mkdir(parents=True)
        for index in range(6):
            pixels = np.random.default_rng([label, index]).integers(0, 255, (48, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.jpg")
    return root


RAY_STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def one_ray(request: pytest.FixtureRequest) -> Iterator[None]:
    """One Ray of two CPUs for all tests of a file: it takes seconds to start, and so do its workers."""
    ray = pytest.importorskip("ray")
    for name in (request.module.__name__, "load.numbered", "recording"):  # workers cannot import test files
        if name in sys.modules:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=RAY_STORE_BYTES,
        include_dashboard=False,
        logging_level="WARNING",
    )
    yield
    ray.shutdown()


GPU_TEST_S = 120
"""Most seconds for a test with the mark ``gpu`` that does not say otherwise."""


LIGHTNINGS_ADVICE = (
    ".*does not have many workers",
    ".*is smaller than the logging interval",
    ".*have no `val_dataloader`",
    "You have overridden `.*` in `LightningModule` but have passed in",
)
"""What Lightning says of fits that are small on purpose, and of the recording module."""


LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""Packages that take long to import."""


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices from every run but those of tests with the mark ``gpu``: ``-m gpu``.

    Where torch sees a device, its first backward starts a thread for it, on the CPU, too; from then on no process that
    is forked can go backward (``Unable to handle autograd's threading in combination with fork-based multiprocessing``,
    torch/csrc/autograd/engine.cpp), and many tests fork the ranks of a training. The driver reads the variable once,
    when it is first asked for devices, so this has to come before any test file is imported.
    """
    marks = str(config.getoption("markexpr"))
    if os.environ.get("LIGHTNING_FEED_REQUIRE_GPU") != "1" and ("gpu" not in marks or "not gpu" in marks):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for words in LIGHTNINGS_ADVICE:
        config.addinivalue_line("filterwarnings", f"ignore:{words}")
    from hypothesis import settings

    settings.register_profile("a busy machine is no error", deadline=None)
    settings.load_profile("a busy machine is no error")
    # A shell's background job ignores Ctrl-C, and all that it starts does: tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    preload = LIGHTNING
    # What "forkserver" pickles for a process is what "spawn" does, and the process need not import torch and Lightning,
    # which takes 13 s here.
    if "slow" in marks and "not slow" not in marks:
        from zoo.harness import PRELOADED

        multiprocessing.set_forkserver_preload(list(LIGHTNING))
        preload = PRELOADED
    if not hasattr(config, "workerinput"):
        warm.open_session(preload)
    # Ray gives its workers so low a priority that they starve beside other tests.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Reports are as wide as the terminal: tests look for sentences in them.
    os.environ["COLUMNS"] = "500"
    # cuBLAS is deterministic with this only, and reads it once.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One worker more than CPUs for ``-n auto``, since many tests wait for processes that they have started."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else 1 + len(os.sched_getaffinity(0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector off while the tests are imported, and away from all that they import.

    Tests collect garbage to see what is left of a run, and ``diagnose`` does after each short fit: half a second each
    time, if it looks at all that torch, Lightning and pytest hold. And forked processes copy what it looks at.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


MANY_MODULES = 100
"""More modules than a test of ours imports by itself: it has imported a library."""


@pytest.fixture(autouse=True)
def _libraries_are_kept_from_the_garbage_collector() -> Iterator[None]:
    """As pytest_collection does with what test files import: some tests are the first to import a large library, and
    all collections of this process would take half a second from then on."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + MANY_MODULES:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with the mark ``gpu`` have less time, and fits that are small on purpose.

    Tests that need a forkserver share one, since its imports take longer than the tests.
    """
    for item in items:
        if "forkserver" in item.name:
            item.add_marker(pytest.mark.xdist_group("forkserver"))
        if item.get_closest_marker("gpu") is None:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(GPU_TEST_S))
        for said in ("does not have many workers", "smaller than the logging interval", "no `val_dataloader`"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore:.*{said}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests with the mark ``gpu`` are skipped without a CUDA device, and fail where one is required."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("LIGHTNING_FEED_REQUIRE_GPU") == "1":
        pytest.fail("LIGHTNING_FEED_REQUIRE_GPU=1, and torch sees no CUDA device", pytrace=False)
    pytest.skip("no CUDA device is to be seen: tests on one run by themselves, with -m gpu")


def pytest_sessionfinish() -> None:
    """Nothing that a failed test left behind outlives the session.

    Ranks that hang would be waited for when Python ends. A fit that ends with an error leaves its progress bar open,
    which would draw itself below pytest's summary.
    """
    for child in multiprocessing.active_children():
        child.kill()
    if "tqdm" not in sys.modules:
        return
    from tqdm.std import tqdm

    for bar in [value for value in gc.get_objects() if issubclass(type(value), tqdm)]:  # isinstance asks proxies
        bar.disable = True
