"""Whatever is in a run folder, a command given it ends with a clear line, and leaves the folder as it was."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys

import pytest
import yaml

from driftproof.state import read, write
from tests.cli import damage
from tests.cli.damage import Copies, command, content, problem, sample, wild_leaves
from tests.processes import ENVIRONMENT, ROOT

TINY = [
    *("--set", "env.n_envs=1", "--set", "ppo.n_steps=16", "--set", "ppo.batch_size=16", "--set", "ppo.n_epochs=1"),
    *("--set", "policy.name=MlpPolicy", "--set", "policy.net_arch=[4]", "--set", "vgs.warmup_steps=1"),
    *("--set", "run.evaluation_episodes=1", "--set", "run.threads=1"),
]
MARKET = ["--env", "driftproof/RegimeMarket-v0", "--set", "env.kwargs={episode_length: 20}"]
DRIFT = ["--set", "env.drift=[{kind: reward_scale, schedule: {kind: sudden, every: 9, values: [1, 2]}}]"]
POPULATION = ["--set", "pbt.population_size=2", "--set", "pbt.backend=inline", "--set", "pbt.perturbation_interval=1"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """An agent with two checkpoints and all that is measured of it, and a population."""
    runs = tmp_path_factory.mktemp("originals")
    where = ["--runs-dir", runs, "--name"]
    for arguments in (
        ["train", *MARKET, *TINY, "--set", "run.total_timesteps=32", *where, "single"],
        ["evaluate", runs / "single", "--attack", "random", "--epsilon", "0.1", "--episodes", "1"],
        [
            "evaluate",
            runs / "single",
            "--phases",
            *DRIFT,
            "--episodes",
            "1",
            "--output",
            runs / "single" / "phases.json",
        ],
        ["tune", "--env", "CartPole-v1", *TINY, *POPULATION, "--set", "run.total_timesteps=48", *where, "many"],
    ):
        code, _, errors, trace = command(*arguments)
        assert code == 0, errors + trace
    rows = "".join(f"2024-01-{day:02d},X,{day},{day + 1},{day},{day + 0.5},9\n" for day in range(1, 29))
    (runs / "prices.csv").write_text(f"timestamp,symbol,open,high,low,close,volume\n{rows}")
    return runs


@pytest.fixture
def single(originals, tmp_path):
    return Copies(originals / "single", tmp_path)


@pytest.fixture
def many(originals, tmp_path):
    return Copies(originals / "many", tmp_path)


@pytest.fixture
def commands(originals, tmp_path):
    """What each command is given, from the folder."""
    return {
        "inspect": lambda run: ("inspect", run, "--leaves"),
        "inspect best": lambda run: ("inspect", run, "--best"),
        "evaluate": lambda run: ("evaluate", run, "--episodes", "1"),
        "export": lambda run: ("export", run, "--onnx", tmp_path / "agent.onnx"),
        "infer": lambda run: ("infer", run, originals / "prices.csv"),
        "report": lambda run: ("report", run),
        "train": lambda run: ("train", "--resume", run),
        "tune": lambda run: ("tune", "--resume", run),
        "config": lambda run: ("config", run / "config.yaml"),
        "full": lambda run: ("config", run / "config.yaml", "--full"),
        "convert": lambda run: ("convert", run / "checkpoints" / "checkpoint_000000000032.zip", tmp_path / "new.zip"),
    }


FILES = [
    ("single", "evaluation.json", ["report"]),
    ("single", "attacks.json", ["report"]),
    ("single", "phases.json", ["report"]),
    ("single", "checkpoints/latest", ["inspect", "train"]),
    ("single", "checkpoints/best", ["inspect best", "train"]),
    ("single", "config.yaml", ["config", "full", "report", "evaluate", "infer", "export", "train"]),
    ("many", "config.yaml", ["tune", "report"]),
    ("many", "population.json", ["report"]),
    ("many", "population_state.json", ["inspect", "tune", "report", "evaluate"]),
]
LASTING = ("total_timesteps", "evaluation_episodes", "episode_length", "vectorization", "backend", "max_episode_steps")
"""Settings with which a command rightly takes long, or starts other processes."""


def attempts(copies, file, names, commands, changes):
    """What is wrong with how commands end, for every change of a file; each of them is given to one command in turn."""
    wrong = []
    for i, (what, text) in enumerate(changes):
        name = names[i % len(names)]
        run = copies.fresh()
        (run / file).write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
        if found := problem(run, *commands[name](run)):
            wrong.append(f"{name}, {what}: {found}")
    return wrong


def changes_of(copies, file):
    found = list(wild_leaves(copies.original / file))
    return [each for each in found if not any(name in each[0] for name in LASTING)]


@pytest.mark.parametrize(("kind", "file", "names"), FILES, ids=[f"{kind}-{file}" for kind, file, _ in FILES])
def test_wild_values_in_files(request, commands, kind, file, names):
    copies = request.getfixturevalue(kind)
    assert not attempts(copies, file, names, commands, sample(changes_of(copies, file), 12))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "file", "names"), FILES, ids=[f"{kind}-{file}" for kind, file, _ in FILES])
def test_every_wild_value_in_every_place(request, commands, kind, file, names):
    copies = request.getfixturevalue(kind)
    for turn in range(len(names)):
        assert not attempts(copies, file, names[turn:] + names[:turn], commands, changes_of(copies, file))


def gone(path):
    path.unlink()


def folder_instead(path):
    path.unlink()
    path.mkdir()


def pipe_instead(path):
    path.unlink()
    os.mkfifo(path)


def link_instead(path):
    outside = path.parents[2] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def endless_instead(path):
    path.unlink()
    path.symlink_to("/dev/zero")


SPOILS = [gone, folder_instead, pipe_instead, link_instead, endless_instead]
READERS = {
    "single": {
        "config.yaml": ["evaluate", "train"],
        "metrics.jsonl": ["report"],
        "evaluation.json": ["report", "train"],
        "attacks.json": ["report"],
        "phases.json": ["report"],
        "checkpoints/latest": ["inspect", "train"],
        "checkpoints/best": ["inspect best"],
        "checkpoints/checkpoint_000000000032.zip": ["inspect", "train", "convert"],
        ".lock": ["train"],
        "owner.json": ["evaluate", "train"],
    },
    "many": {
        "population.json": ["report"],
        "population_state.json": ["inspect", "tune", "report"],
        "members/member_0000_000000003.zip": ["inspect", "tune"],
    },
}


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind, files in READERS.items() for file in files])
def test_no_file_where_one_should_be(request, commands, kind, file):
    """A pipe would make whoever opens it wait, an endless file fill the memory, and a link lead to any file."""
    copies = request.getfixturevalue(kind)
    wrong = []
    for spoil in SPOILS:
        for name in READERS[kind][file]:
            run = copies.fresh()
            (copies.path.parent / "outside").unlink(missing_ok=True)
            spoil(run / file)
            if found := problem(run, *commands[name](run)):
                wrong.append(f"{name}, {spoil.__name__}: {found}")
    assert not wrong


def test_other_texts_than_files_have(request, commands):
    """Not UTF-8, nothing at all, an alias bomb, nesting without end, escape sequences."""
    wrong = []
    for kind, file, names in (("single", "metrics.jsonl", ["report"]), *FILES):
        copies = request.getfixturevalue(kind)
        texts = [(repr(text[:40]), text) for text in sample(damage.TEXTS, 6, seed=len(wrong) + len(file))]
        wrong += attempts(copies, file, names[:1], commands, texts)
    assert not wrong


def test_wild_rows_of_metrics(single, commands):
    rows = [json.loads(line) for line in (single.original / "metrics.jsonl").read_text().splitlines()]
    wrong = []
    every = [(name, value) for name in ("member", "step", "train/loss") for value in damage.WILD]
    for name, value in sample(every, 16):
        run = single.fresh()
        lines = [json.dumps(rows[0]), damage.as_json(rows[1], (name,), value)]
        (run / "metrics.jsonl").write_text("\n".join(lines))
        if found := problem(run, *commands["report"](run)):
            wrong.append(f"{name} = {str(value)[:40]}: {found}")
    assert not wrong


LAST = "checkpoints/checkpoint_000000000032.zip"


def without_rollout(tree):
    del tree["rollout"]


def unknown_component(tree):
    tree[f"x{damage.ESCAPES}"[:6]] = {"a": 1}


def drift_of_another_kind(tree):
    tree["rollout"]["lasting"] = [{"a": 1}]


def no_numbers_in_weights(tree):
    for tensor in tree["policy"].values():
        tensor.fill_(float("nan"))


def counters_are_text(tree):
    tree["counters"] = "x" * 30_000


@pytest.mark.parametrize("name", ["evaluate", "train", "infer", "inspect"])
@pytest.mark.parametrize(
    "forge", [without_rollout, unknown_component, drift_of_another_kind, no_numbers_in_weights, counters_are_text]
)
def test_checkpoints_that_are_sealed_and_wrong(single, commands, forge, name):
    run = single.fresh()
    checkpoint = read(run / LAST)
    forge(checkpoint.tree)
    write(run / LAST, checkpoint.tree, config=checkpoint.config, exact=True)
    assert not problem(run, *commands[name](run))


def test_a_checkpoint_and_a_configuration_of_different_runs(single, commands):
    """Components that the configuration does not have, and networks of other sizes."""
    for section, change in {
        "vgs": {"enabled": False, "warmup_steps": 100},
        "policy": {"net_arch": [5]},
        "adversarial": {"enabled": True},
    }.items():
        run = single.fresh()
        config = yaml.safe_load((run / "config.yaml").read_text())
        config[section] |= change
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        assert not problem(run, *commands["train"](run))
        code, _, errors, _ = command("train", "--resume", run)
        assert code == 1, section
        assert re.search(r"checkpoints? .*does not fit .*config\.yaml", errors)


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("run", {"threads": 10**9}),
        ("env", {"n_envs": 10**9}),
        ("policy", {"net_arch": [10**9]}),
        ("critic", {"num_quantiles": 10**9}),
        ("ppo", {"n_steps": 10**15}),
        ("run", {"seed": 10**30}),
    ],
)
def test_settings_that_ask_for_all_memory(single, commands, section, change):
    run = single.fresh()
    config = yaml.safe_load((run / "config.yaml").read_text())
    config[section] |= change
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert not problem(run, *commands["train"](run))
    assert not problem(run, *commands["evaluate"](run))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("members", 0, "file"), 3),
        (("members", 0, "file"), "../../member_0000_000000003.zip"),
        (("members", 0, "performance"), "good"),
        (("members", 1, "performance"), damage.DIGITS),
        (("members", 1, "hyperparams", "learning_rate"), 1e9),
        (("members", 1, "hyperparams", "learning_rate"), damage.DEPTH),
        (("scheduler", "members", 0, "lineage"), [[1, 7]]),
        (("scheduler", "generator", "uinteger"), 2**40),
        (("scheduler", "counts", "judged"), -1),
        (("config", "metric_mode"), "min"),
        (("config", "checkpoint_dir"), "/tmp/elsewhere"),
        (("total_updates",), 10**9),
    ],
)
def test_states_of_populations_that_are_refused(many, place, value):
    run = many.fresh()
    state = json.loads((run / "population_state.json").read_text())
    (run / "population_state.json").write_text(damage.as_json(state, place, value))
    before = content(run)
    code, _, errors, trace = command("tune", "--resume", run)
    assert (code, trace) == (1, "")
    (line,) = errors.splitlines()
    assert "population_state.json" in line
    assert re.search("restore|start another run", line)
    assert content(run) == before


def test_nothing_is_made_where_a_forged_state_says_that_members_are(many, tmp_path):
    """Nor are files of others removed there."""
    run, elsewhere = many.fresh(), tmp_path / "of" / "others"
    for file, place in (
        ("population_state.json", ("config", "checkpoint_dir")),
        ("config.yaml", ("pbt", "checkpoint_dir")),
    ):
        plain = yaml.safe_load((run / file).read_text())
        (run / file).write_text(damage.as_json(plain, place, str(elsewhere)))
    assert not problem(run, "tune", "--resume", run)
    assert command("tune", "--resume", run)[0] == 1
    assert not elsewhere.exists()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "metrics.jsonl"])
def test_nothing_is_written_through_links(single, tmp_path, name):
    run = single.fresh()
    (tmp_path / "elsewhere").mkdir()
    (run / name).rename(tmp_path / "elsewhere" / name)
    (run / name).symlink_to(tmp_path / "elsewhere" / name)
    before = content(tmp_path)
    code, _, errors, _ = command("train", "--resume", run, "--set", "run.total_timesteps=48")
    assert code == 1
    assert "is a link" in errors
    assert content(tmp_path) == before


def test_results_are_not_written_through_links(single, originals, tmp_path):
    mine = tmp_path / "mine"
    for name, arguments in {
        "evaluation.json": ("evaluate", "--episodes", "1"),
        "report.html": ("report",),
        "signals.csv": ("infer", originals / "prices.csv"),
    }.items():
        run = single.fresh()
        mine.write_text("mine")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
        code, _, errors, _ = command(arguments[0], run, *arguments[1:])
        assert code == 1, name
        assert "is a link" in errors
        assert mine.read_text() == "mine"


def test_names_are_escaped_wherever_they_are_shown(single, many, tmp_path):
    """On a terminal and on a page: of folders, settings, metrics, environments, baselines, events."""
    raw = "\x1b[31m\u202egnp"
    plain = r"\x1b[31m\u202egnp"
    run = many.fresh()
    config = yaml.safe_load((run / "config.yaml").read_text())
    rows = (run / "metrics.jsonl").read_text().replace('"train/loss"', json.dumps(f"loss{raw}"))
    (run / "metrics.jsonl").write_text(rows)
    (run / "evaluation.json").write_text(json.dumps({"mean": 1, "baselines": {f"base{raw}": {"mean": 2}}}))
    (run / "config.yaml").write_text(json.dumps({**config, f"set{raw}": f"to{raw}"}))
    named = run.rename(tmp_path / f"run{raw}")
    code, output, errors, trace = command("report", named)
    assert (code, errors, trace) == (0, "", "")
    assert f"run{plain}/report.html" in output
    page = (named / "report.html").read_text().split('<script type="application/json"')[0]
    for name in ("run", "base", "loss", "set", "to"):
        assert f"{name}{plain}" in page.replace("\\u001b", r"\x1b")
    assert "\x1b" not in page
    assert "\u202e" not in page
    code, _, errors, trace = command("evaluate", named)
    assert (code, trace) == (1, "")
    assert f"set{plain}" in errors
    assert errors.rstrip("\n").isprintable()


def test_the_live_view_takes_names_for_no_more_than_names():
    from rich.console import Console

    from driftproof.cli.view import AgentStatus

    status = AgentStatus("runs/[red]a\x1b[2J\u202e", 0, 10)
    status.update({"step": 5, "drift/[bold]wind\x1b[2J": 1.0})
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(status.renderable())
    console.file.close()
    shown = console.export_text()
    assert r"runs/[red]a\x1b[2J\u202e" in shown
    assert r"drift/[bold]wind\x1b[2J" in shown
    assert "\x1b" not in shown


def test_tags_of_tensorboard_are_escaped(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from driftproof.runs.folder import RunFolder

    folder = RunFolder(tmp_path)
    with folder.locked():
        folder.log(0, [{"step": 1, "drift/\x1b[31m\ud800": 1.0}])
    tags = EventAccumulator(str(tmp_path / "tensorboard" / "member_0000")).Reload().Tags()["scalars"]
    assert tags == [r"drift/\x1b[31m\ud800"]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


def bounded():
    """With fewer addresses than any of these files asks for; torch and plotly alone take some gigabytes of them."""
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))


@pytest.mark.parametrize(
    ("file", "text", "arguments"),
    [
        ("config.yaml", BOMB, ["report"]),
        ("metrics.jsonl", None, ["report"]),
        pytest.param("config.yaml", BOMB, ["evaluate"], marks=pytest.mark.slow),
        pytest.param("attacks.json", "[" + "[]," * 20_000_000 + "[]]", ["report"], marks=pytest.mark.slow),
    ],
    ids=["aliases-report", "sparse-metrics", "aliases-evaluate", "many-values"],
)
def test_memory_and_time_are_bounded(single, file, text, arguments):
    run = single.fresh()
    if text is None:
        with open(run / file, "r+b") as sparse:
            sparse.truncate(20 * 2**30)
    else:
        (run / file).write_text(text)
    program = (
        "import resource, sys; from driftproof.cli.app import main\n"
        "try: main()\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, run],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=ENVIRONMENT,
        timeout=60,
        preexec_fn=bounded,
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"driftproof: {run / file}")
    assert int(done.stdout.split()[-1]) < 1.5 * 2**20, "kilobytes"
