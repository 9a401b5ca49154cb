"""Base class of agents: Stable-Baselines3's environments, callbacks and logger around learner and worker."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
from gymnasium import Env
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.utils import check_for_correct_spaces
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch.optim import Optimizer

from driftproof._arguments import ArgumentError, check_count, check_number
from driftproof.learner.adversary import Adversary
from driftproof.learner.entropy import EntropySchedule
from driftproof.learner.hyperparams import Hyperparameters
from driftproof.learner.kl import KLPenalty, KLStop
from driftproof.learner.learner import Learner, UpdateSettings
from driftproof.learner.return_scale import ReturnScale
from driftproof.learner.rollout import Rollout, failure_of_environment
from driftproof.nn.policies import DistributionalPolicy
from driftproof.nn.types import PolicyState
from driftproof.optim import VarianceGradientScaler
from driftproof.ppo.collection import collect
from driftproof.ppo.counters import Counters
from driftproof.ppo.normalizer import Normalizer
from driftproof.ppo.sb3_views import RolloutView
from driftproof.ppo.spaces import check_spaces
from driftproof.ppo.vector_env import as_vec_env
from driftproof.ppo.worker import Worker
from driftproof.runs.ranking import episode_mean
from driftproof.settings.batches import Batches, cut
from driftproof.settings.schedules import Schedule

Self = TypeVar("Self", bound="AgentBase")

_LOGGED = ("learning_rate", "clip_range", "clip_range_vf", "ent_coef")
"""Hyper-parameters that are logged with every update."""
_said: set[str] = set()


class Forwarded:
    """An attribute of Stable-Baselines3's agents that is stored on a part of ours."""

    def __init__(self, part: str, name: str) -> None:
        self.part, self.name = part, name

    def __get__(self, agent: Any, owner: type | None = None) -> Any:
        return self if agent is None else getattr(agent.__dict__[self.part], self.name)

    def __set__(self, agent: Any, value: Any) -> None:
        setattr(agent.__dict__[self.part], self.name, value)

    def __delete__(self, agent: Any) -> None:
        # rl-zoo3 deletes env, to free it.
        setattr(agent.__dict__[self.part], self.name, None)


