"""The thread that decodes batches ahead of training, and the share of the images that the workers decode."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from images.test_device_decode import Decoder
from made_samples import batch_of, jpegs, nvjpeg_dataset, torn
from simulated.device import DEVICE, SimulatedDevice, simulated
from simulated.image_decoders import image_decoders

from lightning_feed.errors import DecodeError, SettingsError
from lightning_feed.images import decode_ahead
from lightning_feed.images.cpu_share import Balance, CpuShare, Seconds
from lightning_feed.images.decode_ahead import DEPTH, NvJpegDecoder, NvJpegOptions, fixed_share
from lightning_feed.images.device_decode import decode_batch
from lightning_feed.images.image_dataset import EncodedBatch, collate_encoded
from lightning_feed.load import copy_fence
from lightning_feed.load.collate import relayed
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.stage import Decoding

CPU = torch.device("cpu")


class Event:
    def __init__(self) -> None:
        self.waits = 0


class Stream:
    """A stream of a device that does all at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.priority = __.get("priority", 0)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        event.waits += 1


class Module:
    Stream = Stream

    def stream(self, stream: Stream) -> Stream:
        return stream

    def current_stream(self, device: torch.device) -> Stream:
        return Stream()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes on the CPU."""
    monkeypatch.setattr(torch, "get_device_module", lambda _: Module())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


class Here(NvJpegDecoder):
    """Decodes on the CPU as on a device, by a stand-in for nvJPEG."""

    def __init__(self, dataset: Any, share: float | None = None, decode: Any = None) -> None:
        super().__init__(dataset, torch.device("meta"), None, dataset.cpu_part, share)
        self.decode = decode or Decoder()
        self.threads: set[str] = set()
        self.by_workers: list[int] = []
        """The number of images that the workers decoded, for each batch."""

    def _decode(self, batch: EncodedBatch) -> list[torch.Tensor]:
        self.threads.add(threading.current_thread().name)
        self.by_workers.append(len(batch.decoded))
        return decode_batch(batch, self.dataset, CPU, decode=self.decode)


def batches_of(dataset: Any, count: int) -> list[EncodedBatch]:
    return [batch_of(dataset, seed) for seed in range(count)]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("under_way", [0, 4])
def test_batches_come_in_order_and_are_decoded_in_a_thread_if_workers_make_them(under_way: int) -> None:
    made = nvjpeg_dataset(jpegs(4))
    given = batches_of(made, 7)
    ours = Here(made)
    decoded = list(ours.run(iter(given), under_way))
    for found, batch in zip(decoded, given, strict=True):
        images, labels = decode_batch(batch, made, CPU, decode=Decoder())
        assert torch.equal(found[0], images)
        assert torch.equal(found[1], labels)
    here = threading.current_thread().name
    assert (ours.threads == {here}) == (under_way == 0)


@pytest.mark.usefixtures("at_once")
def test_the_thread_stays_a_few_batches_ahead() -> None:
    made = nvjpeg_dataset(jpegs(2))
    asked = []

    def given() -> Iterator[EncodedBatch]:
        for number in range(20):
            asked.append(number)
            yield batch_of(made)

    run = Here(made).run(given(), 4)
    next(run)
    threading.Event().wait(0.2)
    assert len(asked) <= 1 + DEPTH + 2
    run.close()


@pytest.mark.usefixtures("at_once")
def test_an_error_comes_at_its_batch_and_names_the_image() -> None:
    files = [*jpegs(3), torn(jpegs(4)[3])]
    made = nvjpeg_dataset(files, decoder="pillow")
    batches = [batch_of(nvjpeg_dataset(jpegs(3))), batch_of(made), batch_of(made)]
    run = Here(made, decode=Decoder(refused=files[3])).run(iter(batches), 4)
    next(run)
    with pytest.raises(DecodeError, match=r"photos/3\.jpg \(sample 3\)"):
        next(run)


@pytest.mark.usefixtures("at_once")
def test_an_error_of_the_workers_comes_after_the_batches_before_it() -> None:
    made = nvjpeg_dataset(jpegs(2))

    def failing() -> Iterator[EncodedBatch]:
        yield batch_of(made)
        yield batch_of(made)
        raise OSError("the disk is gone")

    run = Here(made).run(failing(), 4)
    next(run)
    next(run)
    with pytest.raises(OSError, match="the disk is gone"):
        next(run)


@pytest.mark.usefixtures("at_once")
def test_a_pass_that_is_closed_ends_its_thread() -> None:
    made = nvjpeg_dataset(jpegs(2))
    before = threading.active_count()
    stage = Decoding(Here(made), iter(batches_of(made, 9)), 4)
    next(stage)
    assert threading.active_count() == before + 1
    stage.close()
    assert threading.active_count() == before


def test_decoding_ahead_is_race_free_on_a_device() -> None:
    """Two batches ahead, on a stream of its own, beside a step that reads the batch."""
    device = SimulatedDevice()
    made = nvjpeg_dataset(jpegs(4), decoder="pillow")
    with simulated(device), image_decoders(device):
        ours = NvJpegDecoder(made, DEVICE, None, made.cpu_part, 0.0)
        for images, labels in ours._ahead(iter(batches_of(made, 8)), 4):
            device.launch(10, what="step", reads=[images, labels])
            del images, labels
        assert device.races == []


class OnStreams(NvJpegDecoder):
    """Notes the stream of each decoding, and if the memory of slots is kept until its copies are over."""

    seen: list[tuple[Any, bool]]

    def _decode(self, batch: EncodedBatch) -> list[torch.Tensor]:
        current = torch.get_device_module(DEVICE).current_stream(DEVICE)
        self.seen.append((current, any(copier.stream is current for copier in copy_fence.copying)))
        return super()._decode(batch)


def test_the_thread_decodes_and_copies_on_its_own_stream_which_slots_wait_for() -> None:
    device = SimulatedDevice()
    made = nvjpeg_dataset(jpegs(4), decoder="pillow")
    with simulated(device), image_decoders(device):
        ours = OnStreams(made, DEVICE, None, made.cpu_part, 0.0)
        ours.seen = []
        for _ in range(2):
            list(ours._ahead(iter(batches_of(made, 3)), 4))
    assert len({id(stream) for stream, _ in ours.seen}) == 1
    assert device.compute not in [stream for stream, _ in ours.seen]
    assert [waits for _, waits in ours.seen] == [True] * 6


def test_all_passes_take_device_memory_of_one_stream() -> None:
    device = SimulatedDevice()
    made = nvjpeg_dataset(jpegs(4), decoder="pillow")
    held = []
    with simulated(device), image_decoders(device):
        ours = NvJpegDecoder(made, DEVICE, None, made.cpu_part, 0.0)
        for _ in range(16):
            for images, labels in ours._ahead(iter(batches_of(made, 4)), 4):
                device.launch(10, what="step", reads=[images, labels])
                del images, labels
            held.append(device.memory_bytes())
    assert held[-1] < 4 * held[0]


def feed(made: Any, share: float | None = None) -> FeedLoader:
    decoder = Here(made, share)
    return FeedLoader(made, batch_size=4, num_workers=2, collate_fn=collate_encoded, decode=decoder)


@pytest.mark.usefixtures("at_once")
def test_a_fixed_share_holds_from_the_first_batch_on() -> None:
    loader = feed(nvjpeg_dataset(jpegs(4) * 4), 1.0)
    list(loader)
    assert loader.decode.by_workers == [4, 4, 4, 4]


@pytest.mark.usefixtures("at_once")
def test_a_pass_can_be_resumed_after_any_batch() -> None:
    made = nvjpeg_dataset(jpegs(4) * 8)
    whole = [labels.tolist() for _, labels in feed(made)]
    assert len(whole) == 8
    for taken in (0, 3, 7):
        begun = feed(made)
        batches = iter(begun)
        for _ in range(taken):
            next(batches)
        state = begun.state_dict()
        begun.close()
        resumed = feed(made)
        resumed.load_state_dict(state)
        assert [labels.tolist() for _, labels in resumed] == whole[taken:]


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_dies_ends_the_pass_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nvjpeg_dataset(jpegs(4) * 8)
    sample = made.encoded_sample

    def dying(index: int) -> Any:
        if index == 21:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(index)

    monkeypatch.setattr(made, "encoded_sample", dying)
    with pytest.raises(RuntimeError, match=r"worker .*(killed by|exited unexpectedly)"):
        list(feed(made))


# --- the share of the workers -----------------------------------------------------------------------------------------


def simulate(
    device_s: float, cpu_s: float, read_s: float, workers: int, model_s: float, batches: int = 3000
) -> tuple[float, float]:
    """Return the share that the workers end with, and the seconds of a batch at the end.

    Args:
        device_s: seconds in which the device decodes all images of a batch.
        cpu_s: seconds in which one CPU does.
        read_s: seconds in which one CPU reads them.
        workers: CPUs.
        model_s: seconds of a step.
    """
    numbers = random.Random(1)
    shares = CpuShare()
    balance = Balance(shares)
    under_way = 2 * workers
    made: list[tuple[float, float]] = []  # when a batch is ready, and its share
    free = [0.0] * workers
    now = trained = 0.0
    taken: list[float] = []
    for number in range(batches):
        while len(made) < under_way + 1:
            worker = min(range(workers), key=free.__getitem__)
            begins = max(free[worker], now if number else 0.0)
            share = shares.share
            free[worker] = begins + numbers.uniform(0.9, 1.1) * (read_s + share * cpu_s)
            made.append((free[worker], share))
        ready, share = made.pop(0)
        files = max(0.0, ready - now)
        decoding = numbers.uniform(0.95, 1.05) * (1 - share) * device_s + 0.001
        now += files + decoding
        begins_step = max(trained, now)
        trained = begins_step + model_s
        room = max(0.0, trained - (DEPTH + 1) * model_s - now)
        now += room
        balance.note(Seconds(files, decoding, room), under_way)
        taken.append(trained)
    return shares.share, (taken[-1] - taken[-1001]) / 1000


@pytest.mark.parametrize(
    ("device_s", "cpu_s", "workers"),
    [(0.026, 0.6, 15), (0.026, 0.6, 3), (0.017, 0.6, 63), (0.1, 0.6, 7), (0.02, 0.3, 1), (1.0, 0.3, 8)],
    ids=["H200, 16 CPUs", "4 CPUs", "64 CPUs", "slow decoder", "2 CPUs", "consumer card"],
)
def test_the_share_moves_to_where_the_rate_is_highest(device_s: float, cpu_s: float, workers: int) -> None:
    read_s = 0.02
    share, batch_s = simulate(device_s, cpu_s, read_s, workers, model_s=0.0)

    def ideal_s(share: float) -> float:
        return max((1 - share) * device_s + 0.001, (read_s + share * cpu_s) / workers)

    best = min(ideal_s(step / 200) for step in range(201))
    assert 0 <= share <= 1
    assert batch_s < 1.25 * best
    assert batch_s < 1.05 * ideal_s(0)


def test_the_share_stays_while_training_is_the_limit() -> None:
    share, batch_s = simulate(0.01, 0.6, 0.02, 15, model_s=0.05)
    assert share == 0
    assert batch_s == pytest.approx(0.05)


def test_images_are_chosen_by_their_index_and_in_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = CpuShare()
    file = jpegs(1)[0]

    def taken() -> set[int]:
        return {index for index in range(2000) if shares.takes(file, (60, 80), index, "a.jpg")}

    shares.share = 0.25
    assert taken() == set()
    monkeypatch.setattr("lightning_feed.images.cpu_share.get_worker_info", lambda: object())
    quarter = taken()
    assert len(quarter) == pytest.approx(500, rel=0.02)
    assert taken() == quarter
    shares.share = 0.5
    assert quarter < taken()
    shares.share = 1.0
    assert len(taken()) == 2000
    with relayed():  # in a rehearsal, a probe or a trial
        assert taken() == set()


def test_a_fixed_share_is_set_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fixed_share(NvJpegOptions(cpu_share=0.25)) == 0.25
    assert fixed_share(NvJpegOptions()) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert fixed_share(NvJpegOptions()) == 0
    with pytest.raises(SettingsError, match=r"cpu_share=2\): set a share from 0 to 1, or 'auto'"):
        NvJpegOptions(cpu_share=2)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("share", [0.5, None])
def test_only_a_share_that_is_not_fixed_moves(share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = nvjpeg_dataset(jpegs(2))
    noted: list[Seconds] = []
    monkeypatch.setattr(decode_ahead.Balance, "note", lambda _, seconds, under_way: noted.append(seconds))
    list(Here(made, share).run(iter(batches_of(made, 5)), 4))
    assert made.cpu_part.share == (share or 0.0)
    assert len(noted) == (0 if share else 5)
