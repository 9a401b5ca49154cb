"""What sections of a configuration are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, JsonValue, Tag


class Section(BaseModel):
    """Settings that belong together. Cannot be changed, and takes nothing that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


def _whole(value: Any) -> Any:
    """``1e6`` is a whole number, though YAML has it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count: TypeAlias = Annotated[int, BeforeValidator(_whole), Field(le=2**53)]
Size: TypeAlias = Annotated[int, BeforeValidator(_whole), Field(le=2**16)]
"""Of what takes memory or processes as soon as it is made: a slip, or a stranger's file, must not take all there is."""
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Plain: TypeAlias = dict[str, JsonValue]
"""Arguments by name, of plain values."""


class FromTo(Section):
    """A number that changes over training."""

    kind: Literal["linear", "cosine"] = Field(description="A straight line, or half a wave, slow at first and at last.")
    start: float = Field(ge=0, description="Value at the beginning of training.")
    end: float = Field(0.0, ge=0, description="Value at its end.")


def _form(value: Any) -> str:
    return "schedule" if isinstance(value, Mapping | FromTo) else "number"


def _scheduled(bound: Any) -> Any:
    return Annotated[Annotated[float, bound, Tag("number")] | Annotated[FromTo, Tag("schedule")], Discriminator(_form)]


NotNegativeOrSchedule: TypeAlias = _scheduled(Field(ge=0))  # type: ignore[valid-type]
PositiveOrSchedule: TypeAlias = _scheduled(Field(gt=0))  # type: ignore[valid-type]
