"""Objects on HTTP servers that are replaced or cut short, and servers that tell little or wrong things of them."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_store import HttpStore, running_http

from lightning_feed.errors import ArchiveError
from lightning_feed.storage import remote, remote_folder, stage
from lightning_feed.storage.read_through import ReadThrough
from lightning_feed.storage.remote import GoneError, RemotePlace
from lightning_feed.storage.remote_folder import RemoteFolder, RemoteSource, list_files

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:Unclosed:ResourceWarning")
COUNT = 40
Opened = Callable[[], RemoteSource]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpStore]:
    monkeypatch.setattr(remote, "_FIRST_DELAY_S", 0.001)
    store = HttpStore()
    for number in range(COUNT):
        store.put(path_of(number), content(number, "old"))
    with running_http(store):
        yield store


@pytest.fixture
def new_run(store: HttpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens the place through the cache as a process that starts now."""

    def open_again() -> RemoteSource:
        monkeypatch.setattr(remote_folder, "_STARTED_S", time.time())
        return source_of(store, ReadThrough(tmp_path / "cache", 1 << 30))

    return open_again


def source_of(store: HttpStore, cache: ReadThrough | None) -> RemoteSource:
    place = RemotePlace(store.url, cache=cache, timeout_s=10)
    return RemoteSource.of(place, list_files(place))


def path_of(number: int) -> str:
    return f"{'crow' if number < COUNT // 2 else 'wren'}/{number:02}.jpg"


def content(number: int, version: str) -> bytes:
    return f"{version} {number:02} ".encode() * 100


def read(source: RemoteSource) -> list[bytes]:
    return [source.read(number) for number in range(COUNT)]


def all_of(version: str) -> list[bytes]:
    return [content(number, version) for number in range(COUNT)]


def held(source: RemoteSource) -> int:
    cache = source.place.cache
    assert cache is not None
    return len(list(cache.folder.glob("??/*")))


# --- replaced ---------------------------------------------------------------------------------------------------------

TELLING: list[dict[str, Any]] = [
    {},
    {"ranges": False},
    {"dated": True, "etag": "constant"},
    {"dated": True, "etag": None},
    {"etag": None},
    {"head": "bare"},
    {"head": "empty"},
    {"head": 405},
    {"head": 501},
    {"head": "hang up"},
]


@pytest.mark.parametrize("manners", TELLING, ids=str)
def test_what_was_replaced_is_seen_by_the_next_run(store: HttpStore, new_run: Opened, manners: dict[str, Any]) -> None:
    vars(store).update(manners)
    source = new_run()
    assert read(source) == read(source) == all_of("old")
    if store.head != "empty":  # so answered, an object's size is that of its content
        assert store.gets() <= COUNT * (2 if isinstance(store.head, int) or store.head == "hang up" else 1)
    for number in range(COUNT):
        store.put(path_of(number), content(number, "new"))
    assert read(source) == all_of("old")  # this run has them
    assert read(new_run()) == all_of("new")


def test_a_second_run_asks_for_each_object_once_and_fetches_none(store: HttpStore, new_run: Opened) -> None:
    read(new_run())
    store.seen.clear()
    source = new_run()
    read(source)
    read(source)
    assert store.gets() == 0
    assert sum(count for (method, _), count in store.seen.items() if method == "HEAD") == COUNT


def test_an_etag_that_stays_and_no_date_tell_of_another_size_alone(store: HttpStore, new_run: Opened) -> None:
    store.etag = "constant"
    read(new_run())
    store.put(path_of(0), b"of another size")
    assert new_run().read(0) == b"of another size"


@pytest.mark.parametrize("etag", ["content", "constant"])
def test_an_object_that_changes_between_head_and_get_is_refused(store: HttpStore, new_run: Opened, etag: str) -> None:
    store.etag, store.dated = etag, etag == "constant"
    source = new_run()
    store.put(path_of(3), content(3, "new"))
    with pytest.raises(
        GoneError, match=r"03\.jpg cannot be used: its ETag.* has changed since it was listed.*Start the run"
    ):
        source.read(3)
    assert held(source) == 0
    assert new_run().read(3) == content(3, "new")


def test_without_a_cache_the_object_is_read_as_it_is_now(store: HttpStore) -> None:
    source = source_of(store, None)
    store.put(path_of(3), content(3, "new"))
    assert source.read(3) == content(3, "new")


