"""How long a step takes: UPGD against AdamW, fast form against reference form, with and without VGS.

    python benchmarks/optim_speed.py                  # about four minutes
    python benchmarks/optim_speed.py --device cuda
    python benchmarks/optim_speed.py --compiled       # torch.compile(step) against step; minutes to compile

Candidates take turns, and ratios are of the same turn: compare those, not milliseconds of different runs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable

import common
import numpy as np
import torch
from torch import Tensor, nn

from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler

BASELINE = "AdamW foreach"


class Agent(nn.Module):
    """Actor and critic with an LSTM of 256 and two 64-wide layers each: 20 tensors, 0.7M parameters."""

    def __init__(self, observation: int = 64, actions: int = 2, quantiles: int = 32) -> None:
        super().__init__()
        self.cores = nn.ModuleList(nn.LSTM(observation, 256) for _ in range(2))
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, size))
            for size in (actions, quantiles)
        )

    def forward(self, observations: Tensor) -> list[Tensor]:
        return [head(core(observations)[0]) for core, head in zip(self.cores, self.heads, strict=True)]


def mlp() -> nn.Module:
    sizes = [64, 128, 128, 128, 128, 10]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def many() -> nn.Module:
    return nn.Sequential(*(nn.Linear(316, 632) for _ in range(100)))


MODELS: dict[str, Callable[[], nn.Module]] = {"MLP": mlp, "LSTM agent": Agent, "200 tensors": many}

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW loop": lambda p: torch.optim.AdamW(p, foreach=False),
    BASELINE: lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdaptiveUPGD": lambda p: AdaptiveUPGD(p, sigma=0.0),
    "AdaptiveUPGD, noise": AdaptiveUPGD,
    "AdaptiveUPGD, adaptive noise": lambda p: AdaptiveUPGD(p, adaptive_noise=True),
    "AdaptiveUPGD, min-max gate": lambda p: AdaptiveUPGD(p, sigma=0.0, gate="minmax"),
    "AdaptiveUPGD reference": lambda p: AdaptiveUPGD(p, sigma=0.0, foreach=False),
    "AdaptiveUPGD reference, noise": lambda p: AdaptiveUPGD(p, foreach=False),
    "UPGD": lambda p: UPGD(p, sigma=0.0),
    "UPGD, noise": UPGD,
    "UPGDW, noise": UPGDW,
}


def with_gradients(model: nn.Module, device: str) -> list[Tensor]:
    params = list(model.to(device).parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = optimizer.state_dict()["state"].values()
    return sum(t.numel() * t.element_size() for state in states for t in state.values() if t.numel() > 1)


def cpu_steps(rounds: int) -> list[str]:
    sections = []
    for model_name, make in MODELS.items():
        torch.manual_seed(0)
        candidates, bytes_per_parameter = {}, {}
        for name, build in OPTIMIZERS.items():
            params = with_gradients(make(), "cpu")
            optimizer = build(params)
            candidates[name] = optimizer.step
            optimizer.step()
            bytes_per_parameter[name] = state_bytes(optimizer) / sum(p.numel() for p in params)
        count, tensors = sum(p.numel() for p in params), len(params)
        if model_name == "LSTM agent":
            candidates["torch.randn of as many numbers"] = lambda n=count: torch.randn(n)
        big = count > 5_000_000
        times = common.alternate(candidates, rounds=max(3, rounds // 4) if big else rounds, repeats=3 if big else 10)
        rows = [
            [
                name,
                f"{1e3 * np.median(times[name]):.2f}",
                f"{common.ratio(times, name, BASELINE):.2f}×",
                f"{bytes_per_parameter[name]:.0f}" if name in bytes_per_parameter else "",
            ]
            for name in candidates
        ]
        title = (
            f"{model_name}: {tensors} tensors, {count / 1e6:.2f}M parameters, CPU, {torch.get_num_threads()} threads"
        )
        sections.append(common.show_table(title, ["step", "ms", "to AdamW foreach", "state bytes per parameter"], rows))
        if model_name == "LSTM agent":
            sections.append(promises(times))
            plot(times, title, "optim_speed.png")
    return sections


def promises(times: dict[str, np.ndarray]) -> str:
    """The limits that the project set itself for the agent on a CPU."""
    randn = common.ratio(times, "torch.randn of as many numbers", BASELINE)
    plain = common.ratio(times, "AdaptiveUPGD", BASELINE)
    noisy = common.ratio(times, "AdaptiveUPGD, noise", BASELINE)
    speedup = common.ratio(times, "AdaptiveUPGD reference", "AdaptiveUPGD")
    speedup_noisy = common.ratio(times, "AdaptiveUPGD reference, noise", "AdaptiveUPGD, noise")
    rows = [
        ["σ = 0, to AdamW foreach", f"{plain:.2f}×", "at most 2.5×"],
        ["with noise, to AdamW foreach", f"{noisy:.2f}×", f"at most {2.5 + randn:.2f}× (2.5 + torch.randn)"],
        ["σ = 0, faster than the reference form", f"{speedup:.1f}×", "at least 4×"],
        ["with noise, faster than the reference form", f"{speedup_noisy:.1f}×", "at least 2.5×"],
    ]
    return common.show_table("AdaptiveUPGD on the LSTM agent", ["", "measured", "wanted"], rows)


def minibatch_cost(rounds: int) -> str:
    """A whole minibatch of the agent, 8 sequences of 32 steps: forward, backward, clip, step, and VGS around it."""

    def minibatch(mode: str | None, statistic: str = "elementwise") -> Callable[[], None]:
        torch.manual_seed(0)
        agent = Agent()
        optimizer = AdaptiveUPGD(agent.parameters(), lr=1e-4)
        scaler = None
        if mode is not None:
            scaler = VarianceGradientScaler(agent.parameters(), apply_to=mode, statistic=statistic)
            if mode == "update":
                scaler.attach(optimizer)
        observations = torch.randn(32, 8, 64)

        def run() -> None:
            optimizer.zero_grad()
            loss = sum(output.square().mean() for output in agent(observations))
            loss.backward()
            if scaler is not None:
                scaler.scale_gradients()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            if scaler is not None:
                scaler.step()

        return run

    candidates = {
        "without": minibatch(None),
        "gradient": minibatch("gradient"),
        "update": minibatch("update"),
        "gradient, spatial mean": minibatch("gradient", "spatial_mean"),
    }
    times = common.alternate(candidates, rounds, repeats=5)
    rows = [
        [name, f"{1e3 * np.median(t):.2f}", f"{100 * (common.ratio(times, name, 'without') - 1):+.1f}%"]
        for name, t in times.items()
    ]
    title = f"VGS in a minibatch of 256 samples, CPU, {torch.get_num_threads()} threads (at most +10% wanted)"
    return common.show_table(title, ["VGS", "ms", "to without"], rows)


def cuda_steps(rounds: int) -> list[str]:
    baseline = "AdamW foreach, capturable"
    builders: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        baseline: lambda p: torch.optim.AdamW(p, foreach=True, capturable=True),
        "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True, capturable=True),
        "AdaptiveUPGD": lambda p: AdaptiveUPGD(p, sigma=0.0),
        "AdaptiveUPGD, noise": AdaptiveUPGD,
        "AdaptiveUPGD, capturable": lambda p: AdaptiveUPGD(p, sigma=0.0, capturable=True),
        "AdaptiveUPGD, capturable, noise": lambda p: AdaptiveUPGD(p, capturable=True),
        "AdaptiveUPGD reference, noise": lambda p: AdaptiveUPGD(p, foreach=False, capturable=True),
        "UPGD, capturable, noise": lambda p: UPGD(p, capturable=True),
    }
    sections = []
    for model_name, make in MODELS.items():
        eager: dict[str, Callable[[], object]] = {}
        graphs: dict[str, Callable[[], object]] = {}
        for name, build in builders.items():
            params = with_gradients(make(), "cuda")
            optimizer = build(params)
            eager[name] = optimizer.step
            if optimizer.defaults["capturable"]:
                graphs[name] = capture(optimizer.step).replay
        count, tensors = sum(p.numel() for p in params), len(params)
        times = common.alternate(eager, rounds, repeats=30, synchronize=torch.cuda.synchronize)
        replays = common.alternate(graphs, rounds, repeats=100, synchronize=torch.cuda.synchronize)
        rows = []
        for name, seconds in times.items():
            row = [name, f"{1e6 * np.median(seconds):.0f}", f"{common.ratio(times, name, baseline):.2f}×"]
            if name in replays:
                row += [f"{1e6 * np.median(replays[name]):.0f}", f"{common.ratio(replays, name, baseline):.2f}×"]
            rows.append(row + [""] * (5 - len(row)))
        title = f"{model_name}: {tensors} tensors, {count / 1e6:.2f}M parameters, {torch.cuda.get_device_name()}"
        columns = ["step", "eager µs", "to AdamW foreach", "CUDA graph µs", "to AdamW foreach"]
        sections.append(common.show_table(title, columns, rows))
        if model_name == "LSTM agent":
            plot(times, title, "optim_speed_cuda.png")
    return sections


def compiled_steps(rounds: int, models: list[str]) -> list[str]:
    """Steps under ``torch.compile`` against the same steps without, after warm-up."""
    builders = {
        name: OPTIMIZERS[name]
        for name in (BASELINE, "UPGD", "UPGD, noise", "AdaptiveUPGD", "AdaptiveUPGD, noise", "UPGDW, noise")
    } | {"UPGDW": lambda p: UPGDW(p, sigma=0.0)}
    # Each optimizer is one more compilation of the same function.
    torch._dynamo.config.recompile_limit = 64
    sections = []
    for model_name in models:
        candidates: dict[str, Callable[[], object]] = {}
        for name, build in builders.items():
            for how in ("eager", "compiled"):
                torch.manual_seed(0)
                step = build(with_gradients(MODELS[model_name](), "cpu")).step
                # AdamW's step has a graph break of torch's own.
                compiled = torch.compile(step, fullgraph=name != BASELINE) if how == "compiled" else step
                compiled()
                candidates[f"{name}, {how}"] = compiled
        times = common.alternate(candidates, rounds, repeats=10)
        rows = [
            [name]
            + [f"{1e3 * np.median(times[f'{name}, {how}']):.3f}" for how in ("eager", "compiled")]
            + [f"{common.ratio(times, f'{name}, compiled', f'{name}, eager'):.2f}×"]
            for name in sorted(builders)
        ]
        title = f"{model_name}, CPU, {torch.get_num_threads()} threads"
        columns = ["step", "eager ms", "compiled ms", "compiled to eager"]
        sections.append(common.show_table(title, columns, rows))
    return sections


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def plot(times: dict[str, np.ndarray], title: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(times)[::-1]
    medians = [1e3 * np.median(times[name]) for name in names]
    colours = [common.COLOURS["ours" if "UPGD" in n and "reference" not in n else "theirs"] for n in names]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    bars = axes.barh(names, medians, color=colours)
    axes.bar_label(bars, fmt="%.2f ms", padding=4, fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, 1.15 * max(medians))
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.xaxis.set_visible(False)
    figure.tight_layout()
    common.RESULTS.mkdir(exist_ok=True)
    figure.savefig(common.RESULTS / path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads on the CPU")
    parser.add_argument("--rounds", type=int, default=24, help="turns of each candidate")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compiled", action="store_true", help="compare with torch.compile, on the CPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["MLP", "LSTM agent"], help="for --compiled")
    arguments = parser.parse_args()
    command = " ".join(["python benchmarks/optim_speed.py", *sys.argv[1:]])
    if arguments.device == "cuda":
        common.write_result("optim_speed_cuda", command, cuda_steps(arguments.rounds))
        return
    if arguments.compiled:
        torch.set_num_threads(arguments.threads[0])
        common.write_result("optim_speed_compiled", command, compiled_steps(arguments.rounds, arguments.models))
        return
    sections = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        sections += cpu_steps(arguments.rounds)
        sections.append(minibatch_cost(arguments.rounds))
    common.write_result("optim_speed", command, sections)


if __name__ == "__main__":
    main()
