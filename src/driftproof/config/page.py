"""Generates the documentation of configurations: ``python -m driftproof.config.page > docs/configuration.md``."""

from __future__ import annotations

from typing import Any

from driftproof.config import earlier, keys
from driftproof.config.files import plain_yaml
from driftproof.config.model import Config
from driftproof.config.reference import doc, options, plain
from driftproof.config.sections import FromTo, HyperparamSection, KLPenaltySection

_INTRODUCTION = """\
# Configuration

A run is described by one YAML file. Settings that are not in it have their defaults; settings on the command line
override those in the file:

```
driftproof config > my.yaml                     # all settings with their defaults and descriptions
driftproof config my.yaml                       # check a file, by building the agent and its environment
driftproof config --schema > driftproof.json    # for editors
driftproof train my.yaml --set ppo.learning_rate=1e-4 --set env.n_envs=8
```

An unknown key is an error, with file, line and the most similar known key. So are settings that would have no effect,
and settings that contradict each other. An editor with the YAML language server completes and checks what you type if
the file begins with

```yaml
# yaml-language-server: $schema=driftproof.json
```

From Python:

```python
from driftproof.config import Config, build_agent, dumps, loads

config = loads("env: CartPole-v1", ["ppo.n_steps=128", "env.n_envs=2"])
assert config == Config(env={"id": "CartPole-v1", "n_envs": 2}, ppo={"n_steps": 128})
assert loads(dumps(config)) == config
agent = build_agent(config)
```

**Short forms.** `env: CartPole-v1` is short for `env: {id: CartPole-v1}`. Likewise a single value of `policy` and
`optimizer` is their `name`, and of `vgs` and `adversarial` whether they are `enabled`.

**Without sections.** Unambiguous names also work without their section, at the top level of the file, as in the
arguments of `DistributionalPPO` and `PBTConfig`: `learning_rate`, `population_size`, `vgs_beta` for `vgs.beta`; see the
[list](#names-without-a-section) below. A setting that is given twice, with different values, is an error.

**Settings without effect.** A setting that has no effect because of others is refused with what it needs:
`optimizer.kwargs.noise_beta` without an averaged noise reference, `critic.v_min` with quantiles, anything in `vgs` or
`adversarial` while they are switched off, and the same for searched hyper-parameters of a population. To switch a
section off for one run, use `--set vgs=false`: the file's other settings of that section are then ignored. So are its
settings of another backend (`workers` of processes, `address` of Ray) with `--set pbt.backend=ray`, with a warning.

**Numbers** may be written `1e-4` and `1_000_000`.

**Code.** Environments (`module:Id`), features extractors and optimizers (`module:Class`) of your own are imported when
an agent is built, if you trust the module: `driftproof train my.yaml --trust my_env`, or `load("my.yaml",
trusted=["my_env"])`. What you give with `--env` and `--set` is trusted, and so are runs that you started. See
[security](security.md).
"""


_EARLIER = """\
## Coming from the earlier system's configuration

`driftproof config OLD.yaml --migrate > new.yaml` converts a file with the sections `model:` and `training:`, such as
`config_pbt_adversarial.yaml`. Settings with the same meaning keep their values. All others are listed in comments at
the top of the new file, with the reason and what to use instead; from Python, use `driftproof.config.migrate(text)`.
Set the environment in `env.id`, since that of the earlier system is not part of this library. Sections and names of the
earlier system in any other file are errors with a hint.

| earlier | today |
|---|---|
| `model.params.*` | the setting of the same name, as listed [above](#names-without-a-section) |
| `model.vgs.*`, `vgs_*`, `variance_gradient_scaling` | `vgs.*`, `vgs.enabled` |
| `model.optimizer_class`, `model.optimizer_kwargs` | `optimizer.name`, `optimizer.kwargs`; `lr`: `ppo.learning_rate` |
| `training.total_timesteps` | `run.total_timesteps` |
| `training.save_freq` | `run.checkpoint_every`, in updates |
| `num_atoms`, `v_min`, `v_max` | the same with `critic.value_head: categorical` |
| `kl_exceed_stop_fraction` | `ppo.kl_stop: fraction` with `ppo.kl_stop_fraction`, if there is a `ppo.target_kl` |
"""


def page() -> str:
    """The page, in Markdown."""
    lines = [_INTRODUCTION]
    for name, info in Config.model_fields.items():
        lines += _section(name, info.annotation, level=2)
    lines += _section("Items of `pbt.hyperparams`", HyperparamSection, level=3)
    lines += _section("Settings of `ppo.kl_penalty`", KLPenaltySection, level=3)
    lines += _section("Schedules", FromTo, level=3)
    lines += ["## Names without a section", "", "| | |", "|---|---|"]
    lines += [f"| `{name}` | `{keys.dotted(path)}` |" for name, path in sorted(keys.flat_keys().items())]
    lines += ["", _EARLIER.rstrip()]
    lines += [f"| `{name}` | `{place}` |" for name, place in earlier.RENAMED.items()]
    lines += [f"| `{name}` in `pbt.hyperparams` | `{place}` |" for name, place in earlier.SEARCHED.items()]
    lines += ["", "Without an equivalent:", "", "| earlier | |", "|---|---|"]
    lines += [f"| `{place.rpartition('.')[2]}` | {gone.reason} |" for place, gone in earlier.GONE.items()]
    return "\n".join(lines) + "\n"


def _section(title: str, model: Any, level: int) -> list[str]:
    head = f"{'#' * level} `{title}`" if level == 2 else f"{'#' * level} {title}"
    lines = [head, "", doc(model), "", "| setting | default | |", "|---|---|---|"]
    inner = []
    for name, info in model.model_fields.items():
        if keys.is_section(info.annotation):
            inner.append((f"`{title}.{name}`", info.annotation))
            continue
        default = "" if info.is_required() else f"`{_default(info.get_default(call_default_factory=True))}`"
        text = f"{info.description} {options(info.annotation)}".strip()
        lines.append(f"| `{name}` | {default} | {text.replace('|', chr(92) + '|')} |")
    lines.append("")
    for name, part in inner:
        lines += _section(name, part, level + 1)
    return lines


def _default(value: Any) -> str:
    return plain_yaml(plain(value))


if __name__ == "__main__":
    print(page(), end="")
