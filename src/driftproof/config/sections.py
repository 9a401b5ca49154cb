"""Sections of a configuration, made from the definitions in :mod:`driftproof.settings`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    create_model,
)

from driftproof.settings.adversarial import AdversarialSettings, PerturbationConfig
from driftproof.settings.agent import AgentSettings, KLPenaltySettings
from driftproof.settings.definition import Setting, alternatives, settings_of
from driftproof.settings.policy import PolicySettings, Widths
from driftproof.settings.population import HyperparamConfig, PBTConfig
from driftproof.settings.run import BackendSettings, EnvSettings, OptimizerSettings, RunSettings, Switch
from driftproof.settings.scaling import VGSSettings
from driftproof.settings.schedules import Schedule

_DEFINITIONS: dict[str, tuple[type[Any], ...]] = {
    "run": (RunSettings,),
    "env": (EnvSettings,),
    "policy": (PolicySettings,),
    "ppo": (AgentSettings,),
    "optimizer": (OptimizerSettings,),
    "vgs": (VGSSettings,),
    "adversarial": (Switch, AdversarialSettings),
    "pbt": (PBTConfig, BackendSettings),
}
"""Definitions by the section that their settings belong to, unless a setting names another."""
_SIGNS = {"at_least": "ge", "above": "gt", "below": "lt", "at_most": "le"}
_PLAIN_WORDS = {"None": "null", "True": "true", "False": "false"}

Plain: TypeAlias = dict[str, JsonValue]
"""Arguments by name, of plain values."""


class Section(BaseModel):
    """A group of settings: immutable, unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class FromTo(Section):
    """A number that changes over training."""

    kind: Literal["linear", "cosine"] = Field(description="Linear, or half a cosine wave (slow at both ends).")
    start: float = Field(ge=0, description="Value at the beginning of training.")
    end: float = Field(0.0, ge=0, description="Value at the end of training.")


def place_of(definition: type[Any], each: Setting) -> tuple[str, str]:
    """Section and key of a setting in configurations."""
    home = next(name for name, kinds in _DEFINITIONS.items() if definition in kinds)
    return each.about.section or home, each.about.key or each.name


def settings_in(section: str) -> dict[str, Setting]:
    """Settings of a section by their keys."""
    found = {}
    for definition in dict.fromkeys(kind for kinds in _DEFINITIONS.values() for kind in kinds):
        for each in settings_of(definition).values():
            place, key = place_of(definition, each)
            if each.about.in_files and place == section:
                found[key] = each
    # The setting that the section's short form sets comes first.
    return dict(sorted(found.items(), key=lambda item: item[1].about.key is None))


def section(name: str, kind: str, doc: str) -> type[Section]:
    """Create the model of a section."""
    return _model(kind, doc, settings_in(name))


def _model(kind: str, doc: str, settings: Mapping[str, Setting]) -> type[Section]:
    fields: dict[str, Any] = {key: (_form(each), _field(each)) for key, each in settings.items()}
    return create_model(kind, __base__=Section, __module__=__name__, __doc__=doc, **fields)


def _of_dataclass(kind: str, definition: type[Any]) -> type[Section]:
    settings = {name: each for name, each in settings_of(definition).items() if each.about.in_files}
    return _model(kind, " ".join((definition.__doc__ or "").split("\n\n")[0].split()), settings)


def _field(each: Setting) -> Any:
    more: dict[str, Any] = {"json_schema_extra": {"pattern": each.about.pattern}} if each.about.pattern else {}
    default = _default(each)
    if isinstance(default, list | dict) or type(default) in _NESTED:
        return Field(default_factory=lambda: _copied(default, each), description=_description(each), **more)
    return Field(... if default is dataclasses.MISSING else default, description=_description(each), **more)


def _copied(default: Any, each: Setting) -> Any:
    """A copy of a mutable default."""
    if type(default) in _NESTED:
        return _NESTED[type(default)]()
    kind = next(iter(get_args(each.about.form)), None)
    return [_NESTED[kind](**item) for item in default] if kind in _NESTED else type(default)(default)


def _default(each: Setting) -> Any:
    if each.has_file_default:
        return each.about.file_default
    if each.default is None and _is_mapping(alternatives(each.type)[0]) and each.about.form is None:
        return {}
    return each.default


