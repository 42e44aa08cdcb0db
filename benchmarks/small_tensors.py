"""Does packing many small tensors into one copy pay? On CUDA, for batches of 4 to 512 of them.

For each batch, in microseconds (median over rounds of 20 batches, [min, max] behind it), pinned as by
``DataLoader(pin_memory=True)`` and not:

* ``one by one``  Lightning's own transfer: a copy for each tensor
* ``packed``      ``transfer/packing.py``: into one pinned buffer, one copy, and as many views

each as time of the ``host``, which is what delays the next step, and of the ``device``, by events on the copying
stream. Rounds are interleaved. ``finding`` is what a batch costs in which nothing is packed: looking for small tensors.
Without CUDA only the host's part of packing can be measured; it says so.

    python benchmarks/small_tensors.py [--rounds 7] [--json FILE]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lightning_feed.transfer.transfer_filter import pack, small_tensors

BATCHES = 20
COUNTS = (4, 8, 32, 128, 512)
BYTES = (8, 1024, 32 * 1024)


def make_batch(count: int, size_bytes: int, *, pinned: bool) -> dict[str, Tensor]:
    """``count`` tensors, half of them float32 and half int64."""
    made = {}
    for index in range(count):
        dtype = torch.float32 if index % 2 else torch.int64
        tensor = torch.ones(max(1, size_bytes // dtype.itemsize), dtype=dtype)
        made[f"part{index}"] = tensor.pin_memory() if pinned else tensor
    return made


def packed_on(device: torch.device) -> Callable[[Any], Any]:
    def send(batch: Any) -> Any:
        small = small_tensors(batch)
        return pack(batch, small, lambda host: host.to(device, non_blocking=True), pin=device.type != "cpu")

    return send


def time_round(send: Callable[[Any], Any], batch: Any, stream: Any) -> tuple[float, float | None]:
    """Microseconds a batch: of the host, and of the device where there is one."""
    if stream is None:
        began = time.perf_counter()
        for _ in range(BATCHES):
            send(batch)
        return 1e6 * (time.perf_counter() - began) / BATCHES, None
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        first.record(stream)
        began = time.perf_counter()
        for _ in range(BATCHES):
            send(batch)
        host = 1e6 * (time.perf_counter() - began) / BATCHES
        last.record(stream)
    last.synchronize()
    return host, 1e3 * first.elapsed_time(last) / BATCHES


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):7.0f} [{min(values):.0f}, {max(values):.0f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    ways: dict[str, Callable[[Any], Any]] = {"packed": packed_on(device), "finding": small_tensors}
    if cuda:
        ways["one by one"] = lambda batch: move_data_to_device(batch, device)
    else:
        print("no accelerator: whether packing pays can be measured with CUDA only. The host's part of it:")
    name = torch.cuda.get_device_name() if cuda else "CPU only"
    machine = f"{name}, {platform.processor() or platform.machine()}, torch {torch.__version__}"
    print(f"{machine}, Python {platform.python_version()}, {options.rounds} rounds")
    stream = torch.cuda.Stream() if cuda else None
    rows = []
    print(f"{'tensors':>7} {'bytes':>6} {'pinned':>6}  {'way':10} {'host us':24} {'device us':24}")
    for count in COUNTS:
        for size_bytes in BYTES:
            for pinned in (False, True) if cuda else (False,):
                batch = make_batch(count, size_bytes, pinned=pinned)
                timed: dict[str, list[tuple[float, float | None]]] = {way: [] for way in ways}
                for round_number in range(options.rounds + 1):
                    for way, send in ways.items():
                        result = time_round(send, batch, stream)
                        if round_number:  # the first one allocates
                            timed[way].append(result)
                for way, results in timed.items():
                    host = [one for one, _ in results]
                    on_device = [one for _, one in results if one is not None]
                    device_text = spread(on_device) if on_device and way != "finding" else ""
                    line = f"{count:7} {size_bytes:6} {pinned!s:>6}  {way:10} {spread(host):24} {device_text:24}"
                    print(line.rstrip(), flush=True)
                    rows.append(
                        {"tensors": count, "bytes": size_bytes, "pinned": pinned, "way": way, "host_us": host}
                        | {"device_us": on_device}
                    )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
