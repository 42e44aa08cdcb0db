"""The loader states and the counts of batches in a checkpoint."""

from typing import Any


def checkpoint_loader_states(checkpoint: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The training loaders' states in a checkpoint.

    Read in 2.4.0 and 2.6.6 (``loops/fit_loop.py: on_save_checkpoint``).
    """
    states: list[dict[str, Any]] | None = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    return states


def write_loader_states(checkpoint: dict[str, Any], states: list[dict[str, Any]]) -> None:
    """Put ``states`` in the place of those that Lightning took; none at all where nothing was trained yet."""
    fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    if states:
        fit_loop["combined_loader"] = states
    else:
        fit_loop.pop("combined_loader", None)


def resumes_in_a_new_epoch(trainer: Any, checkpoint: dict[str, Any]) -> bool:
    """Whether a run resumed from ``checkpoint`` starts a new epoch with the loader states that it loads.

    It does when the last batch of an epoch had been trained. Lightning gives the loaders their states then too, but no
    new ``iter()``: a loader that goes on from there has nothing left, and the new epoch would be empty. Read in 2.6.6
    (``loops/training_epoch_loop.py: reset``).
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current = progress["current"]
    if not progress["is_last_batch"] or current["ready"] != current["processed"]:
        return False
    return current["completed"] == current["processed"] or _counts_the_batch_in_hand(trainer)


def count_the_batch_in_hand(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Let an older Lightning know that a batch was trained whose ``on_train_batch_end`` was still running.

    ``ModelCheckpoint(every_n_train_steps=...)`` saves there. 2.6.6 counts that batch, and 2.4.0 would train one more in
    its place. The epoch is ended too where it was the last batch, as 2.6.6 does (``loops/fit_loop.py: reset``).
    """
    if _counts_the_batch_in_hand(trainer):
        return
    fit_loop = checkpoint["loops"]["fit_loop"]
    progress = fit_loop["epoch_loop.batch_progress"]
    current = progress["current"]
    if current["ready"] > current["processed"]:
        progress["is_last_batch"] = False  # it is to be trained again, and 2.4.0 would take the epoch as ended
    if not current["ready"] == current["processed"] == current["completed"] + 1:
        return
    for part in (current, progress["total"]):
        part["completed"] += 1
    if progress["is_last_batch"]:
        for part in fit_loop["epoch_progress"].values():
            part["processed"] += 1
            part["completed"] += 1
        current.update(dict.fromkeys(current, 0))
        progress["is_last_batch"] = False


def shift_batches(trainer: Any, shift: int) -> None:
    """Add ``shift`` to the batches of the resumed epoch: its loader makes others of the same samples.

    To be called in ``on_train_start``, before the loop compares them with the loader's length. Read in 2.4.0 and 2.6.6
    (``loops/training_epoch_loop.py: on_run_start``).
    """
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + shift)


def _counts_the_batch_in_hand(trainer: Any) -> bool:
    return hasattr(trainer.fit_loop.epoch_loop, "restarted_on_train_batch_end")
