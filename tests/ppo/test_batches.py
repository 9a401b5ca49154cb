"""Rollouts of any size are cut into minibatches of any size, and every sample counts once."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof.ppo import DistributionalPPO
from driftproof.settings.batches import cut

from .scripted import agent, identities, learn, scripted, small_networks

sizes = st.integers(1, 300)


@given(sizes, st.integers(1, 9), sizes, st.none() | sizes, st.booleans())
def test_sequences_and_minibatches_cover_the_rollout(n_steps, n_envs, batch_size, sequence_length, is_recurrent):
    if sequence_length is not None:
        sequence_length = min(sequence_length, n_steps)
    cuts = cut(n_steps, n_envs, batch_size, sequence_length, is_recurrent)
    per_env, rest = divmod(cuts.sequences, n_envs)
    assert rest == 0
    assert (per_env - 1) * cuts.sequence_length < n_steps <= per_env * cuts.sequence_length
    assert (cuts.per_epoch - 1) * cuts.per_batch < cuts.sequences <= cuts.per_epoch * cuts.per_batch
    if batch_size >= n_steps * n_envs:
        assert cuts.per_epoch == 1
    else:
        assert cuts.per_batch * cuts.sequence_length <= max(batch_size, cuts.sequence_length)
    if sequence_length is None:
        assert cuts.sequence_length <= max(1, batch_size // 2)
        assert cuts.sequence_length <= 128


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize(
    ("n_steps", "batch_size", "sequence_length"), [(7, 5, None), (13, 64, 5), (9, 4, 6), (12, 7, 4)]
)
@pytest.mark.parametrize("static_shapes", [False, True])
def test_every_sample_is_in_one_minibatch(policy, n_steps, batch_size, sequence_length, static_shapes):
    model = _small(policy, n_steps, batch_size, sequence_length)
    seen = []

    def look(model):
        rollout, cuts = model._rollout, model.batches
        numbers = identities(rollout.observations).float()
        orders = [torch.randperm(cuts.sequences)]
        batches = list(rollout.minibatches(numbers, numbers, numbers, cuts.per_batch, orders, True, static_shapes))
        assert len(batches) == cuts.per_epoch
        if static_shapes:
            assert len({batch.advantages.shape for batch in batches}) == 1
        for batch in batches:
            counts = torch.ones_like(batch.advantages) if batch.valid is None else batch.valid
            seen.append((batch.advantages[counts > 0], identities(batch.observations)[counts > 0]))

    learn(model, 1, before=look)
    advantages, observed = (torch.cat(parts) for parts in zip(*seen, strict=True))
    torch.testing.assert_close(advantages, observed.float())
    assert sorted(observed.tolist()) == sorted(step * 10 + env for step in range(n_steps) for env in range(3))


@pytest.mark.parametrize(("n_steps", "batch_size"), [(5, 7), (33, 10), (1, 1), (8, 1000)])
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy", "MlpGruPolicy"])
def test_agents_learn_from_rollouts_of_any_size(policy, n_steps, batch_size):
    model = _small(policy, n_steps, batch_size, None)
    before = torch.nn.utils.parameters_to_vector(model.policy.parameters()).clone()
    model.learn(3 * n_steps * 2)
    after = torch.nn.utils.parameters_to_vector(model.policy.parameters())
    assert after.isfinite().all()
    assert not after.equal(before)


def test_padding_changes_no_loss():
    """One sequence of five steps, whole or cut into three and a padded two: the mean loss is over the same samples."""
    losses = []
    for sequence_length in (5, 3):
        model = _small("MlpLstmPolicy", 5, 1000, sequence_length)
        model.learn(15)
        losses.append(model.logger.name_to_value["train/policy_gradient_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_truncated_minibatch_is_announced():
    with pytest.warns(
        UserWarning,
        match="after 2 minibatches of 7 samples there will be a truncated mini-batch of size 1",
    ):
        agent(scripted([4], [4], [4]), n_steps=5, batch_size=7)
    with pytest.warns(UserWarning, match="there will be a truncated mini-batch of size 15"):
        agent(scripted([4], [4], [4]), n_steps=5, batch_size=64)


def test_defaults_are_those_of_the_class_that_is_replaced():
    for policy, sizes_ in (("MlpPolicy", (2048, 64)), ("MlpLstmPolicy", (128, 128)), ("MlpGruPolicy", (128, 128))):
        model = DistributionalPPO(policy, "CartPole-v1", policy_kwargs=small_networks(policy))
        assert (model.n_steps, model.batch_size) == sizes_


def _small(policy, n_steps, batch_size, sequence_length):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return agent(
            scripted([4, 3], [100], [1, 6]),
            policy,
            n_steps=n_steps,
            batch_size=batch_size,
            sequence_length=None if policy == "MlpPolicy" else sequence_length,
        )


@pytest.mark.filterwarnings("ignore:batch_size=7")
@pytest.mark.parametrize("batch_size", [4, 7])
def test_minibatches_gathered_together_are_those_gathered_one_by_one(monkeypatch, batch_size):
    def weights():
        model = agent(scripted([3], [5, 1], [20]), n_steps=8, batch_size=batch_size, n_epochs=2)
        learn(model, 2)
        return model.policy.state_dict()

    together = weights()
    monkeypatch.setattr("driftproof.learner.rollout._GATHERED_BYTES", 1)
    torch.testing.assert_close(weights(), together, rtol=0, atol=0)
