"""Rates of the loader alone: as configured, with other numbers of workers, and with constant samples.

Also the rates of handing a batch over, copying it to the device, and decoding it there.
"""

import multiprocessing
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as torch_mp
from torch.utils.data import Dataset, IterableDataset

from lightning_feed.diagnosing.disk import innermost
from lightning_feed.diagnosing.session import LoaderPart, NotMeasurable, Session, fresh, key_bytes
from lightning_feed.errors import DatasetError, FeedError, LoaderError
from lightning_feed.images.crop import EvalRecipe, TrainRecipe
from lightning_feed.images.image_dataset import ImageDataset, collate_encoded
from lightning_feed.load.kinds import AnyDataset, Sample
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import KeyUse
from lightning_feed.measure.loader_state import Probe, probe_loader
from lightning_feed.transfer.batch_tree import tensors
from lightning_feed.transfer.gpu_decode import decode_batch
from lightning_feed.trials.cloning import Changes, clone_loader, has_threads, iter_is_itself, original_error

_TIMES = 3
"""Largest number of tries of each number of workers."""
_EACH = 1 / 8
"""Share of the time for each try."""
_WARM = 2
_BATCHES = 20
"""Batches in a pass of the hand-over experiment: those that do not count, and those that do."""
_FULL_S = 0.5
_POLL_S = 0.0005
"""Longest time for the queue to fill up, and time between two checks if it is full."""
_CHILD_S = 20.0


def measure_loader(session: Session) -> None:
    """Measure the rate of the loaders side by side, as configured. Samplers begin again at their end.

    Raises:
        LoaderError: the loader gives nothing, or hangs.
        DatasetError: a sample cannot be loaded.
    """
    kind = type(session.loader).__name__
    if not session.parts and not hasattr(session.loader, "__iter__"):
        raise LoaderError(
            f"The training loader is a {kind}, which is not iterable. Give a DataLoader, a dict or list of them, or "
            "another iterable."
        )
    if not session.parts and iter_is_itself(session.loader):
        raise NotMeasurable(f"a {kind} can be iterated only once, and training needs it")
    session.check_memory()
    workers = [part.loader.num_workers for part in session.parts]
    rate, session.first = session.drain()
    session.alone = rate
    session.note(
        loader_per_s=rate.batches_per_s,
        loader_start_s=rate.start_s,
        taking_ms=rate.taking_ms if all(workers) else None,
        worker_scaling=((max(workers), rate.batches_per_s),) if workers else (),
    )


def measure_keys(session: Session) -> None:
    """The bytes of each part of the first batch."""
    names = [part.name for part in session.parts] or [""]
    sizes = [key_bytes(batch, name) for name, batch in zip(names, session.first, strict=True)]
    keys = [KeyUse(name=name, bytes_per_batch=size, used=None) for one in sizes for name, size in one.items()]
    session.note(keys=tuple(keys))


# --- other numbers of workers -----------------------------------------------------------------------------------------


