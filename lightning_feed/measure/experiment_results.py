"""The results of experiments as frozen values. A result is None if its experiment was not run, or could not measure it.

The package ``diagnosing`` runs the experiments. Their results are defined here because the verdict, the reports and the
measurements, which hold them, may not import from that package.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NamedCost:
    """The cost of one step of making a sample."""

    name: str
    """Name in the user's code: ``RandomResizedCrop``, ``read``, ``decode``."""
    cpu_ms: float
    """CPU time per sample."""
    wall_ms: float
    """Wall time per sample in a single process."""


@dataclass(frozen=True, kw_only=True)
class FunctionCost:
    """One of the user's functions that make batches, with its calls into libraries."""

    name: str
    """``Birds.__getitem__``."""
    file: str
    """File that defines the function."""
    line: int
    """The line that takes most of the time."""
    calls: str | None
    """The library class or function called on that line, such as ``ColorJitter``; None if the function's own code takes
    the time."""
    stage: Literal["samples", "collate"]
    """The kind of work: making samples, or collating them."""
    ms_per_batch: float
    """Wall time, excluding the user's other functions that it calls."""


@dataclass(frozen=True, kw_only=True)
class KeyBytes:
    """The size of one part of a batch."""

    name: str
    """Path of the part in the batch: ``image``, ``0``, ``meta.path``."""
    bytes_per_batch: int
    """Bytes sent to the training process, and from there to the device."""


NOT_TRANSFORMS = ("read", "decode", "load")
"""Names of a sample's costs that are not transforms, as :func:`step_of` returns them."""
REST_OF_THE_FIT = "the rest of the fit"


@dataclass(frozen=True, kw_only=True)
class CropTrial:
    """CPU time of samples of an image folder, made alternately by decoding whole images and by decoding only crops."""

    folder: str
    """The folder to pass to an ImageFolderDataModule."""
    val_fraction: float | None = None
    """Share of the images set aside for validation; None if the folder has split folders, such as ``train``."""
    whole_ms: float
    """CPU time per sample as configured."""
    crop_ms: float
    """CPU time per sample with only the crop decoded."""


@dataclass(frozen=True, kw_only=True)
class PackedImages:
    """A pack of the images of an ImageFolderDataModule that does not exist yet, and its estimated size."""

    root: str
    """The folder to pack."""
    path: str
    """The pack to make, beside the folder."""
    short_side_px: int | None = None
    """Largest length of the shorter side of a stored image, in pixels; None to keep the size of all images."""
    decoded: bool = False
    """True to store pixels, False to store files."""
    folder_bytes: int
    """Bytes of the folder's training images."""
    pack_bytes: int
    """Bytes of the training images in the pack."""


@dataclass(frozen=True, kw_only=True)
class LighterSample:
    """A change of an ImageFolderDataModule with which a sample takes less work, made in turns with the present samples.

    The random numbers of a sample are the same with the change and without it.
    """

    setting: Literal["decoder", "backend", "quality", "root"]
    """The argument of the data module that is changed."""
    value: str
    """Its new value: the name of another decoder, ``nvjpeg``, ``fast``, or the path of ``pack``."""
    now_ms: float
    """CPU time per sample as configured."""
    then_ms: float
    """CPU time per sample with the change, without the work of the device."""
    device_ms: float | None = None
    """Wall time per sample for decoding on the device; None for other changes."""
    pack: PackedImages | None = None
    """The pack that is the new root; None for other changes."""


@dataclass(frozen=True, kw_only=True)
class TriedSetting:
    """A setting of the loader that was tried, with a consumer that works as long on a batch as a training step does.

    The settings run in turns, so that other programs disturb all of them alike.
    """

    num_workers: int
    """Workers of the loader."""
    prefetch_factor: int | None = None
    """Batches that each worker loads ahead; None without workers."""
    step_ms: float
    """Step time with this setting: the median over its turns."""
    shortest_ms: float
    """Step time in the fastest turn of this setting."""
    longest_ms: float
    """Step time in the slowest turn of this setting."""
    own: bool = False
    """True for the user's own setting."""
    chosen: bool = False
    """True for the setting that was chosen: see ``why_chosen``."""


@dataclass(frozen=True, kw_only=True)
class ThreadsTrial:
    """Step times of training itself with fewer threads of torch, so that workers and threads share the CPUs."""

    torch_threads: int
    """Threads of torch that were tried."""
    num_workers: int
    """Workers of the loaders in both fits."""
    step_ms: float
    """Step time with these threads."""
    own_ms: float
    """Step time with torch's present number of threads."""


