"""The commented YAML, the schema for editors, and the page of documentation."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from driftproof.config import Config, commented_yaml, json_schema, loads
from driftproof.config.page import page

ROOT = Path(__file__).parents[2]


def test_the_commented_defaults_are_the_defaults():
    text = commented_yaml()
    assert loads(text) == Config()
    assert text.count("#") > 100
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize(
    "text",
    [
        commented_yaml(),
        "env: CartPole-v1\nvgs_beta: 0.9\noptimizer_class: adam\npopulation_size: 4\nadversarial: true",
        "ppo: {learning_rate: {kind: linear, start: 0.001}, kl_penalty: true, target_kl: 0.1, clip_range_vf: null}",
        "policy: {net_arch: {pi: [1], vf: [2]}}\npbt: {hyperparams: [{name: gamma, values: [0.9, 0.99]}]}",
        *((ROOT / "configs").glob("*.yaml")),
    ],
    ids=lambda text: text.stem if isinstance(text, Path) else text[:20],
)
def test_editors_take_what_is_right(text):
    text = text.read_text() if isinstance(text, Path) else text
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(loads(text).model_dump(), schema)
    # As PyYAML has it, 1e-4 is a text; editors follow YAML 1.2.
    if "e-" not in text:
        jsonschema.validate(yaml.safe_load(text), schema)


@pytest.mark.parametrize("text", ["ppo: {gama: 1}", "ppo: {gamma: 2}", "gama: 1", "policy: {name: Foo}", "vgs_beta: 2"])
def test_editors_refuse_what_is_wrong(text):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), json_schema())


def test_the_page_is_current():
    found = (ROOT / "docs" / "configuration.md").read_text()
    assert found == page(), "run: python -m driftproof.config.page > docs/configuration.md"
