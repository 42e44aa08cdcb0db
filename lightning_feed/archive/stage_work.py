"""Makes a copy equal its source: plan, check the room, say who copies, copy, look again, say that it is complete."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_feed.archive.stage_copy import CopyJob, copy_files, differing_files, part_name
from lightning_feed.archive.stage_plan import CopyPlan, plan_copy, remove_entries
from lightning_feed.archive.stage_record import Complete, StagePlace, copying_now, is_ours, now_s, read_boot_id
from lightning_feed.archive.stage_room import Need, check_room
from lightning_feed.archive.stage_tree import Tree, below, scan_tree, shown
from lightning_feed.archive.stage_users import is_copy_of, is_used, release
from lightning_feed.errors import ArchiveError

logger = logging.getLogger(__name__)

_PASSES = 3
"""How often a source that changes while it is copied is looked at again."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """The options of :func:`~lightning_feed.archive.staging.stage`."""

    hash: bool = False
    force: bool = False
    remove_at_exit: bool = False
    wait_s: float | None = None


class StageWork:
    """The work of the one process that copies. The place is claimed meanwhile.

    Args:
        place: where the copy goes.
        origin: absolute path of what is copied.
        options: what was asked.
        show: draw progress bars, where stderr is a terminal.
    """

    def __init__(self, place: StagePlace, origin: str, options: StageOptions, *, show: bool) -> None:
        self._place, self._origin, self._options, self._show = place, origin, options, show
        self._target = str(place.target)
        self._begun = False
        self._remove_at_exit = False
        self.copied_files = 0
        self.copied_bytes = 0
        self.removed = 0

    def run(self) -> Complete:
        """Do it.

        Raises:
            ArchiveError: as in :func:`~lightning_feed.archive.staging.stage`.
        """
        self._remove_at_exit = self._options.remove_at_exit and self._may_go()
        self._check_owner()
        tree = self._scan()
        block = os.statvfs(self._place.target.parent).f_frsize
        # First, since it refuses what lies in the other: nobody is to be told to remove that by force.
        plan = plan_copy(tree, self._target, afresh=self._options.force, block_bytes=block)
        self._check_what_is_there()
        for _ in range(_PASSES):
            if not plan:
                break
            self._apply(tree, plan)
            tree = self._scan()
            plan = plan_copy(tree, self._target, block_bytes=block)
        else:
            if plan:
                raise ArchiveError(
                    f"{shown(self._origin)} still changes after it was copied {_PASSES} times. Stage it when nothing "
                    "writes to it any more; what is copied is kept."
                )
        if self._options.hash:
            self._compare(tree)
        return self._finish(tree)

    def _may_go(self) -> bool:
        """Whether the copy was not there before, or was made to go at the end of a run."""
        record = self._place.read_complete() or self._place.read_copying()
        return record.remove_at_exit if record else not os.path.lexists(self._target)

    def _check_owner(self) -> None:
        if os.path.lexists(self._target) and not is_ours(self._target):
            raise ArchiveError(
                f"{shown(self._target)} belongs to another user. Give a folder of your own as DEST, for example "
                "/dev/shm/<user>."
            )

    def _check_what_is_there(self) -> None:
        complete, copying = self._place.read_complete(), self._place.read_copying()
        if self._options.force:
            release(self._place)
            if is_used(self._place):
                raise ArchiveError(
                    f"{shown(self._target)} is used by another process, and force=True would remove it first. Wait for "
                    "that to end, or leave force out: files are replaced one by one then."
                )
        elif os.path.lexists(self._target) and not is_copy_of(self._place, self._origin):
            other = complete or copying
            what = f"a copy of {shown(other.source)}" if other else "no staged copy"
            raise ArchiveError(
                f"{shown(self._target)} is there already, and is {what}. Give another DEST, or force=True (--force) to "
                "remove it."
            )
        if copying is not None:
            why = "the machine was restarted" if copying.boot_id != read_boot_id() else "that ended before it was done"
            logger.info("Going on with the copy at %s by %s: %s.", shown(self._target), copying.described(), why)
            if copying.boot_id != read_boot_id():
                # What was not yet on the disk when the machine stopped may read as zeros. Whole files were given their
                # size and time last; parts have nothing to tell them by.
                shutil.rmtree(self._place.parts, ignore_errors=True)

    def _scan(self) -> Tree:
        tree = scan_tree(self._origin)
        if not tree.files:
            raise ArchiveError(f"There are no files in {shown(self._origin)}. Give the folder that has them.")
        return tree

    def _apply(self, tree: Tree, plan: CopyPlan) -> None:
        need = replace(plan.need, bytes=max(0, plan.need.bytes - self._keep_parts(tree, plan.to_copy)))
        check_room(need, str(self._place.target.parent))
        try:
            self._begin()
            remove_entries(self._target, plan.to_remove)
            self.removed += len(plan.to_remove)
            self._place.parts.mkdir(mode=0o700, exist_ok=True)
            for name, (mode, _) in tree.folders.items():
                folder = below(self._target, name)
                try:
                    os.mkdir(folder, mode | 0o700 if name else 0o700)  # noqa: PTH102
                except FileExistsError:
                    if not name:
                        self._check_owner()  # another user may have been first
        except ArchiveError:
            raise
        except OSError as error:
            raise ArchiveError(
                f"{shown(self._target)} cannot be written: {error}. Give a DEST that you may write to."
            ) from error
        job = CopyJob(tree, self._target, str(self._place.parts))
        size = sum(tree.files[name].size for name in plan.to_copy)
        with self._bar("Staging", size) as report:
            copy_files(job, plan.to_copy, report=report)
        self.copied_files += len(job.copied)
        self.copied_bytes += sum(tree.files[name].size for name in job.copied)

    def _keep_parts(self, tree: Tree, to_copy: list[str]) -> int:
        """Remove parts that nothing goes on with; return the bytes of the others."""
        parts = list(self._place.parts.iterdir()) if self._place.parts.is_dir() else []
        if not parts:
            return 0
        wanted = {part_name(name, tree.files[name]) for name in to_copy}
        for part in parts:
            if part.name not in wanted:
                part.unlink()
        return sum(part.stat().st_size for part in parts if part.name in wanted)

    def _begin(self) -> None:
        """Say who copies, then no longer that the copy is complete: at any time one of the two says that it is ours."""
        if not self._begun:
            self._place.write_copying(copying_now(self._origin, remove_at_exit=self._remove_at_exit))
            self._place.complete.unlink(missing_ok=True)
            self._begun = True

    def _compare(self, tree: Tree) -> None:
        wrong = self._differing(tree, list(tree.files))
        if not wrong:
            return
        logger.warning(
            "%d files in %s had another content than their source in the same size and time, and are copied again.",
            len(wrong),
            shown(self._target),
        )
        self._apply(tree, CopyPlan(wrong, [], Need(bytes=0, files=0)))
        again = self._differing(tree, wrong)
        if again:
            raise ArchiveError(
                f"{len(again)} files differ from their source after they were copied twice, the first: "
                f"{shown(below(self._target, again[0]))}. The source changes, or a disk or memory is faulty."
            )

    def _differing(self, tree: Tree, names: list[str]) -> list[str]:
        job = CopyJob(tree, self._target, str(self._place.parts))
        with self._bar("Comparing", sum(tree.files[name].size for name in names)) as report:
            return differing_files(job, names, report=report)

    def _finish(self, tree: Tree) -> Complete:
        status = os.stat(self._target)  # noqa: PTH116
        if status.st_mode & 0o077:  # made by a version that did not keep it from other users
            os.chmod(self._target, status.st_mode & 0o700)  # noqa: PTH101
        # Folders get the time of their source after all that is in them, so that an index of the source fits the copy.
        for name, (_, mtime_ns) in reversed(tree.folders.items()):
            folder = below(self._target, name)
            if os.stat(folder).st_mtime_ns != mtime_ns:  # noqa: PTH116 - or their ctime would change each time
                os.utime(folder, ns=(mtime_ns, mtime_ns))
        done = Complete(
            source=self._origin,
            files=len(tree.files),
            total_bytes=tree.total_bytes,
            boot_id=read_boot_id(),
            checked_s=now_s(),
            hashed=self._options.hash,
            remove_at_exit=self._remove_at_exit,
        )
        try:
            self._place.write_complete(done)
        except OSError as error:
            raise ArchiveError(
                f"{shown(self._place.complete)} cannot be written: {error.strerror}. Make room there and run it again: "
                "what is copied is kept."
            ) from error
        self._place.copying.unlink(missing_ok=True)
        shutil.rmtree(self._place.parts, ignore_errors=True)
        return done

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        from tqdm import tqdm

        # disable=None: no bar where stderr is not a terminal.
        with tqdm(
            total=total,
            desc=f"{what} {shown(Path(self._origin).name)}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=None if self._show else True,
        ) as bar:
            yield lambda done: bar.update(done - bar.n)