class AgentBase(BaseAlgorithm):
    """Trains a :class:`Learner` on rollouts of a :class:`Worker`, with the interface of Stable-Baselines3."""

    policy: DistributionalPolicy
    learner: Learner
    """Networks, optimizer and controllers, and the update."""
    worker: Worker
    """Environments, last observations and recurrent states."""
    counters: Counters
    normalizer: Normalizer
    hyperparams: Hyperparameters
    n_steps: int
    batch_size: int
    sequence_length: int | None
    cuda_graph: bool
    pause_at: int | None = None
    """Training returns after the update that reaches this step; :meth:`resume` continues to the planned total."""
    _is_built = False
    """Whether the networks were built."""
    _rollout: Rollout | None = None

    if not TYPE_CHECKING:  # The base class declares their types.
        env = Forwarded("worker", "env")
        _last_obs = Forwarded("worker", "observation")
        _last_episode_starts = Forwarded("worker", "starts")
        ep_info_buffer = Forwarded("worker", "episodes")
        ep_success_buffer = Forwarded("worker", "successes")
        num_timesteps = Forwarded("counters", "num_timesteps")
        _total_timesteps = Forwarded("counters", "total_timesteps")
        _n_updates = Forwarded("counters", "n_updates")
        _episode_num = Forwarded("counters", "episode_num")
        _current_progress_remaining = Forwarded("counters", "progress_remaining")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.counters, self.normalizer = Counters(), Normalizer()
        self.worker = Worker(self.counters, self.normalizer)
        super().__init__(*args, **kwargs)

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the policy's parameters."""
        return self.learner.optimizer

    @property
    def vgs(self) -> VarianceGradientScaler | None:
        """Variance gradient scaler."""
        return self.learner.vgs

    @property
    def return_scale(self) -> ReturnScale:
        """Running scale of returns."""
        return self.learner.return_scale

    @property
    def entropy(self) -> EntropySchedule:
        """Schedule of the entropy coefficient."""
        return self.learner.entropy

    @property
    def kl_stop(self) -> KLStop:
        """Stops updates early if the KL divergence is too large."""
        return self.learner.kl_stop

    @property
    def kl_penalty(self) -> KLPenalty | None:
        """Controller of the KL penalty's coefficient."""
        return self.learner.kl_penalty

    @property
    def adversary(self) -> Adversary | None:
        """Adversary that attacks observations during training."""
        return self.learner.adversary

    @property
    def state(self) -> PolicyState:
        """Recurrent states of the running episodes."""
        return self.worker.recurrent_state

    @state.setter
    def state(self, state: PolicyState) -> None:
        self.worker.state = state

    @property
    def batches(self) -> Batches:
        """How a rollout is cut into sequences and minibatches."""
        if not self.policy.is_recurrent and self.sequence_length not in (None, 1):
            raise ValueError(
                f"sequence_length={self.sequence_length} needs a recurrent policy; "
                f"{type(self.policy).__name__} is not recurrent"
            )
        return cut(self.n_steps, self.n_envs, self.batch_size, self.sequence_length, self.policy.is_recurrent)

    @property
    def optimizer_steps_per_update(self) -> int:
        """Number of minibatches in all epochs of an update."""
        return int(self.hyperparams["n_epochs"]) * self.batches.per_epoch

    @property
    def lr_schedule(self) -> Schedule:
        """The learning rate as a function of the remaining progress; can be set."""
        return partial(self.hyperparams.at, "learning_rate")

    @lr_schedule.setter
    def lr_schedule(self, schedule: Schedule) -> None:
        self.hyperparams.set_schedule("learning_rate", schedule)

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        env = as_vec_env(env) or env
        if isinstance(env, Env | VecEnv):
            check_spaces(env.observation_space, env.action_space)
        wrapped = BaseAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        normalizer = unwrap_vec_normalize(wrapped)
        if normalizer is not None and normalizer.norm_reward:
            _warn_once(
                "VecNormalize scales rewards, which is not needed here: the agent keeps a running scale of returns and "
                "follows that of the wrapper; norm_reward=False shows values in units of rewards"
            )
        return wrapped

    def wrapped(self, env: GymEnv | str, verbose: int = 0) -> VecEnv:
        """Wrap an environment in a VecEnv, and in ``VecNormalize`` if the agent's observations are normalised.

        Args:
            env: The environment, or its id.
            verbose: 1: print the wrappers.
        """
        return self.normalizer.wrapped(self._wrap_env(gymnasium.make(env) if isinstance(env, str) else env, verbose))

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Replace the environment.

        Args:
            env: Environment with the same spaces, and the same number of environments, as the previous one.
            force_reset: Start new episodes; ``False``: continue with the last observations.
        """
        env = self.wrapped(env, self.verbose)
        if hasattr(self, "observation_space"):
            check_for_correct_spaces(env, self.observation_space, self.action_space)
        else:
            self.observation_space, self.action_space = env.observation_space, env.action_space
        if self.env is not None and env.num_envs != self.n_envs:
            raise ArgumentError(
                f"set_env() got {env.num_envs} environments for an agent with {self.n_envs}, which would change the "
                "rollout size; save the agent and use load(path, env), which takes any number"
            )
        self.normalizer.attach(env)
        self.worker.reset_seed = None
        # A loaded file may be of another number of environments, on which recurrent states and rollouts depend.
        force_reset = force_reset or getattr(self, "n_envs", None) != env.num_envs
        self.n_envs = env.num_envs
        super().set_env(env, force_reset)
        self._rollout = None

    def _maybe_recommend_cpu(self) -> None:
        """Warn of small feed-forward networks on a GPU; overrides Stable-Baselines3's method."""
        if self.device.type == "cuda" and self.policy_class.__name__ == "MlpPolicy" and not self.cuda_graph:
            warnings.warn(
                "You are trying to run PPO on the GPU with MlpPolicy, whose small kernels are usually faster on the "
                "CPU: pass device='cpu', or cuda_graph=True to capture the optimizer step in a CUDA graph",
                stacklevel=4,
            )

    def reset_lstm_states_to_initial(self) -> None:
        """Reset the recurrent state of the running episodes."""
        self.worker.reset_state(is_collecting=self.worker.in_rollout)

    def learn(
        self: Self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str = "DistributionalPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train for at least this many environment steps, in whole rollouts.

        Args:
            total_timesteps: Steps, summed over all environments.
            callback: Called at every step.
            log_interval: Updates between log entries; ``None``: never, callbacks may write them.
            tb_log_name: Name of the run.
            reset_num_timesteps: Count steps from zero and reset environments; ``False``: continue.
            progress_bar: Show a progress bar.
        """
        if self.env is None:
            raise ValueError("there is no environment to learn from: call set_env(env) first")
        if not self._is_built:
            raise ValueError("there are no networks yet: call _setup_model() first")
        check_number("total_timesteps", total_timesteps, at_least=0)
        if log_interval is not None:
            check_count("log_interval", log_interval, at_least=1)
        if reset_num_timesteps or self._last_obs is None:
            self.worker.state = self.worker.reset_seed = None
        # The name that callbacks of Stable-Baselines3 look for.
        total_timesteps, callbacks = self._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
        )
        callbacks.on_training_start(locals(), globals())
        iteration = 0
        while self.num_timesteps < min(total_timesteps, self.pause_at or total_timesteps):
            if not self.collect_rollouts(self.env, callbacks):
                break
            iteration += 1
            self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
            if log_interval is not None and iteration % log_interval == 0:
                self.dump_logs(iteration)
            self.train()
            self.worker.in_rollout = False
        callbacks.on_training_end()
        return self

    def resume(
        self: Self,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str = "DistributionalPPO",
        progress_bar: bool = False,
    ) -> Self:
        """Continue training to the total of the last :meth:`learn`, also after the agent was saved and loaded.

        Takes the arguments of :meth:`learn`.
        """
        if self._total_timesteps <= self.num_timesteps:
            raise ValueError(
                f"{self.num_timesteps} of {self._total_timesteps} planned steps are done: nothing is left to resume; "
                "use learn(total_timesteps, reset_num_timesteps=False) for more"
            )
        remaining = self._total_timesteps - self.num_timesteps
        return self.learn(remaining, callback, log_interval, tb_log_name, False, progress_bar)

    def add_log_output(self, output: KVWriter) -> None:
        """Add an output to the logger."""
        if self._custom_logger:
            self.logger.output_formats.append(output)
        else:
            self.set_logger(Logger(None, [output]))

    def dump_logs(self, iteration: int = 0) -> None:
        """Write the recorded metrics.

        Args:
            iteration: Number of rollouts in this training, logged too; 0: unknown.
        """
        OnPolicyAlgorithm.dump_logs(self, iteration)  # type: ignore[arg-type]

    @property
    def rollout_buffer(self) -> RolloutView:
        """The last rollout, by Stable-Baselines3's names."""
        return RolloutView(self._storage(), self.learner, self.policy.distribution, self.update_settings)

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutView | None = None,
        n_rollout_steps: int | None = None,
    ) -> bool:
        """Collect one rollout; :attr:`rollout_buffer` then shows it.

        Args:
            env: The agent's environments.
            callback: Called at every step; :meth:`_setup_learn` makes one.
            rollout_buffer: Ignored.
            n_rollout_steps: ``None`` or ``n_steps``.

        Returns:
            Whether training continues.
        """
        if n_rollout_steps not in (None, self.n_steps):
            raise ValueError(f"n_rollout_steps={n_rollout_steps} must equal n_steps={self.n_steps}: leave it out")
        try:
            callback.on_rollout_start()
            shown = {"self": self, "env": env, "callback": callback, "n_rollout_steps": self.n_steps}
            callback.update_locals({**shown, "rollout_buffer": self.rollout_buffer})
            if not collect(
                self.worker, self.learner, self._storage(), callback, self.sde_sample_freq, self._update_info_buffer
            ):
                return False
            callback.on_rollout_end()
            return True
        except Exception as error:
            if failure_of_environment(error) is not None:
                # The environments may be in any state: start the next rollout with new episodes.
                self._last_obs = None
            raise

    def _storage(self) -> Rollout:
        """Storage for rollouts, reallocated when its shape changes."""
        shape = (self.n_steps, self.n_envs, self.batches.sequence_length)
        if self._rollout is None or self._rollout.shape != shape:
            self._rollout = Rollout(self.policy, *shape)
        return self._rollout

    def update_settings(self) -> UpdateSettings:
        """Settings and current hyper-parameters."""
        names = UpdateSettings._fields
        numbers: dict[str, Any] = {n: self.hyperparams.current(n) for n in names if n in self.hyperparams}
        own = {name: getattr(self, name) for name in ("batch_size", "normalize_advantage", "skip_limit")}
        return UpdateSettings(**own, **numbers)

    def train(self) -> None:
        """One update: several epochs over the rollout."""
        assert self._rollout is not None
        settings = self.begin_update()
        metrics = self.learner.update(self._rollout, settings)
        if self.learner.weights_were_replaced and self.policy.is_recurrent:
            self.worker.reset_state()
        self.end_update(metrics)

    def begin_update(self) -> UpdateSettings:
        """Apply schedules and controllers for this point of training; settings of the update."""
        hyperparams, progress, episodes = self.hyperparams, self._current_progress_remaining, self.ep_info_buffer
        hyperparams.advance(progress)
        mean_return = episode_mean(episodes)
        hyperparams.override("ent_coef", float(self.entropy.update(hyperparams["ent_coef"], progress, mean_return)))
        settings = self.update_settings()
        self._n_updates += settings.n_epochs
        return settings

    def end_update(self, metrics: dict[str, float]) -> None:
        """Record the metrics of an update."""
        hyperparams = self.hyperparams
        metrics |= {f"train/{name}": hyperparams.current(name) for name in _LOGGED if name in hyperparams}
        for name, value in metrics.items():
            self.logger.record(name, value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")


def _warn_once(text: str) -> None:
    """Warn once per process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)
