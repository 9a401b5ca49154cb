"""Memory through ``learn()``: what training recomputes is what the rollout said, however awkwardly episodes end."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback

from driftproof.nn import segments
from driftproof.nn.types import PolicyState
from driftproof.ppo.vector_env import GymnasiumVecEnv

from .scripted import StepSpy, agent, identities, learn, scripted, weights

STEPS = 12
# Of one and two steps; at the borders of chunks of 4; on the first and last step of a rollout; longer than a rollout.
LENGTHS = ([1, 1, 2], [4], [1, 10, 1], [11, 1], [31])
MEMORIES = {
    "lstm": ("MlpLstmPolicy", {}),
    "gru": ("MlpGruPolicy", {}),
    "lstm-shared": ("MlpLstmPolicy", {"shared_recurrence": True}),
    "gru-shared": ("MlpGruPolicy", {"shared_recurrence": True}),
    "lstm-two-layers": ("MlpLstmPolicy", {"n_lstm_layers": 2}),
    "gru-two-layers": ("MlpGruPolicy", {"n_lstm_layers": 2}),
    "lstm-two-layers-shared": ("MlpLstmPolicy", {"n_lstm_layers": 2, "shared_recurrence": True}),
    "lstm-critics-without": ("MlpLstmPolicy", {"enable_critic_lstm": False}),
    "gru-critics-without": ("MlpGruPolicy", {"enable_critic_lstm": False}),
    "lstm-own-features": ("MlpLstmPolicy", {"share_features_extractor": False}),
    "none": ("MlpPolicy", {}),
}
memories = pytest.mark.parametrize("memory", MEMORIES)


def rememberer(memory, sequence_length=4, **arguments):
    policy, policy_kwargs = MEMORIES[memory]
    if policy == "MlpPolicy":
        sequence_length = None
    return agent(
        arguments.pop("env", None) or scripted(*LENGTHS),
        policy,
        policy_kwargs=policy_kwargs,
        n_steps=STEPS,
        sequence_length=sequence_length,
        **{"learning_rate": 0.02, **arguments},
    )


class Edges(BaseCallback):
    """Copies what the agent remembers when a rollout begins."""

    def __init__(self):
        super().__init__()
        self.states = []

    def _on_rollout_start(self):
        self.states.append(copied(self.model.state))

    def _on_step(self):
        return True


def copied(state):
    return PolicyState(*(tuple(part.clone() for part in parts) for parts in state))


@torch.no_grad()
def stepped(policy, observations, state):
    """The oracle: one step after the other, with nothing but the cores' own step and zeros where episodes start.

    Returns:
        Parameters, predictions and, before every step, the state; then the state after the last.
    """
    parameters, predictions, states = [], [], []
    for observation in observations:
        young = observation[:, 1] == 0
        state = copied(state)
        for part in state.actor + state.critic:
            part[:, young] = 0
        states.append(state)
        memory, actor = policy.actor_core.step(observation, state.actor)
        critic_memory, critic = memory, ()
        if policy.critic_core is not None:
            critic_memory, critic = policy.critic_core.step(observation, state.critic)
        parameters.append(policy.action_head(policy.actor_network(memory)))
        predictions.append([critic.head(critic.network(critic_memory)) for critic in policy.critics])
        state = PolicyState(actor, critic)
    each_critic = tuple(torch.stack(p) for p in zip(*predictions, strict=True))
    return torch.stack(parameters), each_critic, states, state


def all_close(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def minibatches(model, static_shapes, batch_size=STEPS):
    """Those that an epoch over the rollout would have."""
    rollout = model._rollout
    log_probs = model.policy.distribution.log_prob(rollout.parameters, rollout.actions)
    chunks = -(-rollout.steps // rollout.chunk) * rollout.envs
    return rollout.minibatches(
        log_probs,
        log_probs,
        log_probs,
        batch_size // rollout.chunk,
        [torch.randperm(chunks)],
        with_predictions=True,
        static_shapes=static_shapes,
    )


@memories
@pytest.mark.parametrize("sequence_length", [1, 3, 4, 5, STEPS])
def test_training_recomputes_what_the_rollout_said(memory, sequence_length):
    model = rememberer(memory, sequence_length)
    compared = 0

    @torch.no_grad()
    def compare(model):
        nonlocal compared
        for static_shapes in (False, True):
            for batch in minibatches(model, static_shapes):
                assert (batch.keep is not None) == static_shapes
                parameters, predictions = model.policy.evaluate(
                    batch.observations, batch.state, batch.segments, batch.keep
                )
                counts = torch.ones_like(batch.log_probs) if batch.valid is None else batch.valid
                log_probs = model.policy.distribution.log_prob(parameters, batch.actions)
                torch.testing.assert_close(log_probs * counts, batch.log_probs * counts, atol=1e-5, rtol=0)
                counted = counts.unsqueeze(-1)
                all_close([p * counted for p in predictions], [p * counted for p in batch.predictions])
                compared += int(counts.sum())

    learn(model, 3, before=compare)
    assert compared == 3 * 2 * STEPS * len(LENGTHS)


@pytest.mark.parametrize("call_costs", [0, 10**9], ids=["cut", "padded"])
def test_it_does_so_padded_and_unpadded(monkeypatch, call_costs):
    monkeypatch.setattr(segments, "_CALL", call_costs)
    model = rememberer("lstm", STEPS)

    @torch.no_grad()
    def compare(model):
        (batch,) = minibatches(model, False, batch_size=STEPS * len(LENGTHS))
        assert (len(batch.segments.slabs) > 1) == (call_costs == 0)
        parameters, predictions = model.policy.evaluate(batch.observations, batch.state, batch.segments)
        all_close((parameters, *predictions), (batch.parameters, *batch.predictions))

    learn(model, 2, before=compare)


def test_it_does_so_for_continuous_actions():
    model = rememberer("lstm", env=scripted(*LENGTHS, action_space=spaces.Box(-1, 1, (2,), np.float32)))

    @torch.no_grad()
    def compare(model):
        for batch in minibatches(model, False):
            parameters, _ = model.policy.evaluate(batch.observations, batch.state, batch.segments)
            log_probs = model.policy.distribution.log_prob(parameters, batch.actions)
            torch.testing.assert_close(log_probs, batch.log_probs, atol=1e-5, rtol=0)

    learn(model, 2, before=compare)


@memories
def test_rollouts_say_what_stepping_from_the_last_one_says(memory):
    """Finished environments start from nothing, their neighbours go on, and rollouts go on from each other."""
    model, edges, ends = rememberer(memory), Edges(), []

    def compare(model):
        rollout, before = model._rollout, edges.states[-1]
        parameters, predictions, states, end = stepped(model.policy, rollout.observations, before)
        all_close((parameters, *predictions), (rollout.parameters, *rollout.predictions))
        for chunk, stored in enumerate(range(0, STEPS, rollout.chunk)):
            for rooms, parts in zip(rollout.states, states[stored], strict=True):
                all_close([room[chunk] for room in rooms], parts)
        all_close(model.state.actor + model.state.critic, end.actor + end.critic)
        ends.append(end)

    learn(model, 3, before=compare, callback=edges)
    assert all((part == 0).all() for part in edges.states[0].actor + edges.states[0].critic)
    for end, begin in zip(ends[:-1], edges.states[1:], strict=True):
        all_close(end.actor + end.critic, begin.actor + begin.critic)
    if memory != "none":
        # The last environment never ends an episode in these rollouts: it remembers, and the test sees it.
        assert all((part[:, -1] != 0).all() for part in edges.states[1].actor)


def test_what_is_stored_is_from_before_the_step_and_reset_for_finished_environments_alone():
    model = rememberer("lstm", sequence_length=1)

    def compare(model):
        hidden = model._rollout.states.actor[0][:, 0]  # [T, N, units]
        starts = torch.from_numpy(model._rollout.starts)
        assert (hidden[0] == 0).all()
        assert torch.equal((hidden == 0).all(-1), starts)
        assert torch.equal(starts, model._rollout.observations[..., 1] == 0)
        assert starts.sum() > 10

    learn(model, before=compare)


@pytest.mark.parametrize("sequence_length", [1, 4, STEPS])
def test_states_are_kept_at_the_start_of_chunks_only(sequence_length):
    model = rememberer("lstm-two-layers", sequence_length)
    learn(model)
    parts = model._rollout.states.actor + model._rollout.states.critic
    assert len(parts) == 4
    assert {part.shape for part in parts} == {(STEPS // sequence_length, 2, len(LENGTHS), 6)}


class TestForgetting:
    def after_a_rollout(self):
        model = rememberer("lstm", env=scripted([99], [99]))
        learn(model)
        return model

    def first_states(self, model):
        edges = Edges()
        learn(model, callback=edges, reset_num_timesteps=False)
        return edges.states[0].actor + edges.states[0].critic, model._rollout.states

    def test_learning_goes_on_with_what_is_remembered(self):
        model = self.after_a_rollout()
        end = copied(model.state)
        begin, stored = self.first_states(model)
        assert all((part != 0).any() for part in begin)
        all_close(begin, end.actor + end.critic)
        all_close([part[0] for part in stored.actor + stored.critic], begin)

    def test_unless_it_is_reset(self):
        model = self.after_a_rollout()
        model.reset_lstm_states_to_initial()
        begin, stored = self.first_states(model)
        assert all((part == 0).all() for part in begin)
        assert all((part[0] == 0).all() for part in stored.actor + stored.critic)
        # Once is enough: later rollouts remember.
        begin, _ = self.first_states(model)
        assert all((part != 0).any() for part in begin)

    def test_a_fresh_start_forgets(self):
        model, edges = self.after_a_rollout(), Edges()
        learn(model, callback=edges)
        assert all((part == 0).all() for part in edges.states[0].actor + edges.states[0].critic)


class TestMetrics:
    @pytest.mark.parametrize("memory", ["lstm-two-layers", "gru-two-layers", "gru"])
    def test_are_those_of_the_hidden_states(self, memory):
        model = rememberer(memory)
        (log,) = learn(model)
        logged = {name: value for name, value in log.items() if name.startswith("lstm/")}
        expected = {}
        for name, parts in (("actor", model.state.actor), ("critic", model.state.critic)):
            for layer, hidden in enumerate(parts[0].numpy().astype(np.float64)):
                prefix = f"lstm/{name}_hidden_layer{layer}"
                expected[f"{prefix}_norm"] = np.mean([np.sqrt((row**2).sum()) for row in hidden])
                expected[f"{prefix}_mean"] = hidden.sum() / hidden.size
                expected[f"{prefix}_std"] = np.sqrt(((hidden - hidden.mean()) ** 2).sum() / hidden.size)
        assert logged == pytest.approx(expected, abs=1e-6)
        assert len(logged) == (12 if "two" in memory else 6)

    def test_there_is_none_without_memory(self):
        (log,) = learn(rememberer("none"))
        assert not any(name.startswith("lstm/") for name in log)


@pytest.mark.parametrize("sequence_length", [1, 3, 4, STEPS])
def test_minibatches_hold_every_sample_once_and_whole_sequences(monkeypatch, sequence_length):
    """With rewards of ``step * 10 + index`` and no future, every number of a sample tells which it is."""
    spy = StepSpy(monkeypatch)
    envs, epochs = len(LENGTHS), 3
    model = rememberer(
        "lstm", sequence_length, n_epochs=epochs, batch_size=12, gamma=0.0, normalize_advantage=False, learning_rate=0.0
    )
    rollouts = []

    def keep(model):
        rollout = model._rollout
        predicted = torch.minimum(*(p.mean(-1) for p in rollout.predictions))
        rollouts.append({"starts": rollout.starts.copy(), "actions": rollout.actions.clone(), "values": predicted})
        rollouts[-1]["states"] = [part.clone() for part in rollout.states.actor + rollout.states.critic]

    learn(model, before=keep)
    (rollout,) = rollouts
    scale = model.return_scale.snapshot
    seen = []
    for batch in spy.batches:
        numbers = identities(batch.observations)
        assert numbers.shape == (sequence_length, 12 // sequence_length)
        step, env = numbers // 10, numbers % 10
        assert (step[0] % sequence_length == 0).all()
        assert torch.equal(step, step[0] + torch.arange(sequence_length).unsqueeze(1).expand_as(step))
        assert (env == env[0]).all()
        assert torch.equal(batch.actions, rollout["actions"][step, env])
        # The scale was 0 and 1 in the rollout.
        torch.testing.assert_close(
            batch.advantages, numbers - rollout["values"][step, env], atol=1e-4, rtol=0, check_dtype=False
        )
        torch.testing.assert_close(
            batch.targets * scale.std + scale.mean, numbers.float(), atol=1e-3, rtol=0, check_dtype=False
        )
        for part, stored in zip(batch.state.actor + batch.state.critic, rollout["states"], strict=True):
            assert torch.equal(part[0], stored[step[0] // sequence_length, 0, env[0]])
        seen.append(numbers.flatten())
    everything = sorted(t * 10 + n for t in range(STEPS) for n in range(envs))
    per_epoch = len(spy.batches) // epochs
    orders = [torch.cat(seen[i * per_epoch : (i + 1) * per_epoch]).tolist() for i in range(epochs)]
    assert all(sorted(order) == everything for order in orders)
    assert orders[0] != orders[1] != orders[2]


class TestJunk:
    """A vector environment that resets in the step after an episode makes transitions that are none."""

    def model(self, **arguments):
        env = GymnasiumVecEnv(gymnasium.make_vec("CartPole-v1", num_envs=4))
        return agent(
            env,
            "MlpLstmPolicy",
            n_steps=96,
            sequence_length=8,
            batch_size=64,
            n_epochs=2,
            variance_gradient_scaling=True,
            **{"learning_rate": 0.01, **arguments},
        )

    def test_is_not_valid(self):
        model, checked = self.model(), []

        def check(model):
            rollout = model._rollout
            # What a terminated episode leaves behind, seen as an observation, tells that the step from there is none.
            position, _, angle, _ = rollout.observations.numpy().transpose(2, 0, 1)
            over = (np.abs(position) > 2.4) | (np.abs(angle) > 12 * np.pi / 180)
            assert np.array_equal(rollout.valid, ~over)
            assert (rollout.rewards[over] == 0).all()
            assert (rollout.rewards[~over] == 1).all()
            # It is an episode of its own: nothing is remembered into it, or out of it.
            assert rollout.starts[over].all()
            after = np.roll(over, 1, axis=0)
            after[0] = False
            assert rollout.starts[after].all()
            checked.append(over.sum())

        learn(model, 2, before=check)
        assert min(checked) > 2

    def test_has_no_weight_in_anything(self, monkeypatch):
        """Whatever is said of it, the same is learned."""
        spy = StepSpy(monkeypatch)

        def trained(spoil):
            model = self.model(clip_range_vf=0.2, target_kl=0.5, kl_penalty={"init_coef": 1.0}, ent_coef=0.01)
            logs = learn(model, 2, before=spoil)
            return weights(model), model.return_scale.value, logs, model

        def spoil(model):
            rollout = model._rollout
            junk = ~rollout.valid
            assert junk.sum() > 2
            rollout.rewards[junk] = 1e6
            for part in (rollout.parameters, *rollout.predictions):
                part[torch.from_numpy(junk)] += 3
            rollout.actions[torch.from_numpy(junk)] ^= 1

        plain, plain_scale, plain_logs, _ = trained(None)
        count = len(spy.batches)
        spoiled, spoiled_scale, spoiled_logs, _ = trained(spoil)
        assert all(batch.valid is not None for batch in spy.batches)
        assert len(spy.batches) == 2 * count
        torch.testing.assert_close(spoiled, plain, atol=1e-6, rtol=0)
        assert spoiled_scale == plain_scale
        for one, other in zip(spoiled_logs, plain_logs, strict=True):
            assert one == pytest.approx(other, abs=1e-5)

    def test_spoiling_a_real_transition_would_be_noticed(self):
        def spoil(model):
            model._rollout.rewards[3, 0] += 1

        results = []
        for function in (None, spoil):
            model = self.model()
            learn(model, before=function)
            results.append(weights(model))
        assert not torch.allclose(*results, atol=1e-6)
