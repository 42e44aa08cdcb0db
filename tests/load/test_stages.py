"""The contract of a pass, over every composition of its stages: workers, a thread ahead, a decoder."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from itertools import product

import pytest
import torch
from load.numbered import Failing, Rows, epochs, order
from torch.utils.data import DataLoader

from lightning_feed.errors import LoaderError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import RayCluster

MAKERS = {
    "none": {},
    "process": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "thread": {"num_workers": 2, "workers": "thread"},
    "ray": {"num_workers": 2, "workers": RayCluster()},
}


class Doubling:
    """Decodes a batch by doubling it, and draws one ahead."""

    def run(self, batches, under_way):
        held = next(batches, None)
        while held is not None:
            ahead = next(batches, None)
            yield 2 * held
            held = ahead


SLOW = [
    pytest.mark.slow,  # starting Ray and its workers
    pytest.mark.xdist_group("ray"),  # once
    pytest.mark.timeout(120),
    # Ray 2.60 leaves these to garbage collection when it starts its own processes, and when it is shut down.
    pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning"),
]
COMPOSITIONS = [*product(MAKERS, (0, 2), (False, True))]


def marks_of(maker, ahead, decoded):
    """The gate has each of a maker's neighbours once: makers without a decoder and with a thread ahead take turns with
    those that have both or none."""
    in_turn = (ahead > 0) == decoded if [*MAKERS].index(maker) % 2 else (ahead > 0) != decoded
    return [*(SLOW if maker == "ray" else ()), *([] if in_turn else [pytest.mark.nightly])]


every_composition = pytest.mark.parametrize(
    ("maker", "ahead", "decoded"),
    [pytest.param(*composition, marks=marks_of(*composition)) for composition in COMPOSITIONS],
)


@pytest.fixture(autouse=True)
def _ray(request):
    if request.node.callspec.params["maker"] == "ray":
        request.getfixturevalue("one_ray")


def loader_of(maker, ahead, decoded, dataset, **options):
    options = {"batch_size": 4, "background": ahead, "decode": Doubling() if decoded else None, **options}
    return FeedLoader(dataset, **{**MAKERS[maker], **options})


def running():
    return {*threading.enumerate(), *multiprocessing.active_children()}


@every_composition
def test_batches_equal_those_of_a_dataloader(maker, ahead, decoded):
    torch.manual_seed(7)
    plain = [[2 * batch if decoded else batch for batch in DataLoader(Rows(), 4, shuffle=True)]]
    torch.manual_seed(7)
    found = epochs(loader_of(maker, ahead, decoded, Rows(), shuffle=True), 1)
    assert found == [[batch.tolist() for batch in epoch] for epoch in plain]


@every_composition
def test_dataset_error_names_its_sample_and_ends_the_pass(maker, ahead, decoded):
    loader = loader_of(maker, ahead, decoded, Failing(KeyError("no picture")))
    batches = iter(loader)
    with pytest.raises(KeyError, match=r"(?s)no picture") as caught:
        list(batches)
    assert maker not in ("thread", "ray") or "at index 9 of" in str(caught.value)
    del caught  # it and this frame would hold each other, and with them the workers
    with pytest.raises(LoaderError, match=r"(?s)ended with KeyError.*Begin a new pass"):
        next(batches)
    assert next(iter(loader)) is not None


@every_composition
def test_early_break_leaves_no_threads_or_processes(maker, ahead, decoded):
    before = running()
    loader = loader_of(maker, ahead, decoded, Rows(1000))
    for _ in loader:
        break
    del _, loader
    for one in running() - before:
        one.join(10)
    assert maker == "ray" or running() <= before


@every_composition
def test_state_after_any_batch_resumes_exactly(maker, ahead, decoded):
    whole, states = [], []
    loader = loader_of(maker, ahead, decoded, Rows(), shuffle=True, order=order())
    for batch in loader:
        whole.append(batch.tolist())
        states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    for at in (0, 2, len(whole) - 2):
        resumed = loader_of(maker, ahead, decoded, Rows(), shuffle=True, order=order())
        resumed.load_state_dict(states[at])
        assert [batch.tolist() for batch in resumed] == whole[at + 1 :]


class Hanging(Rows):
    """Sample 9 is read when a file is there; another one appears when somebody waits for it."""

    def __init__(self, folder):
        super().__init__()
        self.reached, self.free = folder / "reached", folder / "free"

    def __getitem__(self, index):
        if index == 9:
            self.reached.touch()
            while not self.free.exists():
                time.sleep(0.01)
        return index

    def wait(self):
        while not self.reached.exists():
            time.sleep(0.01)


@every_composition
def test_where_names_the_samples_that_a_waiting_pass_waits_for(maker, ahead, decoded, tmp_path):
    dataset = Hanging(tmp_path)
    batches = iter(loader_of(maker, ahead, decoded, dataset))
    consumer = threading.Thread(target=list, args=(batches,))
    consumer.start()
    try:
        dataset.wait()
        time.sleep(0.1)  # Ctrl-C and the watchdog come later, too
        where = batches.where()
    finally:
        dataset.free.touch()
        consumer.join(30)
    named = {"none": "[8, 9, 10, 11]", "thread": "at index 9", "ray": "Ray cluster"}.get(
        maker, "samples [8, 9, 10, 11]"
    )
    assert named in where


@pytest.mark.parametrize(
    ("maker", "ahead", "decoded"),
    [
        # With a thread ahead of worker processes it takes the 5 s after which torch looks whether they live.
        pytest.param(
            maker, ahead, decoded, marks=[*marks_of(maker, ahead, decoded), *([pytest.mark.slow] * bool(ahead))]
        )
        for maker, ahead, decoded in COMPOSITIONS
    ],
)
def test_ctrl_c_ends_a_waiting_pass(maker, ahead, decoded, tmp_path):
    dataset = Hanging(tmp_path)
    before = running()
    batches = iter(loader_of(maker, ahead, decoded, dataset))

    def press():
        dataset.wait()
        time.sleep(0.2)  # until the loop waits
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(batches)
    finally:
        dataset.free.touch()
        presser.join(30)
    with pytest.raises(LoaderError, match="ended with KeyboardInterrupt"):
        next(batches)
    del batches
    # Torch's queues keep their feeding threads until the error that the thread ahead got is garbage.
    left = [one for one in running() - before if not one.name.startswith("QueueFeeder")]
    for one in left:
        one.join(10)
    assert maker == "ray" or not any(one.is_alive() for one in left)
