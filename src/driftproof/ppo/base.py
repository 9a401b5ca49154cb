"""The shell around learner and worker: Stable-Baselines3's base class, with its environments, callbacks and logger."""

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
    """An attribute that Stable-Baselines3 keeps on the agent, and that a part of the agent owns."""

    def __init__(self, part: str, name: str) -> None:
        self.part, self.name = part, name

    def __get__(self, agent: Any, owner: type | None = None) -> Any:
        return self if agent is None else getattr(agent.__dict__[self.part], self.name)

    def __set__(self, agent: Any, value: Any) -> None:
        setattr(agent.__dict__[self.part], self.name, value)


class AgentBase(BaseAlgorithm):
    """Trains a :class:`Learner` with what a :class:`Worker` collects, in the ways of Stable-Baselines3."""

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
    """Training returns after the update that reaches this step, its plan kept; :meth:`resume` goes on with it."""
    _is_built = False
    """Whether there are networks."""
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
        """Scales gradients, or steps."""
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
        """Ends updates early."""
        return self.learner.kl_stop

    @property
    def kl_penalty(self) -> KLPenalty | None:
        """Controls the weight of the KL divergence in the loss."""
        return self.learner.kl_penalty

    @property
    def adversary(self) -> Adversary | None:
        """Attacks observations while the agent learns."""
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
                f"sequence_length={self.sequence_length} is for recurrent policies; "
                f"{type(self.policy).__name__} is none"
            )
        return cut(self.n_steps, self.n_envs, self.batch_size, self.sequence_length, self.policy.is_recurrent)

    @property
    def optimizer_steps_per_update(self) -> int:
        """Minibatches of all epochs of an update."""
        return int(self.hyperparams["n_epochs"]) * self.batches.per_epoch

    @property
    def lr_schedule(self) -> Schedule:
        """The learning rate as a function of the remaining progress; another one may be set."""
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
            _say_once(
                "VecNormalize scales rewards, which is not needed here: the agent keeps a running scale of returns and "
                "follows that of the wrapper; norm_reward=False shows values in units of rewards"
            )
        return wrapped

    def wrapped(self, env: GymEnv | str, verbose: int = 0) -> VecEnv:
        """An environment as the agent needs it: a VecEnv that normalises observations if the agent's are normalised.

        Args:
            env: The environment, or its id.
            verbose: 1: say what it is wrapped in.
        """
        return self.normalizer.wrapped(self._wrap_env(gymnasium.make(env) if isinstance(env, str) else env, verbose))

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Train in another environment from now on.

        Args:
            env: The environment, with the same spaces as before, and as many of them, if there was one.
            force_reset: Begin with new episodes; ``False``: it is where the last one was.
        """
        env = self.wrapped(env, self.verbose)
        if hasattr(self, "observation_space"):
            check_for_correct_spaces(env, self.observation_space, self.action_space)
        else:
            self.observation_space, self.action_space = env.observation_space, env.action_space
        if self.env is not None and env.num_envs != self.n_envs:
            raise ArgumentError(
                f"set_env() got {env.num_envs} environments for an agent with {self.n_envs}: rollouts and minibatches "
                "would have another size; save the agent and use load(path, env), which takes any number"
            )
        self.normalizer.attach(env)
        self.worker.reset_seed = None
        # Files may come from another number of environments: recurrent states and the room for rollouts belong to it.
        force_reset = force_reset or getattr(self, "n_envs", None) != env.num_envs
        self.n_envs = env.num_envs
        super().set_env(env, force_reset)
        self._rollout = None

    def _maybe_recommend_cpu(self) -> None:
        """Warn of small networks without recurrence on a GPU, by Stable-Baselines3's name."""
        if self.device.type == "cuda" and self.policy_class.__name__ == "MlpPolicy" and not self.cuda_graph:
            warnings.warn(
                "You are trying to run PPO on the GPU with MlpPolicy, whose small kernels are usually faster on the "
                "CPU: pass device='cpu', or cuda_graph=True to capture the optimizer step in a CUDA graph",
                stacklevel=4,
            )

    def reset_lstm_states_to_initial(self) -> None:
        """Forget the recurrent state of the running episodes, as if they began with the next step."""
        self.worker.reset_state()

    def learn(
        self: Self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str = "DistributionalPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train for at least this many steps of environments, in whole rollouts.

        Args:
            total_timesteps: Steps, all environments together.
            callback: Called at every step.
            log_interval: Updates between log entries; ``None``: none, callbacks may write them.
            tb_log_name: Name of the run.
            reset_num_timesteps: Count from zero, and reset environments; otherwise go on.
            progress_bar: Show one.
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
        """Train on to the total that the last :meth:`learn` planned, here or before the agent was saved.

        The arguments are those of :meth:`learn`.
        """
        if self._total_timesteps <= self.num_timesteps:
            raise ValueError(
                f"{self.num_timesteps} of {self._total_timesteps} planned steps are done: nothing is left to resume; "
                "use learn(total_timesteps, reset_num_timesteps=False) for more"
            )
        remaining = self._total_timesteps - self.num_timesteps
        return self.learn(remaining, callback, log_interval, tb_log_name, False, progress_bar)

    def add_log_output(self, output: KVWriter) -> None:
        """Log to this too, besides to where a logger that was set logs."""
        if self._custom_logger:
            self.logger.output_formats.append(output)
        else:
            self.set_logger(Logger(None, [output]))

    def dump_logs(self, iteration: int = 0) -> None:
        """Write what was logged up to now.

        Args:
            iteration: Rollouts of this training, to be logged too; 0: unknown.
        """
        OnPolicyAlgorithm.dump_logs(self, iteration)  # type: ignore[arg-type]

    @property
    def rollout_buffer(self) -> RolloutView:
        """The last rollout, by Stable-Baselines3's names."""
        return RolloutView(self._room(), self.learner, self.policy.distribution, self.update_settings)

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutView | None = None,
        n_rollout_steps: int | None = None,
    ) -> bool:
        """Act for one rollout, which :attr:`rollout_buffer` then shows.

        Args:
            env: The agent's environments.
            callback: Called at every step; :meth:`_setup_learn` makes one.
            rollout_buffer: Is not needed: rollouts have one place.
            n_rollout_steps: Is not needed either, it is ``n_steps``.

        Returns:
            Whether training goes on.
        """
        if n_rollout_steps not in (None, self.n_steps):
            raise ValueError(f"n_rollout_steps={n_rollout_steps}: rollouts have n_steps={self.n_steps} steps")
        try:
            callback.on_rollout_start()
            shown = {"self": self, "env": env, "callback": callback, "n_rollout_steps": self.n_steps}
            callback.update_locals({**shown, "rollout_buffer": self.rollout_buffer})
            if not collect(
                self.worker, self.learner, self._room(), callback, self.sde_sample_freq, self._update_info_buffer
            ):
                return False
            callback.on_rollout_end()
            return True
        except Exception as error:
            if failure_of_environment(error) is not None:
                # Whatever state the environments are in, the next rollout begins with new episodes.
                self._last_obs = None
            raise

    def _room(self) -> Rollout:
        """Room for rollouts, of the shape that settings and environments ask for."""
        shape = (self.n_steps, self.n_envs, self.batches.sequence_length)
        if self._rollout is None or self._rollout.shape != shape:
            self._rollout = Rollout(self.policy, *shape)
        return self._rollout

    def update_settings(self) -> UpdateSettings:
        """Settings and hyper-parameters in force."""
        names = UpdateSettings._fields
        numbers: dict[str, Any] = {n: self.hyperparams.current(n) for n in names if n in self.hyperparams}
        own = {name: getattr(self, name) for name in ("batch_size", "normalize_advantage", "skip_limit")}
        return UpdateSettings(**own, **numbers)

    def train(self) -> None:
        """One update: several epochs over the rollout."""
        assert self._rollout is not None
        hyperparams, progress, episodes = self.hyperparams, self._current_progress_remaining, self.ep_info_buffer
        hyperparams.advance(progress)
        mean_return = episode_mean(episodes)
        hyperparams.override("ent_coef", float(self.entropy.update(hyperparams["ent_coef"], progress, mean_return)))
        settings = self.update_settings()
        self._n_updates += settings.n_epochs
        metrics = self.learner.update(self._rollout, settings)
        metrics |= {f"train/{name}": hyperparams.current(name) for name in _LOGGED if name in hyperparams}
        for name, value in metrics.items():
            self.logger.record(name, value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")


def _say_once(text: str) -> None:
    """Warn once in a process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)