def workers_to_try(session: Session) -> list[int]:
    """Numbers of workers around the configured number and the number of CPUs, the most informative first."""
    now = max(part.loader.num_workers for part in session.parts)
    cpus = max(1, session.machine.usable_cpus // len(session.parts))
    wanted = [cpus, 0, 1, 2 * now, now // 2, max(1, cpus // 2), now + 1]
    numbers = [number for number in dict.fromkeys(wanted) if number <= max(2 * cpus, now) and number != now]
    numbers.insert(min(2, len(numbers)), now)
    return numbers


def measure_scaling(session: Session) -> None:
    """The rate with each number of workers. Repeats all of them while there is time.

    The rate varies even with the same number of workers. Only a larger difference between two numbers counts.

    Raises:
        NotMeasurable: some numbers were not tried; the message says why.
    """
    deadline = session.clock() + session.share_s
    rates = {now: [rate] for now, rate in session.results.worker_scaling}
    reasons: dict[int, str] = {}
    for number in workers_to_try(session) * _TIMES:
        if session.clock() >= deadline - session.counted_s(_EACH):
            break
        if number in reasons:
            continue
        try:
            session.check_memory(number)
            rate = session.rate(partial(LoaderPart.changes, num_workers=number), share=_EACH)
            rates.setdefault(number, []).append(rate)
            session.note(
                worker_scaling=tuple((each, statistics.median(rates[each])) for each in sorted(rates)),
                worker_spread=tuple((each, min(of), max(of)) for each, of in sorted(rates.items()) if len(of) > 1),
            )
        except (NotMeasurable, FeedError) as error:
            reasons[number] = f"{number} workers: {error}"
    if reasons:
        raise NotMeasurable("; ".join(reasons.values()))


# --- constant samples -------------------------------------------------------------------------------------------------


class _Constant:
    """Replaces a data set, and gives one sample again and again.

    Args:
        sample: the sample to give.
        original: the data set, asked for attributes that a ``worker_init_fn`` may want.
    """

    def __init__(self, sample: object, original: AnyDataset) -> None:
        self.sample = sample
        self.original = original

    def __getattr__(self, name: str) -> Any:
        # Not __getitems__: torch would load whole batches from the original. Not a stream's length or state: torch
        # would use them. And nothing while unpickling.
        if name in ("state_dict", "load_state_dict") or name.startswith("__") or "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original, name)


class NullDataset(_Constant, Dataset[Sample]):
    """Gives the same sample for every index."""

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: object) -> Sample:
        return fresh(self.sample)


class NullStream(_Constant, IterableDataset[Sample]):
    """Gives the same sample without end."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield fresh(self.sample)


def _null(part: LoaderPart, sample: object) -> Any:
    return (NullStream if part.stream else NullDataset)(sample, part.loader.dataset)


def measure_ceiling(session: Session) -> None:
    """The rate of the loaders with constant samples: the limit of handing over, collating and pinning.

    Raises:
        NotMeasurable: for a loader of a class that needs a data set of its own kind, such as LitData's.
    """
    session.check_memory()
    samples = dict(zip(session.parts, session.samples, strict=True))
    try:
        rate = session.rate(lambda part: Changes(dataset=_null(part, samples[part]), endless=True))
    except DatasetError as error:
        kinds = ", ".join(sorted({type(part.loader).__name__ for part in session.parts}))
        kind, text = original_error(error.__cause__ or error)
        why = text.partition("\n")[0] or kind
        raise NotMeasurable(f"a {kinds} does not accept constant samples as its data set: {why}") from error
    session.note(ceiling_per_s=rate)


# --- handing a batch over ---------------------------------------------------------------------------------------------


def measure_hand_over(session: Session) -> None:
    """Time taking ready, constant batches from one worker of each loader, with both sharing strategies.

    Runs in a separate process, because the strategy applies to a whole process. With ``file_system``, torch also starts
    helper processes, which live as long as the process that received a tensor.

    Raises:
        NotMeasurable: that is not possible, for the reason in the message.
    """
    for part in session.parts:
        method = (part.loader.multiprocessing_context or multiprocessing).get_start_method()
        if method != "fork":
            raise NotMeasurable(f"worker processes are made by {method}: only forked ones can be measured")
        if has_threads(part.loader):
            raise NotMeasurable("worker threads hand nothing over")
        if isinstance(part.loader, FeedLoader) and part.loader.decode is not None:
            raise NotMeasurable(
                "batches are decoded after the workers, on a device that a forked process must not touch"
            )
    session.check_memory()
    now, ms = _in_a_process(lambda: _compare(session))
    others = [taken for strategy, taken in ms.items() if strategy != now] or [None]
    session.note(sharing_strategy=now, hand_over_ms=ms[now], hand_over_file_system_ms=others[0])


def _in_a_process(work: Callable[[], Any]) -> Any:
    """The result of ``work`` in a forked process.

    Raises:
        NotMeasurable: the work fails, takes too long, or ends the process.
    """

    def answer(there: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)  # else OpenMP may wait for the parent's threads, such as to shuffle a large set
        try:
            there.send(work())
        except NotMeasurable as reason:
            there.send(reason)
        except Exception as error:  # noqa: BLE001  # of the user's collate function, or memory: raised in the parent
            kind, text = original_error(error)
            there.send(NotMeasurable(": ".join(filter(None, (kind, text.rpartition("\n")[2])))))

    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=answer, args=(there,), daemon=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        child.start()  # as torch's loaders do for each worker
    there.close()
    try:
        given = here.recv() if here.poll(_CHILD_S) else NotMeasurable(f"no batch was handed over within {_CHILD_S:g} s")
    except EOFError:
        given = NotMeasurable("the process that measured it ended early")
    finally:
        child.join(1.0)
        child.kill()  # its workers notice, and end
        child.join()
        here.close()
    if isinstance(given, NotMeasurable):
        raise given
    return given


def _compare(session: Session) -> tuple[str, dict[str, float]]:
    """(present strategy, milliseconds with each strategy)."""
    now: str = torch_mp.get_sharing_strategy()
    total = dict.fromkeys([now, "file_system"] if sys.platform.startswith("linux") else [now], 0.0)
    for part, sample in zip(session.parts, session.samples, strict=True):
        # The device is not touched in a forked process, so nothing is pinned.
        changes = Changes(dataset=_null(part, sample), num_workers=1, pin_memory=False, endless=True)
        taken: dict[str, list[float]] = {strategy: [] for strategy in total}
        for strategy in [*total, *total]:
            torch_mp.set_sharing_strategy(strategy)
            loader = clone_loader(part.loader, changes)
            if isinstance(loader, FeedLoader):
                loader.background = 0  # its thread would take the batches, and hide that time
            taken[strategy] += taking_times(loader)
        if not all(taken.values()):
            raise NotMeasurable("the queue of the worker did not fill up")
        for strategy, times in taken.items():
            total[strategy] += 1e3 * statistics.median(times)
    return now, total


def taking_times(loader: Iterable[Any]) -> list[float]:
    """Seconds in ``next()`` for batches that were ready."""
    batches = iter(loader)
    probe = probe_loader(batches)
    times: list[float] = []
    for number in range(_WARM + _BATCHES):
        if number and (probe is None or not _full(probe)):
            break
        began = time.perf_counter()
        next(batches)
        if number >= _WARM:
            times.append(time.perf_counter() - began)
    return times


def _full(probe: Probe) -> bool:
    """Wait for the queue to fill up; False if that takes too long."""
    for _ in range(round(_FULL_S / _POLL_S)):
        state = probe.read()
        capacity = probe.held
        if state is None or capacity is None:
            return False
        if state.ready >= capacity:
            return True
        time.sleep(_POLL_S)
    return False


# --- the device -------------------------------------------------------------------------------------------------------

BUFFER_BYTES = 64 << 20
_REPEATS = 7
MOST_IMAGES = 256
"""Number of images decoded together: more would not change the rate, but take longer to read."""
FEWEST_ROUNDS = 2


def measure_copies(session: Session) -> None:
    """Copy a buffer of 64 MiB and the first batch to a CUDA device, several times each; medians.

    Raises:
        NotMeasurable: there is nothing to measure, for the reason in the message.
    """
    device = session.device
    if device is None or device.type == "cpu":
        raise NotMeasurable("nothing is copied: the device is the CPU")
    if device.type != "cuda":
        raise NotMeasurable(f"copies are timed by CUDA events, but the device is of type '{device.type}'")
    leaves = [tensor for tensor in tensors(session.first) if tensor.device.type == "cpu"]
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in leaves)
    free, _ = torch.cuda.mem_get_info(device)
    if 2 * (batch_bytes + BUFFER_BYTES) > free:
        raise NotMeasurable(
            f"a batch of {batch_bytes >> 20} MiB and a buffer would take more than half of the free device memory"
        )
    pageable = torch.ones(BUFFER_BYTES, dtype=torch.uint8, device="cpu")  # ones: only written pages exist
    pinned = pageable.pin_memory()
    target = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
    gb_ms = BUFFER_BYTES / 1e6
    session.note(
        pinned_gb_per_s=gb_ms / _median_ms(lambda: target.copy_(pinned, non_blocking=True), device),
        pageable_gb_per_s=gb_ms / _median_ms(lambda: target.copy_(pageable), device),
        copy_ms=_median_ms(lambda: [tensor.to(device, non_blocking=True) for tensor in leaves], device),
    )


def _median_ms(copy: Callable[[], object], device: torch.device) -> float:
    """Milliseconds between two events around the copy. The first two copies do not count."""
    taken: list[float] = []
    with torch.cuda.device(device):
        for _ in range(2 + _REPEATS):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            copy()
            end.record()
            end.synchronize()
            taken.append(float(start.elapsed_time(end)))
    return statistics.median(taken[2:])


def measure_device_decode(session: Session) -> None:
    """Measure the device's rate at decoding the folder's images (``backend="nvjpeg"``), with nothing else running.

    Does nothing if that is not possible.

    Raises:
        NotMeasurable: decoding failed.
    """
    if session.device is not None and session.device.type == "cuda" and len(session.parts) == 1:
        try:
            per_s = decode_rate(session.parts[0], session.device, session.counted_s())
        except (FeedError, RuntimeError) as error:  # nvJPEG failed, or the device has too little memory
            raise NotMeasurable(str(error).partition("\n")[0]) from error
        session.note(device_decode_per_s=per_s)


def decode_rate(part: LoaderPart, device: torch.device, max_s: float) -> float | None:
    """Batches per second at which the device decodes and crops the images of the loader's first batches.

    None if this cannot be measured: the data set is iterable, the workers do not decode its images, or they apply a
    transform of the user's.

    Args:
        part: the loader.
        device: the device that decodes.
        max_s: seconds after which no further round begins.

    Raises:
        DatasetError: an image cannot be read or decoded; names the image.
        MissingExtraError: this torchvision has no nvJPEG.
    """
    if part.stream:
        return None
    with preserve_state(part.loader):
        samples = [innermost(part.loader.dataset, index) for index in part.first_samples(MOST_IMAGES)]
        dataset: AnyDataset = samples[0][0] if samples else None
        if not _decodes_images(dataset) or any(base is not dataset for base, _ in samples):
            return None
        encoded = ImageDataset(
            dataset.source, dataset.decoder, dataset.recipe, bad_samples=dataset.bad_samples, encoded=True
        )
        batch = collate_encoded([encoded[index] for _, index in samples]).to(device)
        decode_batch(batch, encoded)  # makes the decoder, and the memory that it takes
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        rounds = 0
        while rounds < FEWEST_ROUNDS or time.perf_counter() - began < max_s:
            decode_batch(batch, encoded)
            torch.cuda.synchronize(device)
            rounds += 1
        images_per_s = rounds * len(batch) / (time.perf_counter() - began)
    return images_per_s / part.batch_size


def _decodes_images(dataset: object) -> bool:
    return type(dataset) is ImageDataset and isinstance(dataset.recipe, (TrainRecipe, EvalRecipe))