def _description(each: Setting) -> str:
    text = re.sub(r"(\w)=(?=[-\w])", r"\1: ", each.about.doc)
    if type(None) not in _kinds(each):
        text = re.sub(r" None: .*", "", text)
    return re.sub(r"\b(None|True|False)\b", lambda found: _PLAIN_WORDS[found[0]], text)


def _kinds(each: Setting) -> list[Any]:
    kinds = list(alternatives(each.type if each.about.form is None else each.about.form))
    if each.default is None and _default(each) is not None and type(None) in kinds:
        kinds.remove(type(None))  # Configurations state the effective value.
    return kinds


def _form(each: Setting) -> Any:
    """The type of a setting in configurations."""
    kinds = _kinds(each)
    parts = [_part(kind, each) for kind in kinds if kind is not type(None)]
    form = parts[0] if len(parts) == 1 else _either(parts)
    if each.about.check is not None:
        form = Annotated[form, AfterValidator(each.about.check)]
    return form | None if type(None) in kinds else form


def _part(kind: Any, each: Setting) -> Any:
    bounds: dict[str, Any] = {_SIGNS[name]: bound for name, bound in each.bounds.items()}
    if kind is int:
        limits: dict[str, Any] = {"le": 2**53} | {sign: int(bound) for sign, bound in bounds.items()}
        return Annotated[int, BeforeValidator(_whole), Field(**limits)]
    if kind is float:
        return Annotated[float, Field(**bounds)]
    if kind is str:
        return Annotated[str, Field(min_length=1)]
    if kind is Schedule:
        return FromTo
    if kind in _NESTED:
        return _NESTED[kind]
    if _is_mapping(kind):
        return Plain
    if get_origin(kind) is list:
        return list[_part(get_args(kind)[0], each)]  # type: ignore[misc]
    return kind


def _either(parts: Sequence[Any]) -> Any:
    """A union of plain values and sections, distinguished by their form, so that errors refer to the intended one."""
    tagged = [Annotated[part, Tag("section" if _is_section(part) else "plain")] for part in parts]
    return Annotated[Union[tuple(tagged)], Discriminator(_tag)]  # noqa: UP007


def _tag(value: Any) -> str:
    return "section" if isinstance(value, Mapping | BaseModel) else "plain"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _whole(value: Any) -> Any:
    """``1e6`` as an int, although YAML parses it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_NESTED: dict[Any, type[Section]] = {}
_NESTED[Widths] = WidthsSection = _of_dataclass("WidthsSection", Widths)
_NESTED[KLPenaltySettings] = KLPenaltySection = _of_dataclass("KLPenaltySection", KLPenaltySettings)
_NESTED[PerturbationConfig] = PerturbationSection = _of_dataclass("PerturbationSection", PerturbationConfig)
_NESTED[HyperparamConfig] = HyperparamSection = _of_dataclass("HyperparamSection", HyperparamConfig)


if TYPE_CHECKING:
    # Sections are created at run time, so that type checkers do not know their settings.
    RunSection: TypeAlias = Section
    EnvSection: TypeAlias = Section
    PolicySection: TypeAlias = Section
    CriticSection: TypeAlias = Section
    PPOSection: TypeAlias = Section
    OptimizerSection: TypeAlias = Section
    VGSSection: TypeAlias = Section
    DriftSection: TypeAlias = Section
    AdversarialSection: TypeAlias = Section
    PBTSection: TypeAlias = Section
else:
    RunSection = section("run", "RunSection", "Length of training, seed, device, and where the run is saved.")
    EnvSection = section("env", "EnvSection", "The environment.")
    PolicySection = section("policy", "PolicySection", "The policy's networks and recurrent core.")
    CriticSection = section("critic", "CriticSection", "The critics: value head, twin critics, scale of returns.")
    PPOSection = section("ppo", "PPOSection", "PPO: rollouts, losses, and how parameters are updated.")
    OptimizerSection = section("optimizer", "OptimizerSection", "The optimizer and its arguments.")
    VGSSection = section(
        "vgs", "VGSSection", "Variance gradient scaling: smaller steps while gradients are mostly noise."
    )
    DriftSection = section("drift", "DriftSection", "Parts that keep the agent learning when its world changes.")
    AdversarialSection = section(
        "adversarial", "AdversarialSection", "Adversarial training against perturbed observations (SA-PPO)."
    )
    PBTSection = section("pbt", "PBTSection", "The population that `driftproof tune` trains.")