@dataclass(frozen=True, kw_only=True)
class ExperimentResults:
    """Results of all experiments. Rates are in batches per second.

    Rates are measured after a warm-up, over whole rounds: workers finish their batches together, one round at a time.
    """

    batch_size: int | None = None
    """Samples of a batch in the experiments."""
    model_per_s: float | None = None
    """Rate of the model on one device batch, repeated."""
    loader_per_s: float | None = None
    """Rate of the loader without training, as configured."""
    loader_start_s: float | None = None
    """Seconds from ``iter(loader)`` to the first batch."""
    taking_ms: float | None = None
    """CPU time that the training process needs to take one batch from its workers; None without workers."""
    cached_bytes_per_s: float | None = None
    """Rate of the loader when all files that it reads are already in the page cache."""
    no_transform_per_s: float | None = None
    """Rate of the loader without the dataset's transforms."""
    crops: CropTrial | None = None
    """Comparison of decoding an image folder's images whole and decoding only their crops. None if the loader does not
    decode images whole and then crop them."""
    lighter: tuple[LighterSample, ...] = ()
    """Changes of an ImageFolderDataModule with which a sample may take less work."""
    costs: tuple[NamedCost, ...] = ()
    """Costs per sample: of reading, of decoding, and of every transform by name."""
    samples_ms: float | None = None
    """Wall time to make the samples of one batch sequentially in one process."""
    collate_ms: float | None = None
    """Wall time of ``collate_fn`` for one batch."""
    functions: tuple[FunctionCost, ...] = ()
    """The user's functions that take the time in ``samples_ms`` and ``collate_ms``, the most expensive first."""
    ceiling_per_s: float | None = None
    """Rate of the loader with constant samples of the same shapes and the same workers: the limit of IPC, collating and
    pinning."""
    tried: tuple[TriedSetting, ...] = ()
    """Settings of the loader that were tried, in the order of their numbers of workers."""
    out_of_time: bool = False
    """True if time ended the search for workers."""
    inconclusive: bool = False
    """True if nothing follows from trials of numbers of workers: they did not imitate training, or their turns
    disagree."""
    why_chosen: str = ""
    """The reason for the choice among the tried settings, in one sentence."""
    own_fit_ms: float | None = None
    """Step time of training itself with the user's own setting, to compare with ``chosen_fit_ms``."""
    chosen_fit_ms: float | None = None
    """Step time of training itself with the setting that the trials chose. If training is no faster with it, the user's
    own setting counts as chosen."""
    threads: ThreadsTrial | None = None
    """Training with fewer threads of torch; None if it was not tried, as on a GPU or without workers."""
    trained_workers: int | None = None
    """Workers of the setting that ``chosen_fit_ms`` is about."""
    keys: tuple[KeyBytes, ...] = ()
    """Parts of a batch with their sizes."""
    left_out: tuple[tuple[str, str], ...] = ()
    """(experiment, reason why it was not run). The entry ``the rest of the fit`` names the parts of the fit that were
    not run, such as validation."""

    @property
    def stripped(self) -> str:
        """The parts of the user's fit that a diagnosis did not run, such as ``validation, ModelCheckpoint``; empty if
        it ran all of them."""
        return dict(self.left_out).get(REST_OF_THE_FIT, "").partition(":")[0]

    def tried_as(self, role: Literal["own", "chosen"]) -> TriedSetting | None:
        """Return the trial of the user's own setting, or of the chosen setting; None if it was not tried."""
        return next((setting for setting in self.tried if vars(setting)[role]), None)

    @property
    def noise_pct(self) -> float | None:
        """Largest spread between step times of the same setting, in % of their median; None if nothing was tried.

        The spread is the longest step time minus the shortest. Smaller differences between settings mean nothing.
        """
        spreads = [100 * (setting.longest_ms - setting.shortest_ms) / setting.step_ms for setting in self.tried]
        return max(spreads, default=None)


def step_of(name: str) -> str:
    """Name of a cost without its loader's name: ``load`` for ``"a: load"``."""
    return name.rpartition(": ")[2]


def pack_options(short_side: int | None, *, decoded: bool) -> str:
    """Return the options of ``lightning-feed pack`` for such a pack, each after a space."""
    size = "" if short_side is None else f" --size {short_side}"
    return f"{' --decoded' if decoded else ''}{size}"
