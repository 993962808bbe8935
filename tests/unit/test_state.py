import pytest

from trainer.state import TrainState


def test_skipped_updates_are_no_steps() -> None:
    state = TrainState()
    in_a_row = []
    for applied in (True, False, False, True, False):
        state.count(applied=applied, num_samples=8)
        in_a_row.append(state.skipped_in_a_row)
    assert (state.batch, state.step, state.skipped, state.samples_seen) == (5, 2, 3, 40)
    assert in_a_row == [0, 1, 2, 0, 1]
    assert state.batch_in_epoch == 5


def test_state_survives_its_own_dictionary() -> None:
    state = TrainState(epoch=2, boundary_pending=True, last_train_loss=0.5)
    state.count(applied=True, num_samples=3)
    assert TrainState(**state.as_dict()) == state  # type: ignore[arg-type]


def test_counters_that_disagree_are_noticed() -> None:
    with pytest.raises(AssertionError):
        TrainState(batch=3, step=1).count(applied=True, num_samples=1)
