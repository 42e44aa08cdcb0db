"""The search chooses well on machines of every size, and never leaves the user's setting without need."""

from dataclasses import replace

import pytest
from trials.machines import LAWS, FakeMachine, workers

from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import ALIKE, FINALISTS, TURNS, Choice, Space, Trial, find_setting, start_share_s


def search(machine: FakeMachine, own: int = 0, most_workers: int | None = None) -> Choice:
    most = max(16, 2 * machine.cpus) if most_workers is None else most_workers
    space = Space(own=workers(own), cpus=machine.cpus, most_workers=most, model_s=machine.model_s)
    choice = find_setting(space, machine.run)
    assert choice is not None
    return choice


@pytest.mark.parametrize("model_s", [0.0, 0.001, 0.01, 0.3])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("cpus", [1, 2, 4, 16, 64, 192])
def test_the_choice_is_within_five_percent_of_the_best(cpus: int, law: str, model_s: float) -> None:
    for own in (0, 1, 2, 8, cpus, 2 * cpus):
        machine = FakeMachine(law, cpus, model_s)
        choice = search(machine, own)
        assert machine.step_s(choice.setting) <= 1.05 * machine.best_s(max(16, 2 * cpus, own)), (own, choice)
        assert len(machine.tried) <= 30


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("cpus", [2, 16, 192])
def test_choice_is_within_eight_percent_of_the_best_despite_noise(cpus: int, law: str) -> None:
    machine = FakeMachine(law, cpus, noise=0.02)
    assert machine.step_s(search(machine).setting) <= 1.08 * machine.best_s(2 * cpus)


def test_fewest_workers_of_equally_fast_settings_are_chosen() -> None:
    assert search(FakeMachine("linear", 16, model_s=0.02)).setting.num_workers in (5, 6)
    assert search(FakeMachine("bound by a lock", 16)).setting.num_workers <= 1


def test_users_setting_and_zero_workers_are_always_tried() -> None:
    for own in (0, 3, 40):
        machine = FakeMachine("linear", 4)
        search(machine, own)
        assert workers(own) in machine.tried
        assert workers(0) in machine.tried


def test_users_setting_is_kept_if_it_is_as_fast() -> None:
    machine = FakeMachine("linear", 16, model_s=0.02)
    choice = search(machine, own=12)  # 5 would do as well
    assert choice.setting == workers(12)
    assert "more than 3% shorter" in choice.reason


def test_nothing_is_concluded_if_trials_do_not_imitate_training() -> None:
    """Each says 25 ms with four workers and 100 without; the user has none, and training took 50."""
    machine = FakeMachine("linear", 4)
    own_s = machine.step_s(workers(0))

    def found(measured_s: float | None, *, copies: bool = False) -> Choice:
        space = Space(own=workers(0), cpus=4, most_workers=16, own_s=measured_s, copies=copies)
        choice = find_setting(space, machine.run)
        assert choice is not None
        return choice

    for unlike_s in (own_s / 2, 2 * own_s):
        choice = found(unlike_s)
        assert choice.setting == workers(0)
        assert not choice.finished
        assert len(choice.trials) == 1
        assert f"training {1e3 * unlike_s:.3g}" in choice.reason
    for alike_s in (None, 0.9 * own_s, own_s, 1.1 * own_s):
        assert found(alike_s).setting.num_workers >= 4
    assert found(2 * own_s, copies=True).setting.num_workers >= 4  # the rest may be copies, which trials leave out
    assert found(own_s / 2, copies=True).setting == workers(0)


@pytest.mark.parametrize(
    ("steps_per_epoch", "persistent", "expected"), [(10, False, 0), (10, True, 4), (10_000, False, 4)]
)
def test_the_start_of_workers_counts_as_often_as_it_happens(
    steps_per_epoch: int, persistent: bool, expected: int
) -> None:
    """Without workers a step takes 100 ms, with four 25, and they need 2 s to start."""
    machine = FakeMachine("linear", 4)

    def run(setting: Setting) -> Trial:
        trial = replace(machine.run(setting), start_s=2.0)
        return replace(trial, start_share_s=start_share_s(trial, steps_per_epoch))

    own = workers(4, persistent_workers=True) if persistent else workers(0)
    choice = find_setting(Space(own=own, cpus=4, most_workers=4), run)
    assert choice is not None
    assert choice.setting.num_workers == expected


def test_search_finds_fewer_workers_than_the_user_has_set() -> None:
    machine = FakeMachine("bound by a lock", 4)
    choice = search(machine, own=8)
    assert choice.setting.num_workers < 2


def test_search_finds_worker_counts_between_powers_of_two() -> None:
    assert search(FakeMachine("falling", 24)).setting.num_workers in range(22, 27)


