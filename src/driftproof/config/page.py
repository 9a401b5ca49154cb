"""The page of documentation about configurations: ``python -m driftproof.config.page > docs/configuration.md``."""

from __future__ import annotations

from typing import Any

from driftproof.config import earlier, keys
from driftproof.config.files import plain_yaml
from driftproof.config.model import Config
from driftproof.config.reference import doc, options, plain
from driftproof.config.sections import FromTo, HyperparamSection, KLPenaltySection

_INTRODUCTION = """\
# Configuration

A run is made by one YAML file. Whatever is not in it is at its default; what is on the command line goes before what
is in the file:

```
driftproof config > my.yaml                     # all settings with their defaults and what they do
driftproof config my.yaml                       # are they right? The agent and its environment are built
driftproof config --schema > driftproof.json    # for editors
driftproof train my.yaml --set ppo.learning_rate=1e-4 --set env.n_envs=8
```

A key that does not exist is an error that names the nearest one, with file and line. So is a setting that would have no
effect, and so are numbers that do not fit together. An editor with the YAML language server completes and checks what
you type if the file begins with

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

**Short forms.** `env: CartPole-v1` is `env: {id: CartPole-v1}`; so it is with `policy` and `optimizer` for their names,
and with `vgs` and `adversarial` for whether they are enabled.

**Without sections.** Names that are clear without their section may stand at the top of the file, as arguments of
`DistributionalPPO` and `PBTConfig` do: `learning_rate`, `population_size`, `vgs_beta` for `vgs.beta`; all of them are
[below](#names-without-a-section). A setting that is given twice, with two values, is an error.

**Settings without effect.** A setting that does nothing beside the others is refused with what it needs:
`optimizer.kwargs.noise_beta` without an averaged noise reference, `critic.v_min` with quantiles, anything in `vgs` or
`adversarial` while they are switched off, and the same as a searched hyper-parameter of a population. To switch a
section off for one run, use `--set vgs=false`: what the file says of it is then left aside.

**Numbers** may be written `1e-4` and `1_000_000`.

**Code.** Environments (`module:Id`), features extractors and optimizers (`module:Class`) of your own are imported when
an agent is built, if you trust the module: `driftproof train my.yaml --trust my_env`, or `load("my.yaml",
trusted=["my_env"])`. What you give with `--env` and `--set` is trusted, and so are runs that you started. See
[security](security.md).
"""


_EARLIER = """\
## Coming from the earlier system's configuration

`driftproof config OLD.yaml --migrate > new.yaml` converts a file with the sections `model:` and `training:`, such as
`config_pbt_adversarial.yaml`. What means the same keeps its value. Everything else is named in comments at the top of
the new file, each with the reason and what to use instead; from Python, it is `driftproof.config.migrate(text)`. Name
the environment in `env.id`, since that of the earlier system is not part of this one. Sections and names of the earlier
system in any other file are errors with a hint.

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
