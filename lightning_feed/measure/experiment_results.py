"""The results of experiments as frozen values; None: not run, or not measurable.

The folder ``diagnosing`` makes them. They are defined here because the verdict, the reports and the measurements that
hold them may not import from there.
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
    """Its file."""
    line: int
    """The line that takes most of the time."""
    calls: str | None
    """The library class or function called on that line, such as ``ColorJitter``; None: the function's own work."""
    stage: Literal["samples", "collate"]
    """The kind of work: making samples, or collating them."""
    ms_per_batch: float
    """Wall time, excluding the user's other functions that it calls."""


@dataclass(frozen=True, kw_only=True)
class KeyBytes:
    """One part of the batch."""

    name: str
    """Its path in the batch: ``image``, ``0``, ``meta.path``."""
    bytes_per_batch: int
    """Bytes sent to the training process, and from there to the device."""


NOT_TRANSFORMS = ("read", "decode", "load")
"""Names of the costs of a sample other than its transforms, as experiments give them: see :func:`step_of`."""
REST_OF_THE_FIT = "the rest of the fit"


@dataclass(frozen=True, kw_only=True)
class CropTrial:
    """Samples of an image folder, made alternately by decoding whole images and only their crops."""

    folder: str
    """The folder to pass to an ImageFolderDataModule."""
    val_fraction: float | None = None
    """Share of the images set aside for validation. None: the folder has its own splits."""
    whole_ms: float
    """CPU time per sample as configured."""
    crop_ms: float
    """CPU time per sample with only the crop decoded."""


@dataclass(frozen=True, kw_only=True)
class TriedSetting:
    """A setting of the loader that was tried with a consumer that works as long as a training step."""

    num_workers: int
    """Workers of the loader."""
    prefetch_factor: int | None = None
    """Batches that each worker loads ahead; None without workers."""
    step_ms: float
    """Time of a step, the median of its turns."""
    shortest_ms: float
    """Time of a step in its fastest turn."""
    longest_ms: float
    """Time of a step in its slowest turn."""
    own: bool = False
    """True for the user's own setting."""
    chosen: bool = False
    """True for the setting that was chosen: see ``why_chosen``."""


@dataclass(frozen=True, kw_only=True)
class ExperimentResults:
    """Results of all experiments. Rates are in batches per second, each over whole rounds after the warm-up."""

    batch_size: int | None = None
    """Samples of a batch in the experiments."""
    model_per_s: float | None = None
    """Rate of the model on one device batch, repeated."""
    loader_per_s: float | None = None
    """Rate of the loader without training, as configured."""
    loader_start_s: float | None = None
    """From ``iter(loader)`` to its first batch."""
    taking_ms: float | None = None
    """CPU time that the training process needs to take one batch from its workers; null without workers."""
    cached_bytes_per_s: float | None = None
    """Rate of the loader when all files that it reads are already in the page cache."""
    no_transform_per_s: float | None = None
    """Rate of the loader without the dataset's transforms."""
    crops: CropTrial | None = None
    """Comparison of decoding an image folder's images whole and decoding only their crops. None if the loader does not
    decode images whole and then crop them."""
    costs: tuple[NamedCost, ...] = ()
    """Per sample: reading, decoding, and every transform by name."""
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
    """Settings of the loader that were tried, by number of workers."""
    why_chosen: str = ""
    """The reason for the setting that was chosen of those tried, in one sentence."""
    own_fit_ms: float | None = None
    """Step of training itself with the user's own setting, beside ``chosen_fit_ms``."""
    chosen_fit_ms: float | None = None
    """Step of training itself with the setting that the trials chose. If it is no shorter, the own setting counts as
    chosen."""
    keys: tuple[KeyBytes, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    """(experiment, why it was not run); under :data:`REST_OF_THE_FIT` the parts of the fit that were not run."""

    @property
    def stripped(self) -> str:
        """The parts of the user's fit that a diagnosis did not run: ``validation, ModelCheckpoint``. Empty: none."""
        return dict(self.left_out).get(REST_OF_THE_FIT, "").partition(":")[0]

    def tried_as(self, role: Literal["own", "chosen"]) -> TriedSetting | None:
        """The user's own setting, or the chosen one, as it was tried; None: it was not."""
        return next((setting for setting in self.tried if vars(setting)[role]), None)

    @property
    def noise_pct(self) -> float | None:
        """Largest spread between step times of the same setting, in % of their median; None: nothing was tried.

        The spread is the longest less the shortest. Smaller differences between settings mean nothing.
        """
        spreads = [100 * (setting.longest_ms - setting.shortest_ms) / setting.step_ms for setting in self.tried]
        return max(spreads, default=None)


def step_of(name: str) -> str:
    """Name of a cost without its loader's name: ``load`` for ``"a: load"``."""
    return name.rpartition(": ")[2]