def test_users_setting_is_kept_if_repeated_trials_disagree() -> None:
    times_s = {0: [0.10, 0.08, 0.08], 1: [0.07, 0.09, 0.07], 2: [0.30]}

    def run(setting: Setting) -> Trial:
        return Trial(setting=setting, steps_s=(times_s[setting.num_workers].pop(0),))

    choice = find_setting(Space(own=workers(0), cpus=1, most_workers=2), run)
    assert choice is not None
    assert choice.setting == workers(0)
    assert choice.reason == (
        "the turns disagree: 70, 90, 70 ms with num_workers=1, prefetch_factor=2, 100, 80, 80 ms with num_workers=0"
    )


def test_steady_load_on_the_machine_does_not_change_the_choice() -> None:
    machine = FakeMachine("linear", 4, busy=lambda trial: 1.7)
    assert search(machine).setting.num_workers == 4


def test_finalists_are_tried_in_turns() -> None:
    machine = FakeMachine("linear", 4)
    choice = search(machine, own=2)
    turns = machine.tried[-2 * FINALISTS :]
    assert {workers(2), workers(4)} <= set(turns)
    assert turns[:FINALISTS] == turns[FINALISTS:]
    best = next(trial for trial in choice.trials if trial.setting == choice.setting)
    assert len(best.steps_s) == TURNS


def test_dying_workers_limit_the_worker_counts_that_are_tried() -> None:
    machine = FakeMachine("linear", 64, most=10)
    choice = search(machine)
    assert choice.setting.num_workers == 8
    assert [setting.num_workers for setting in machine.tried if setting.num_workers > 10] == [64, 16]


def test_search_returns_none_if_no_setting_runs() -> None:
    space = Space(own=workers(2), cpus=2, most_workers=4)
    assert find_setting(space, lambda setting: Trial(setting=setting, infeasible="no")) is None


def test_search_out_of_time_returns_the_fastest_setting_so_far() -> None:
    choice = search(FakeMachine("linear", 16, trials=3))
    assert choice.setting == workers(16)
    assert choice.reason == "the fastest of 3 tried; the time ended the search"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("cpus", [1, 2, 4, 16, 64, 192])
def test_eight_trials_find_a_setting_within_twice_the_best_time(cpus: int, law: str) -> None:
    for model_s in (0.0, 0.001, 0.01):
        machine = FakeMachine(law, cpus, model_s, trials=8)
        found_s = machine.step_s(search(machine).setting)
        assert found_s <= 2 * machine.best_s(max(16, 2 * cpus)), model_s


def test_larger_prefetch_factors_are_tried_only_for_uneven_batches() -> None:
    machine = FakeMachine("linear", 2)

    def uneven(setting: Setting) -> Trial:
        trial = replace(machine.run(setting), unevenness=3.0)
        gain = 0.8 if setting.prefetch_factor == 8 else 1.0
        return replace(trial, steps_s=tuple(gain * step_s for step_s in trial.steps_s))

    choice = find_setting(Space(own=workers(0), cpus=2, most_workers=4), uneven)
    assert choice is not None
    assert (choice.setting.num_workers, choice.setting.prefetch_factor) == (2, 8)
    even = FakeMachine("linear", 2)
    search(even)
    assert {setting.prefetch_factor for setting in even.tried} == {None, 2}


def in_place(setting: Setting) -> Setting:
    return replace(setting, in_place=True)


@pytest.mark.parametrize(("place_s", "best"), [({8: 0.010, 2: 0.012}, 8), ({8: 0.010, 2: 0.006}, 2)])
def test_batches_in_place_win_also_with_the_users_number_of_workers(place_s: dict[int, float], best: int) -> None:
    tried: list[Setting] = []

    def run(setting: Setting) -> Trial:
        tried.append(setting)
        step_s = place_s.get(setting.num_workers, 0.02) if setting.in_place else 0.033
        return Trial(setting=setting, steps_s=(step_s,))

    choice = find_setting(Space(own=workers(8), cpus=16, most_workers=32, in_place=True), run)
    assert choice is not None
    assert choice.setting == in_place(workers(best))
    assert tried[:3] == [workers(8), in_place(workers(8)), workers(0)]
    assert all(setting.in_place for setting in tried[3:])


def test_batches_in_place_are_not_tried_twice_if_the_users_own_are() -> None:
    machine = FakeMachine("linear", 4)
    space = Space(own=in_place(workers(2)), cpus=4, most_workers=8, in_place=True)
    assert find_setting(space, machine.run) is not None
    assert machine.tried[:2] == [in_place(workers(2)), workers(0)]


def test_search_adds_no_workers_once_the_model_is_fed() -> None:
    machine = FakeMachine("linear", 192, model_s=0.2)
    search(machine)
    assert max(setting.num_workers for setting in machine.tried) == 1


def test_tolerance_for_equal_speed_is_below_five_percent() -> None:
    assert 1 < ALIKE < 1.05