def test_an_etag_that_is_another_each_time_is_refused_where_it_matters(store: HttpStore, new_run: Opened) -> None:
    store.etag = "random"
    source = new_run()
    with pytest.raises(GoneError, match=r"the server sends a new value each time.*leave out stage_limit"):
        source.read(3)
    assert held(source) == 0
    assert read(source_of(store, None)) == all_of("old")


def test_an_etag_that_is_weak_at_first_is_the_same(
    store: HttpStore, new_run: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as at_first:
        headers = store.headers
        at_first.setattr(store, "headers", lambda path: {name: f"W/{tag}" for name, tag in headers(path).items()})
        source = new_run()
    assert read(source) == all_of("old")


def test_the_headers_of_the_user_are_sent_with_every_request(store: HttpStore, tmp_path: Path) -> None:
    place = RemotePlace(store.url, {"headers": {"X-Token": "secret"}}, cache=ReadThrough(tmp_path, 1 << 20))
    options = RemoteSource.of(place, list_files(place)).options(0)
    assert options["headers"] == {"X-Token": "secret", "Accept-Encoding": "identity"}


# --- cut short --------------------------------------------------------------------------------------------------------


def test_a_body_that_is_cut_short_is_fetched_again(store: HttpStore, new_run: Opened) -> None:
    source = new_run()
    store.cut = {path_of(5)}
    store.before_get = lambda _: store.cut.clear() if store.seen["GET", path_of(5)] > 2 else None
    assert source.read(5) == content(5, "old")
    assert store.seen["GET", path_of(5)] == 3


@pytest.mark.parametrize("sized", [True, False])
def test_a_body_that_stays_cut_short_is_never_kept(store: HttpStore, new_run: Opened, sized: bool) -> None:
    store.sized = sized
    source = new_run()
    store.cut = {path_of(5)}
    with pytest.raises(GoneError, match=r"05\.jpg cannot be used: 350 bytes arrived, but 700 were listed"):
        source.read(5)
    assert held(source) == 0
    store.cut.clear()
    assert source.read(5) == content(5, "old")
    assert held(source) == 1


def test_without_head_and_length_nothing_is_kept(store: HttpStore, new_run: Opened) -> None:
    """Where the end of the connection ends the body, nothing tells that it is whole."""
    store.head, store.sized = 405, False
    source = new_run()
    source.expect(range(COUNT))
    assert read(source) == all_of("old")
    assert held(source) == 0
    store.put(path_of(3), content(3, "new"))
    assert source.read(3) == content(3, "new")
    assert source.begin_ahead(3) is None
    with pytest.raises(ArchiveError, match="The server reports no size for"):
        stage(store.url, source.place.cache.folder.parent / "copy")  # type: ignore[union-attr]


def test_an_empty_object_is_one(store: HttpStore, new_run: Opened) -> None:
    store.put(path_of(0), b"")
    source = new_run()
    assert source.sizes[0] == 0
    assert source.read(0) == b""


# --- listing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [403, 404])
def test_a_link_that_cannot_be_followed_is_one_bad_sample(store: HttpStore, new_run: Opened, status: int) -> None:
    store.status[path_of(7)] = status
    source = new_run()
    assert source.read(6) == content(6, "old")
    with pytest.raises(ArchiveError, match=r"07\.jpg (may not be read|does not exist)"):
        source.read(7)


def test_a_server_that_fails_is_no_missing_file(store: HttpStore, new_run: Opened) -> None:
    store.status[path_of(7)] = 503
    with pytest.raises(ArchiveError, match=r"07\.jpg could not be read in 6 attempts, last: .*503"):
        new_run()


def test_a_listing_is_that_of_the_run(store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    place = RemotePlace(store.url)
    assert len(list_files(place)) == COUNT
    store.put("wren/99.jpg", b"new")
    assert len(list_files(place)) == COUNT
    monkeypatch.setattr(remote_folder, "_STARTED_S", time.time())
    with monkeypatch.context() as ranks:
        ranks.setenv("WORLD_SIZE", "2")  # another rank has listed a moment ago
        assert len(list_files(place)) == COUNT
    assert len(list_files(place)) == COUNT + 1


def test_a_file_read_by_name_is_checked_too(store: HttpStore, tmp_path: Path) -> None:
    folder = RemoteFolder(RemotePlace(store.url, cache=ReadThrough(tmp_path, 1 << 20)))
    store.put(path_of(3), content(3, "new"))
    with pytest.raises(GoneError, match="the file was replaced"):
        folder.read(path_of(3))
