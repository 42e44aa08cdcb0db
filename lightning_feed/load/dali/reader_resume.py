"""A loader of DALI's readers that goes on where a checkpoint was saved."""

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from lightning_feed.errors import DatasetError, ResumeError
from lightning_feed.load.dali.install import require_dali
from lightning_feed.load.dali.reader_loader import ReaderLoader
from lightning_feed.load.dali.reader_pipeline import ReaderPipeline
from lightning_feed.load.dali.reader_share import Place

_VERSION = 1


class ResumableReaderLoader(ReaderLoader):
    """A :class:`ReaderLoader` with a state, of which DALI's own checkpoint is a part.

    The state is that of the batch handed out last, whatever DALI has made ahead of it: DALI keeps the states of its
    operators for each batch, and gives those of the batch whose outputs were taken last. Its pipeline has to be built
    ``resumable``.
    """

    state_differs_by_rank = True
    """Each rank reads a share of its own: a checkpoint needs the states of all."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pending: dict[str, Any] | None = None
        self._resumed: tuple[int, int] | None = None
        """The epoch and the batches of a loaded state, until the first batch after it."""
        self._known: dict[str, Any] | None = None
        """The state as it was told last, for as long as it holds."""

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: tensors and plain values, of which the tensor must not be changed."""
        if self._pending is not None:
            return copy.deepcopy(self._pending)
        if self._known is None:
            self._known = self._state()
        return dict(self._known)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state`` with the next pass. A live pass is closed, and the pipeline is made anew.

        Args:
            state: of ``state_dict()``, or ``{"ranks": [state of rank 0, state of rank 1, ...]}``.

        Raises:
            ResumeError: the state is of another loader, of another number of ranks, of another batch size, or of a set
                of another size.
        """
        state = dict(self._of_this_rank(state) if "ranks" in state else state)
        self._refuse_misfit(state)
        self.close()
        self._position = self._known = None
        if state["seed"] is not None:
            self.order.seed = state["seed"]
        self._pending = state if state["begun"] else None
        self._resumed = (state["epoch"], state["batches"]) if state["begun"] else None

    def take(self, to_follow: int) -> Any:
        """The next batch to hand out. What is known of the state is not true any more."""
        batch = super().take(to_follow)
        self._known = self._resumed = None
        return batch

    def free(self) -> None:
        """Free the pipeline. The state is kept: a checkpoint may still be saved after a fit."""
        if self._pipeline is not None and self._pipeline.usable:
            self.state_dict()
        super().free()

    def __getstate__(self) -> dict[str, Any]:
        # ddp_spawn pickles loaders, before the first batch: there is no pipeline yet that would matter.
        return {**self.__dict__, "_pipeline": None, "_live": None, "_known": None}

    def _state(self) -> dict[str, Any]:
        state = {"version": _VERSION, "kind": "dali", "seed": self.order.seed, "begun": False, "exact": True}
        if self._pipeline is None or self._position is None:
            return state
        return {
            **state,
            "begun": True,
            **asdict(self._position),
            "checkpoint": self._pipeline.checkpoint(),
            "pipeline_seed": self._seed,
            "place": [self._place.epoch, self._place.batch],
            "share": asdict(self.share),
            "dali": str(require_dali(gpu=False).__version__),
        }

    def _handed_out_before(self) -> int:
        # Kept until a batch is taken, since Lightning may iter() a loader twice before its first batch. Lightning is in
        # a later epoch where the one that was interrupted had come to its end.
        resumed = self._resumed
        return resumed[1] if resumed is not None and self.order.epoch() <= resumed[0] else 0

    def _open(self) -> ReaderPipeline:
        if self._pipeline is None and self._pending is not None:
            state = self._pending
            checkpoint = bytes(state["checkpoint"].numpy())
            try:
                self._start(state["pipeline_seed"], checkpoint, Place(*state["place"]))
            except DatasetError as error:
                raise ResumeError(
                    f"The pipeline cannot go on from the checkpoint, which was saved with DALI {state['dali']} (this "
                    f"is {require_dali(gpu=False).__version__}): {error}"
                ) from error
            self._pending = None
        return super()._open()

    @staticmethod
    def _of_this_rank(state: Mapping[str, Any]) -> dict[str, Any]:
        started = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if started else (0, 1)
        ranks: list[dict[str, Any]] = state["ranks"]
        if len(ranks) != world:
            raise ResumeError(
                f"The checkpoint was saved by {len(ranks)} ranks and this run has {world}. DALI's readers divide the "
                f"set among the ranks, so their places cannot be carried over. Resume with {len(ranks)} ranks."
            )
        return ranks[rank]

    def _refuse_misfit(self, state: Mapping[str, Any]) -> None:
        if state.get("kind") != "dali" or state.get("version") != _VERSION:
            raise ResumeError(
                f"The loader state is of kind {state.get('kind')!r} and version {state.get('version')!r}, and a "
                f"DaliDataModule of this lightning_feed reads kind 'dali' and version {_VERSION}. Resume with the data "
                "module, and the version of lightning_feed, that wrote the checkpoint."
            )
        if not state["begun"]:
            return
        then, now = state["share"], asdict(self.share)
        differs = [f"{name}={then[name]!r} then and {now[name]!r} now" for name in now if then[name] != now[name]]
        if differs:
            raise ResumeError(
                f"The checkpoint was saved with {', '.join(differs)}, so that its place in the epoch cannot be found "
                "again. Resume with the data and the settings that were trained with, or with resumable=False, which "
                "trains the rest of the epoch from a new order."
            )
